"""What starves a pattern is found with few tries, and nothing that can be spared is named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from optimus.needs import needed

NAMES = [f"p{i}" for i in range(40)]


@pytest.mark.parametrize(
    "truth", [("p7",), ("p0", "p39"), ("p3", "p4", "p20"), ("p39",), tuple(NAMES[:5])]
)
def test_all_that_is_needed_and_no_more(truth: tuple[str, ...]) -> None:
    tries = []

    def fires(names: Sequence[str]) -> int:
        tries.append(names)
        return 2 if set(truth) <= set(names) else 0

    assert needed(fires, NAMES) == truth
    assert len(tries) < 45
    assert all(list(names) == sorted(names, key=NAMES.index) for names in tries)


def test_nothing_helps() -> None:
    assert needed(lambda names: 0, NAMES) is None
    assert needed(lambda names: 0, []) is None
