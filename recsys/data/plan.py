"""Which rows make up batch i of an epoch, for each rank: nothing but arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys.data.shuffle import key64, permute

SHUFFLES = ("rows", "batches", "none")

Rows = slice | NDArray[np.int64]


class TooFewRows(ValueError):
    """Training rows that do not fill one batch on each rank."""


@dataclass(frozen=True)
class TrainPlan:
    """Full batches only, the same number on every rank, no row twice in an epoch.

    `shuffle`: "rows" draws every row anew each epoch; "batches" keeps a batch's rows together (one
    sequential read a batch) and shuffles the batches; "none" keeps the order of the data. In global
    batch i the ranks hold its consecutive parts, so that the order seen by a model depends on
    batch_size * world_size alone. At most batch_size * world_size - 1 rows are left out an epoch,
    under "rows" other ones each time.
    """

    num_rows: int
    batch_size: int
    shuffle: str = "rows"
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.shuffle not in SHUFFLES:
            raise ValueError(f"shuffle is {self.shuffle!r}, must be one of {SHUFFLES}")
        _check_rank(self.rank, self.world_size)
        if self.num_batches == 0:
            raise TooFewRows(
                f"{self.num_rows} training rows do not fill one batch of {self.batch_size} on each "
                f"of {self.world_size} ranks: lower batch_size"
            )

    @property
    def num_batches(self) -> int:
        """Batches an epoch, on each rank."""
        return self.num_rows // (self.batch_size * self.world_size)

    def rows(self, epoch: int, index: int) -> Rows:
        """Row numbers of this rank's batch `index` of `epoch`."""
        place = index * self.world_size + self.rank
        key = key64(self.seed, epoch)
        if self.shuffle == "batches":
            whole = self.num_batches * self.world_size
            place = int(permute(np.array([place]), whole, key)[0])
        start = place * self.batch_size
        if self.shuffle == "rows":
            return permute(np.arange(start, start + self.batch_size), self.num_rows, key)
        return slice(start, start + self.batch_size)


@dataclass(frozen=True)
class EvalPlan:
    """Every row once, in order; each rank a contiguous part, the same number of batches on each."""

    num_rows: int
    batch_size: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        _check_rank(self.rank, self.world_size)
        if self.num_rows < self.num_batches * self.world_size or self.num_rows < 1:
            raise ValueError(f"{self.num_rows} rows are too few for {self.world_size} ranks")

    @property
    def num_batches(self) -> int:
        """Batches on each rank."""
        longest = -(-self.num_rows // self.world_size)
        return -(-longest // self.batch_size)

    def rows(self, epoch: int, index: int) -> Rows:
        """Row numbers of this rank's batch `index`; `epoch` makes no difference."""
        del epoch
        first = self.num_rows * self.rank // self.world_size
        last = self.num_rows * (self.rank + 1) // self.world_size
        return slice(
            first + self._bound(index, last - first), first + self._bound(index + 1, last - first)
        )

    def _bound(self, index: int, size: int) -> int:
        # Ranks differ by at most one row; where that row would make a batch more on some ranks
        # only, the others take their last one from the batch before, since collective operations
        # need equal numbers of batches.
        if index == self.num_batches:
            return size
        return min(index * self.batch_size, size - (self.num_batches - index))


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, must be in [0, {world_size})")
