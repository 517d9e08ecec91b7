"""Rows of Criteo's memory-mapped arrays as batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.data.batch import Batch
from recsys.data.criteo_files import Day
from recsys.data.criteo_format import SPARSE_NAMES
from recsys.data.plan import Rows
from recsys.data.source import assemble


class CriteoSource:
    """The rows of some days, one after the other.

    `sizes`: rows of each table. `hashed`: the ids are 32-bit words and 0 is "missing": it gets row
    0 and the words share the others, modulo their number; otherwise ids are taken modulo the size.
    """

    def __init__(self, days: Sequence[Day], sizes: tuple[int, ...], hashed: bool) -> None:
        self._days, self._hashed = list(days), hashed
        self._hotness = days[0].hotness
        if any(day.hotness != self._hotness for day in days):
            raise ValueError(f"days differ in ids a sample: {[day.hotness for day in days]}")
        self._starts = np.cumsum([0, *(len(day) for day in days)])
        rows = np.array(sizes, dtype=np.uint32) - np.uint32(hashed)
        self._modulus = np.repeat(rows, self._hotness)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def batch(self, rows: Rows) -> Batch:
        """The batch of these rows."""
        parts = self._by_day(rows)
        pieces = [self._read(day, part) for day, part, _ in parts]
        dense, words, labels = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        if isinstance(rows, np.ndarray) and len(parts) > 1:
            back = np.argsort(np.concatenate([place for _, _, place in parts]))
            dense, words, labels = dense[back], words[back], labels[back]
        return assemble(SPARSE_NAMES, dense, self._table_rows(words), labels, self._hotness)

    def _by_day(self, rows: Rows) -> list[tuple[Day, Rows, NDArray[np.int64]]]:
        """Day, rows within it, and their places in the batch."""
        none = np.empty(0, dtype=np.int64)
        spans = list(zip(self._days, self._starts[:-1], self._starts[1:], strict=True))
        if isinstance(rows, slice):
            cut = [(d, max(rows.start, a) - a, min(rows.stop, b) - a) for d, a, b in spans]
            return [(day, slice(start, stop), none) for day, start, stop in cut if start < stop]
        found = [(day, a, np.flatnonzero((rows >= a) & (rows < b))) for day, a, b in spans]
        return [(day, rows[place] - a, place) for day, a, place in found if place.size]

    def _read(self, day: Day, rows: Rows) -> tuple[NDArray[Any], ...]:
        dense = day.dense.array[rows].astype(np.float32, copy=False)
        words = [part.array[rows] for part in day.sparse]
        labels = day.labels.array[rows].reshape(-1, 1).astype(np.float32)
        joined = words[0] if len(words) == 1 else np.concatenate(words, axis=1)
        return dense, joined.astype(np.int32, copy=False).view(np.uint32), labels

    def _table_rows(self, words: NDArray[np.uint32]) -> NDArray[np.int32]:
        rows = words % self._modulus
        if self._hashed:
            rows += 1
            rows *= words != 0
        return rows.view(np.int32)
