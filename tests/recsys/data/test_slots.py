"""Batches through shared memory: nothing lost, nothing overwritten too early."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from recsys.data import Batch, fixed_hot_kjt, jagged_kjt
from recsys.data.loader import BatchLoader
from recsys.data.plan import Rows, TrainPlan
from recsys.data.slots import Packed, Slots


def fixed(size: int) -> Batch:
    sparse = fixed_hot_kjt(["x", "y"], torch.arange(3 * size), size, [1, 2])
    return Batch(torch.rand(size, 5), sparse, torch.rand(size, 2))


def jagged(size: int) -> Batch:
    lengths = torch.stack([torch.arange(size) % 3, torch.ones(size, dtype=torch.int64)])
    sparse = jagged_kjt(["x", "y"], torch.arange(int(lengths.sum())), lengths)
    return Batch(torch.rand(size, 0), sparse, torch.rand(size, 1))


def assert_equal(first: Batch, second: Batch) -> None:
    assert torch.equal(first.dense, second.dense)
    assert torch.equal(first.labels, second.labels)
    assert first.sparse.keys() == second.sparse.keys()
    assert torch.equal(first.sparse.values(), second.sparse.values())
    assert torch.equal(first.sparse.lengths(), second.sparse.lengths())
    assert first.sparse.length_per_key() == second.sparse.length_per_key()
    assert first.sparse.stride() == second.sparse.stride()


@pytest.mark.parametrize("make", [fixed, jagged])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_batch_comes_out_as_it_went_in(make: Callable[[int], Batch], size: int) -> None:
    batch = make(size)
    packed = Packed.of(batch, slot=1)
    slots = Slots(2, packed.num_bytes)
    assert slots.put(1, batch) == packed
    taken = slots.take(packed)
    assert_equal(taken, batch)
    slots.put(1, make(size))
    assert_equal(taken, batch)


def test_parts_are_aligned() -> None:
    packed = Packed.of(fixed(7), 0)
    assert all(start % 128 == 0 for start, *_ in packed.layout())


def test_a_batch_too_large_goes_the_other_way() -> None:
    batch = fixed(64)
    assert Slots(1, 100).put(0, batch) is batch


class Ragged:
    """Rows with a bag of as many ids as the row number says, modulo 5; number 40 has 1000."""

    def __len__(self) -> int:
        return 96

    def batch(self, rows: Rows) -> Batch:
        number = np.arange(96)[rows]
        counts = np.where(number == 40, 1000, number % 5)
        values, lengths = (
            torch.from_numpy(np.repeat(number, counts)),
            torch.from_numpy(counts[None]),
        )
        column = torch.from_numpy(number[:, None].astype(np.float32))
        return Batch(column, jagged_kjt(["x"], values, lengths), column.clone())


def test_workers_give_the_same_batches_and_leave_those_in_hand_alone() -> None:
    plan = TrainPlan(96, 4, seed=1)
    here, there = (BatchLoader(Ragged(), plan, num_workers=n, prefetch_batches=2) for n in (0, 2))
    for _ in range(2):
        kept = list(there)  # all of an epoch at once: 24 batches from 7 slots
        for first, second in zip(here, kept, strict=True):
            assert_equal(first, second)
    there.close()
    for first, second in zip(here, there, strict=True):
        assert_equal(first, second)
