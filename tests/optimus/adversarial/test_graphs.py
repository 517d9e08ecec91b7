"""Every graph written to mislead a rewriter does under all patterns what it does in eager mode."""

from __future__ import annotations

import pytest

from tests.optimus.adversarial import contexts, layers, layouts, numbers
from tests.optimus.adversarial.graphs import Case, check

EVERY = [p for file in (layouts, numbers, layers, contexts) for p in file.graphs.params()]


@pytest.mark.parametrize(("case", "mode"), EVERY)
def test_graph(case: Case, mode: str) -> None:
    check(case, mode)


def test_names_differ() -> None:
    names = [p.id for p in EVERY]
    assert len(set(names)) == len(names)
