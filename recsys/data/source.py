"""Where rows come from: anything that turns row numbers into a batch, without a loop over rows."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from recsys.data.batch import Batch, fixed_hot_kjt
from recsys.data.plan import Rows
from recsys.data.shuffle import permute


class Source(Protocol):
    """Random access by whole batches. Must be cheap to fork into worker processes."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def batch(self, rows: Rows) -> Batch:
        """The batch of these rows, in this order."""
        ...


class SplitSource:
    """A contiguous range of rows of another source."""

    def __init__(self, source: Source, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(source):
            raise ValueError(f"rows {start} to {stop} are not within {len(source)} rows")
        self._source, self._start, self._stop = source, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def batch(self, rows: Rows) -> Batch:
        """The batch of these rows, counted from the start of the range."""
        if isinstance(rows, slice):
            return self._source.batch(slice(rows.start + self._start, rows.stop + self._start))
        return self._source.batch(rows + self._start)


class PermutedSource:
    """The rows of another source in a random order fixed by `key`."""

    def __init__(self, source: Source, key: int) -> None:
        self._source, self._key = source, key

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, rows: Rows) -> Batch:
        """The batch of these rows of the new order."""
        index = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return self._source.batch(permute(index, len(self), self._key))


class MemorySource:
    """One-hot (or fixed-hot) rows held in memory, one array a part.

    Shapes: `dense` float32 (N, num_dense); `sparse` int32 (N, sum(hotness)), ids of one feature
    side by side; `labels` float32 (N, num_tasks).
    """

    def __init__(
        self,
        keys: tuple[str, ...],
        dense: NDArray[np.float32],
        sparse: NDArray[np.int32],
        labels: NDArray[np.float32],
        hotness: tuple[int, ...] | None = None,
    ) -> None:
        self._keys = keys
        self._hotness = hotness or (1,) * len(keys)
        self._dense, self._sparse, self._labels = dense, sparse, labels
        if not len(dense) == len(sparse) == len(labels):
            raise ValueError(f"{len(dense)} dense, {len(sparse)} sparse, {len(labels)} label rows")

    @classmethod
    def of(cls, source: Source, hotness: tuple[int, ...], name: str = "rows") -> MemorySource:
        """All rows of a fixed-hot source, read once, with a progress bar called `name`."""
        total, first = len(source), source.batch(slice(0, 1))
        dense = np.empty((total, first.dense.shape[1]), dtype=np.float32)
        sparse = np.empty((total, sum(hotness)), dtype=np.int32)
        labels = np.empty((total, first.labels.shape[1]), dtype=np.float32)
        with tqdm(total=total, desc=name, unit="row", unit_scale=True, leave=False) as bar:
            for start, stop in blocks_of(total):
                batch = source.batch(slice(start, stop))
                dense[start:stop], labels[start:stop] = batch.dense, batch.labels
                sparse[start:stop] = _row_major(batch)
                bar.update(stop - start)
        return cls(tuple(first.sparse.keys()), dense, sparse, labels, hotness)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, rows: Rows) -> Batch:
        """The batch of these rows."""
        ids = self._sparse[rows]
        return assemble(self._keys, self._dense[rows], ids, self._labels[rows], self._hotness)


def blocks_of(total: int, size: int = 4096) -> list[tuple[int, int]]:
    """Starts and ends of consecutive blocks of at most `size` rows."""
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def _row_major(batch: Batch) -> torch.Tensor:
    parts = torch.split(batch.sparse.values(), batch.sparse.length_per_key())
    return torch.cat([part.view(len(batch), -1) for part in parts], dim=1)


def assemble(
    keys: tuple[str, ...],
    dense: NDArray[np.float32],
    ids: NDArray[np.int32] | NDArray[np.int64],
    labels: NDArray[np.float32],
    hotness: tuple[int, ...],
) -> Batch:
    """A batch from row-major arrays: dense (B, num_dense), ids (B, sum(hotness)), labels (B, T)."""
    if all(hot == 1 for hot in hotness):
        values = np.ascontiguousarray(ids.T, dtype=np.int64).reshape(-1)
    else:
        ends = np.cumsum(hotness)
        parts = [
            ids[:, end - hot : end].reshape(-1) for end, hot in zip(ends, hotness, strict=True)
        ]
        values = np.concatenate(parts).astype(np.int64)
    sparse = fixed_hot_kjt(keys, torch.from_numpy(values), len(ids), hotness)
    return Batch(_tensor(dense), sparse, _tensor(labels))


def _tensor(array: NDArray[np.float32]) -> torch.Tensor:
    # A slice is a view of the source: copied, or an in-place operation on a batch would change the
    # data of every later epoch.
    fresh = array.flags.owndata and array.dtype == np.float32
    return torch.from_numpy(array if fresh else np.array(array, dtype=np.float32))
