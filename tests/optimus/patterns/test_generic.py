"""The generic suite over every pattern and its examples."""

from __future__ import annotations

import pytest

from optimus.pipeline import patterns_by_name
from optimus.testing import check_pattern


@pytest.mark.parametrize("name", patterns_by_name())
def test_pattern(name: str) -> None:
    check_pattern(name)
