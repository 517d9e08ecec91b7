"""Facts about the Criteo click logs that several data modules need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

NUM_DENSE = 13
NUM_SPARSE = 26

# TorchRec's names.
DENSE_NAMES = tuple(f"int_{i}" for i in range(NUM_DENSE))


def sparse_names(count: int) -> tuple[str, ...]:
    """Names of the first `count` sparse features, Criteo's or more."""
    return tuple(f"cat_{i}" for i in range(count))


SPARSE_NAMES = sparse_names(NUM_SPARSE)

# Distinct values of each categorical column of the Kaggle data set.
KAGGLE_CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)

# Rows of the MLPerf v2 tables, the 1 TB data set with at most 40 million rows a table.
MLPERF_CARDINALITIES = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)

# Ids a sample of the MLPerf v2 multi-hot data set.
MLPERF_HOTNESS = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1),
    *(6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
)

# Share of empty fields in the Kaggle data set, column by column.
DENSE_MISSING = (
    0.454,
    0,
    0.215,
    0.217,
    0.026,
    0.224,
    0.043,
    0.0005,
    0.043,
    0.454,
    0.043,
    0.765,
    0.217,
)
SPARSE_MISSING = (
    *(0, 0, 0.034, 0.034, 0, 0.121, 0, 0, 0, 0, 0, 0.034, 0),
    *(0, 0, 0.034, 0, 0, 0.44, 0.44, 0.034, 0.763, 0, 0.034, 0.44, 0.44),
)


def repeated(facts: Sequence[T], count: int) -> tuple[T, ...]:
    """The first `count` columns' facts; beyond Criteo's own columns they begin again."""
    return tuple(facts[i % len(facts)] for i in range(count))
