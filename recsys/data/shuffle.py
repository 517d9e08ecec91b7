"""A random order of any number of rows that is computed, not stored."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each uint64 to a uint64 that looks random (finaliser of SplitMix64, Steele 2014)."""
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(_FIRST)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    return x


def key64(*parts: int) -> int:
    """One 64-bit key out of several numbers, such as a seed and an epoch."""
    key = 0
    for part in parts:
        key = _mix(key + _GOLDEN + part)
    return key


def _mix(x: int) -> int:
    """`mix64` of one number."""
    x &= _WORD
    x = (x ^ x >> 30) * _FIRST & _WORD
    x = (x ^ x >> 27) * _SECOND & _WORD
    return x ^ x >> 31


def permute(index: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Send each index in [0, size) to its place in the random order number `key`.

    A Feistel network on a grid just larger than `size`, walked until it lands inside: every epoch
    of any data set is shuffled row by row with no permutation in memory, and any batch of it can be
    made on its own, by any worker, after any restart. Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", 2002.
    """
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise ValueError(f"indices run from {index.min()} to {index.max()}, must be in [0, {size})")
    out = _feistel(index.astype(np.uint64), size, key)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _feistel(out[outside], size, key)
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


def _feistel(index: NDArray[np.uint64], size: int, key: int) -> NDArray[np.uint64]:
    side = math.isqrt(max(size, 1) - 1) + 1
    width = np.uint64(side)
    height = np.uint64(-(-size // side))
    high, low = index // width, index % width
    for round_ in range(0, _ROUNDS, 2):
        high = (high + mix64(low ^ np.uint64(key64(key, round_)))) % height
        low = (low + mix64(high ^ np.uint64(key64(key, round_ + 1)))) % width
    return high * width + low
