"""The computed order is a permutation, looks random and depends on the key alone."""

from __future__ import annotations

import numpy as np
import pytest

from recsys.data.shuffle import key64, permute


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100, 1009, 65_537])
def test_is_a_permutation(size: int) -> None:
    order = permute(np.arange(size), size, key=5)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_any_part_can_be_computed_alone() -> None:
    whole = permute(np.arange(10_000), 10_000, key=1)
    assert np.array_equal(permute(np.arange(300, 700), 10_000, key=1), whole[300:700])


def test_depends_on_the_key() -> None:
    first, second = (permute(np.arange(10_000), 10_000, key) for key in (1, 2))
    assert np.mean(first == second) < 0.01
    assert key64(1, 2) != key64(2, 1)


def test_positions_and_neighbours_are_uncorrelated() -> None:
    size = 100_000
    order = permute(np.arange(size), size, key=3).astype(np.float64)
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.02
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    # The mean gap of neighbours in a random order is a third of the size.
    assert abs(np.abs(np.diff(order)).mean() / size - 1 / 3) < 0.01


def test_refuses_indices_outside() -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 10\)"):
        permute(np.array([10]), 10, key=0)


def test_empty() -> None:
    assert permute(np.empty(0, dtype=np.int64), 10, key=0).size == 0
