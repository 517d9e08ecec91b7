"""How many rows each of Criteo's embedding tables gets, from what is in the data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from recsys.data.atomic import written
from recsys.data.criteo_files import Day
from recsys.data.criteo_format import NUM_SPARSE

_BITS = 1 << 20
_BLOCK = 1 << 18
# A small table gets more rows than values, so that few of them share a row; a large one as many.
_SMALL = 10_000
_ROOM = 4


def mark_seen(day: Day, file: Path) -> None:
    """Write which of a million hash buckets each column of a day falls into: uint8 (26, 131072).

    Skipped when the file is there and newer than the day. From it `hashed_sizes` estimates the
    number of distinct values of any set of days.
    """
    if file.exists() and file.stat().st_mtime_ns > day.modified_ns:
        return
    seen = np.zeros((NUM_SPARSE, _BITS), dtype=np.bool_)
    for block in _blocks(day, f"counting ids of {day.name}"):
        words = block.view(np.uint32) * np.uint32(0x9E3779B1) >> np.uint32(12)
        for column in range(NUM_SPARSE):
            seen[column, words[:, column]] = True
    seen[:, 0] = False  # where "missing" falls, which has a row of its own
    with written(file) as out:
        np.save(out, np.packbits(seen, axis=1))


def hashed_sizes(files: Iterable[Path], cap: int) -> tuple[int, ...]:
    """Rows for tables of hashed ids and a "missing" row 0, from what `mark_seen` wrote of days."""
    seen = np.zeros((NUM_SPARSE, _BITS // 8), dtype=np.uint8)
    for file in files:
        seen |= np.load(file)
    filled = np.unpackbits(seen, axis=1).sum(axis=1)
    return tuple(_hashed_size(int(count), cap) for count in filled)


def _hashed_size(filled: int, cap: int) -> int:
    # Linear counting (Whang, 1990): buckets hit tell how many values there were.
    empty = max(_BITS - filled, 1) / _BITS
    distinct = round(-_BITS * math.log(empty))
    return max(2, min(cap, 1 + distinct * (_ROOM if distinct < _SMALL else 1)))


def contiguous_sizes(days: Sequence[Day], cap: int, cache: Path) -> tuple[int, ...]:
    """Rows for tables of ids that count from 0: the largest id of each feature, and one more.

    Reads every id the first time; `cache` keeps the answer. Raises ValueError for negative ids,
    which are hashes and need sizes given.
    """
    key = [[day.name, len(day)] for day in days]
    if cache.exists():
        saved = json.loads(cache.read_text())
        if saved["days"] == key:
            return tuple(min(cap, size) for size in saved["sizes"])
    sizes = np.max([_largest(day) for day in days], axis=0) + 1
    cache.parent.mkdir(parents=True, exist_ok=True)
    with written(cache) as out:
        out.write(json.dumps({"days": key, "sizes": sizes.tolist()}).encode())
    return tuple(min(cap, int(size)) for size in sizes)


def _largest(day: Day) -> NDArray[np.int64]:
    largest = np.zeros(NUM_SPARSE, dtype=np.int64)
    for block in _blocks(day, f"largest ids of {day.name}"):
        if block.min() < 0:
            raise ValueError(
                f"{day.name} holds negative ids, so they are hashes: give num_embeddings"
            )
        ends = np.cumsum(day.hotness)
        tops = [block[:, e - h : e].max() for e, h in zip(ends, day.hotness, strict=True)]
        largest = np.maximum(largest, tops)
    return largest


def _blocks(day: Day, name: str) -> Iterable[NDArray[np.int32]]:
    with tqdm(total=len(day), desc=name, unit="row", unit_scale=True, leave=False) as bar:
        for start in range(0, len(day), _BLOCK):
            parts = [part.array[start : start + _BLOCK] for part in day.sparse]
            yield np.concatenate(parts, axis=1).astype(np.int32, copy=False)
            bar.update(len(parts[0]))
