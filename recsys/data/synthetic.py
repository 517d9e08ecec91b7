"""Criteo-like rows as a pure function of the row number: nothing is stored, nothing is drawn twice.

Every random number is a hash of (seed, row, column), so any batch can be made alone, by any worker,
in any order, and is the same rows whatever the batch size. All arithmetic is on whole batches, laid
out column by column, (columns, rows), which is also how a KeyedJaggedTensor stores its values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys.data.criteo_format import DENSE_MISSING, NUM_DENSE, SPARSE_MISSING, repeated
from recsys.data.shuffle import key64, mix64

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
Counts = NDArray[np.float32]
Ids = NDArray[np.int64]

# The random words of a row: one a table, one a group of tables, one a dense feature, one a task.
_NUM_GROUPS = 4
# Share of rows in which a table repeats its group's choice: what correlates the tables.
_REPEATS = 0.35
# Rows a table may have: the arithmetic on ids is exact in float64 up to here.
MOST_IDS = 100_000_000


@dataclass(frozen=True)
class Columns:
    """Raw features of B rows. `counts`: float32 (13, B), 0 where missing; `ids`: int64 (S, B)."""

    counts: Counts
    ids: Ids


class RowGenerator:
    """Makes the features of any rows, with a table for each of `cardinalities`.

    Ids follow Zipf-Mandelbrot laws, scattered over the table; id 0 stands for "missing" in columns
    that have empty fields. Tables fall into four groups; in a third of the rows a table takes the
    quantile of its group instead of its own, so tables of a group are correlated. Empty fields come
    together in columns of one missing rate, as in the Kaggle data. Dense features are counts,
    floor(expm1(N(mu, sd))), with one factor in common.
    """

    def __init__(self, cardinalities: tuple[int, ...], seed: int) -> None:
        self.cardinalities = cardinalities
        self._key = np.uint64(key64(seed, 1))
        rng = np.random.default_rng(seed)
        self._group0 = len(cardinalities)
        self._dense0 = self._group0 + _NUM_GROUPS
        missing = repeated(SPARSE_MISSING, len(cardinalities))
        self._sparse_rates = _Rates(missing, bits=11)
        self._dense_rates = _Rates(DENSE_MISSING, bits=16)
        self._first_id = (np.array(missing) > 0).astype(np.int64)
        num_ids = np.maximum(np.array(cardinalities) - self._first_id, 1)
        self._zipf = _Zipf(num_ids, rng)
        self._scatter = _Scatter(num_ids)
        self._mean = rng.uniform(0.3, 3.0, (NUM_DENSE, 1)).astype(np.float32)
        self._sd = rng.uniform(0.8, 1.8, (NUM_DENSE, 1)).astype(np.float32)

    def columns(self, rows: Words) -> Columns:
        """The features of these row numbers (B,)."""
        base = mix64(rows ^ self._key)
        return Columns(self._counts(base), self._ids(base))

    def label_uniforms(self, rows: Words, num_tasks: int) -> Floats:
        """Uniform numbers (T, B), independent of the features: below p means clicked."""
        words = _words(mix64(rows ^ self._key), self._dense0 + NUM_DENSE, num_tasks)
        return (words >> np.uint64(11)).view(np.int64).astype(np.float64) * 2.0**-53

    def _ids(self, base: Words) -> Ids:
        words = _words(base, 0, self._group0)
        groups = _words(base, self._group0, _NUM_GROUPS)
        # The low 11 bits decide, the high 53 are the quantile. A shift of the sign makes the mask:
        # several times faster than np.where.
        low = (words & np.uint64(0x7FF)).view(np.int64)
        repeats = ((low - int(_REPEATS * 0x800)) >> 63).view(np.uint64)
        words ^= (words ^ groups[np.arange(self._group0) % _NUM_GROUPS]) & repeats
        ids = self._scatter(self._zipf.rank(words)).astype(np.int64)
        ids += self._first_id[:, None]
        self._sparse_rates.clear(ids, groups)
        return ids

    def _counts(self, base: Words) -> Counts:
        words = _words(base, self._dense0, NUM_DENSE)
        # Box and Muller, 1958. The twin of the first normal is the factor all columns share.
        first = (words >> np.uint64(40)).view(np.int64).astype(np.float32)
        second = ((words >> np.uint64(16)) & np.uint64(0xFFFFFF)).view(np.int64).astype(np.float32)
        radius = np.sqrt(np.float32(-2) * np.log((first + np.float32(0.5)) * np.float32(2**-24)))
        angle = second * np.float32(2 * math.pi * 2**-24)
        normal = np.float32(0.9) * radius * np.cos(angle)
        normal += np.float32(0.436) * (radius[0] * np.sin(angle[0]))
        normal *= self._sd
        normal += self._mean
        counts = np.floor(np.exp(np.clip(normal, 0, 14, out=normal)) - np.float32(1))
        self._dense_rates.clear(counts, words)
        return counts


class _Zipf:
    """Quantile functions of Zipf-Mandelbrot laws, P(k) = integral of (x + q)^-s over [k, k + 1).

    Interpolated between 2048 exact points, which shifts at most a two-thousandth of the mass to a
    neighbouring rank and costs a tenth of a power a number.
    """

    def __init__(self, num_ids: Ids, rng: np.random.Generator) -> None:
        large, small, shape = num_ids >= 50_000, num_ids < 1_000, num_ids.shape
        exponent = np.where(large, rng.uniform(0.9, 0.98, shape), rng.uniform(0.65, 0.8, shape))
        exponent = np.where(small, rng.uniform(1.8, 2.6, shape), exponent)[:, None]
        shift = np.where(large, rng.uniform(2, 20, shape), rng.uniform(1, 3, shape))[:, None]
        low = shift ** (1 - exponent)
        span = (num_ids[:, None] + shift) ** (1 - exponent) - low
        knots = (np.arange(2049) / 2048 * span + low) ** (1 / (1 - exponent)) - shift
        self._last = (num_ids - 1).astype(np.float64)[:, None]
        self._knots = np.ascontiguousarray(knots[:, :-1])
        self._slopes = np.diff(knots) * 2.0**-42
        self._offset = np.arange(len(num_ids), dtype=np.int64)[:, None] * 2048

    def rank(self, words: Words) -> Floats:
        """Whole ranks (tables, B), 0 the most frequent, from the high 53 bits of `words`."""
        place = (words >> np.uint64(53)).view(np.int64) + self._offset
        part = ((words >> np.uint64(11)) & np.uint64((1 << 42) - 1)).view(np.int64)
        rank = np.take(self._slopes, place) * part
        rank += np.take(self._knots, place)
        return np.minimum(np.floor(rank, out=rank), self._last, out=rank)


class _Scatter:
    """Sends rank r to r * step mod n, one-to-one: frequent ids lie all over the table.

    In float64, exact below 2^53 and faster than integer division.
    """

    def __init__(self, num_ids: Ids) -> None:
        self._size = num_ids.astype(np.float64)[:, None]
        self._step = np.array([coprime(int(n)) for n in num_ids], dtype=np.float64)[:, None]

    def __call__(self, rank: Floats) -> Floats:
        rank *= self._step
        rank -= np.floor(rank / self._size) * self._size
        return rank


def coprime(size: int) -> int:
    """The number coprime to `size` next above its golden section."""
    step = max(1, int(size * 0.618))
    while math.gcd(step, size) != 1:
        step += 1
    return step


class _Rates:
    """Which columns go missing how often. Columns of one rate go missing in the same rows."""

    def __init__(self, rates: tuple[float, ...], bits: int) -> None:
        self._mask = np.uint64((1 << bits) - 1)
        self._columns = [
            (np.uint64(round(rate * (1 << bits))), np.flatnonzero(np.array(rates) == rate))
            for rate in sorted(set(rates))
            if rate > 0
        ]

    def clear(self, values: Counts | Ids, words: Words) -> None:
        """Set what is missing to 0; the low bits of `words`, one row a rate, decide."""
        for word, (threshold, columns) in zip(
            words[: len(self._columns)], self._columns, strict=True
        ):
            kept = (word & self._mask) >= threshold
            values[columns] *= kept


def _words(base: Words, first: int, count: int) -> Words:
    """Random words (count, B) of columns first..first + count, from a hash of each row (B,)."""
    constants = mix64(np.arange(first + 1, first + count + 1, dtype=np.uint64))
    return mix64(base[None, :] + constants[:, None])
