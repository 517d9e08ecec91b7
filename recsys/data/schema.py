"""What a data set offers a model: its dense features, its embedding tables and its tasks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recsys.data.batch import Batch

POOLINGS = ("sum", "mean")


@dataclass(frozen=True)
class SparseFeature:
    """One sparse feature and the embedding table behind it.

    `num_embeddings` is the number of rows: every id is in [0, num_embeddings). `hotness` is the
    average number of ids a sample (1 for a one-hot feature), for planning only.
    """

    name: str
    num_embeddings: int
    pooling: str = "sum"
    hotness: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a sparse feature needs a name")
        if self.num_embeddings < 1:
            raise ValueError(f"{self.name}: num_embeddings is {self.num_embeddings}, must be >= 1")
        if self.pooling not in POOLINGS:
            raise ValueError(f"{self.name}: pooling is {self.pooling!r}, must be one of {POOLINGS}")


@dataclass(frozen=True)
class Schema:
    """Names and sizes of everything in a batch, in the order the batch holds them."""

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    tasks: tuple[str, ...] = ("click",)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("a schema needs at least one task")
        for kind, names in (("dense", self.dense), ("sparse", self.keys), ("task", self.tasks)):
            repeated = [name for name, count in Counter(names).items() if count > 1]
            if repeated:
                raise ValueError(f"{kind} names must differ, these are repeated: {repeated}")

    @property
    def keys(self) -> tuple[str, ...]:
        """Sparse feature names, in the order of `Batch.sparse.keys()`."""
        return tuple(feature.name for feature in self.sparse)

    @property
    def num_dense(self) -> int:
        """Columns of `Batch.dense`; may be 0."""
        return len(self.dense)

    @property
    def num_sparse(self) -> int:
        """Number of sparse features, each with a table of its own."""
        return len(self.sparse)

    @property
    def num_tasks(self) -> int:
        """Columns of `Batch.labels`."""
        return len(self.tasks)

    def check(self, batch: Batch) -> None:
        """Raise ValueError, naming what differs, unless `batch` is one of this schema's.

        Reads every id (a device synchronisation on a GPU): for tests and first batches, not for
        each step.
        """
        size = len(batch)
        _expect("dense shape", tuple(batch.dense.shape), (size, self.num_dense))
        _expect("labels shape", tuple(batch.labels.shape), (size, self.num_tasks))
        _expect("sparse keys", tuple(batch.sparse.keys()), self.keys)
        _expect("sparse stride", batch.sparse.stride(), size)
        for feature in self.sparse:
            ids = batch.sparse[feature.name].values()
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < feature.num_embeddings:
                raise ValueError(
                    f"{feature.name}: ids run from {int(ids.min())} to {int(ids.max())}, "
                    f"its table has {feature.num_embeddings} rows"
                )


def _expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise ValueError(f"{what} is {got}, the schema says {wanted}")
