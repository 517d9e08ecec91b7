"""The known truth behind the synthetic labels: click probabilities, and the best AUC there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys.data.criteo_format import NUM_DENSE
from recsys.data.shuffle import key64, mix64
from recsys.data.synthetic import Columns, Floats, RowGenerator

# Tables with fewer rows than this have pairwise effects: a model sees their pairs often enough.
_SMALL = 6_000
_RANK = 4
_CALIBRATION_ROWS = 1 << 15
# Far beyond any data set's own rows.
_CALIBRATION_START = 1 << 48

# Share of the logit's variance: dense, first order of small and of large tables, pairs.
_SHARES = (0.25, 0.4, 0.05, 0.3)
# Effects of a small table's ids have a deviation of its size to this power: most of what there is
# to learn is seen often. A DLRM is within 0.02 of the best AUC after one pass over 700,000 rows.
_DECAY = -0.3


@dataclass(frozen=True)
class Oracle:
    """What a model that knew the truth would score on some rows. `logloss` in nats."""

    auc: float
    logloss: float
    click_rate: float


class Teacher:
    """Turns features into click probabilities.

    The logit is a sum of hashed first-order effects of every table and dense feature, and of the
    inner products of hashed vectors (rank 4) over all pairs of tables under 6,000 rows, as in a
    factorisation machine (Rendle, 2010). Its intercept and scale are set on 32,768 rows of their
    own such that the click rate and the AUC of the true probabilities are those asked for.

    Half of the variance of a further task's effects, `task` 1, 2, ..., is that of task 0.
    """

    def __init__(
        self,
        generator: RowGenerator,
        cardinalities: tuple[int, ...],
        seed: int,
        auc: float,
        click_rate: float,
        *,
        task: int = 0,
    ) -> None:
        sizes = np.array(cardinalities)
        self._small = np.flatnonzero(sizes < _SMALL)
        self._large = np.flatnonzero(sizes >= _SMALL)
        starts = np.concatenate([[0], np.cumsum(sizes[self._small])])
        self._starts = starts[:-1, None]
        # One column an id: its first-order effect, then its vector.
        num_effects = int(starts[-1])
        self._effects, self._dense = _effects(num_effects, key64(seed, 2))
        if task:
            effects, dense = _effects(num_effects, key64(seed, 3 + task))
            self._effects = (self._effects + effects) / np.float32(2**0.5)
            self._dense = (self._dense + dense) / np.float32(2**0.5)
        self._effects *= np.repeat(sizes[self._small] ** _DECAY, sizes[self._small])
        self._large_keys = mix64(self._large.astype(np.uint64) ^ np.uint64(key64(seed, 3)))
        self._weights = np.ones(len(_SHARES), dtype=np.float32)
        self._scale, self._intercept = 1.0, 0.0
        self._calibrate(generator, auc, click_rate)

    def probability(self, columns: Columns) -> Floats:
        """P(click) of each row, (B,)."""
        logit = self._weights @ self._parts(columns)
        return _sigmoid(self._scale * logit.astype(np.float64) + self._intercept)

    def _parts(self, columns: Columns) -> NDArray[np.float32]:
        """The four parts of the logit, (4, B)."""
        dense = (self._dense * np.log1p(columns.counts)).sum(axis=0)
        place = columns.ids[self._small] + self._starts
        first, *vectors = (np.take(effects, place) for effects in self._effects)
        # The sum over all pairs, in linear time.
        pairs = sum(v.sum(axis=0) ** 2 - np.einsum("tb,tb->b", v, v) for v in vectors)
        words = mix64(columns.ids[self._large].astype(np.uint64) + self._large_keys[:, None])
        large = ((words >> np.uint64(40)).view(np.int64).astype(np.float32) - 2.0**23).sum(axis=0)
        return np.stack([dense, first.sum(axis=0), large, pairs])

    def _calibrate(self, generator: RowGenerator, auc: float, click_rate: float) -> None:
        rows = np.arange(_CALIBRATION_START, _CALIBRATION_START + _CALIBRATION_ROWS)
        parts = self._parts(generator.columns(rows.astype(np.uint64)))
        deviations = parts.std(axis=1)
        deviations[deviations == 0] = 1
        self._weights = (np.sqrt(np.array(_SHARES)) / deviations).astype(np.float32)
        # A thousand means of neighbours stand for all logits in the search that follows.
        logit = np.sort((self._weights @ parts).astype(np.float64)).reshape(1024, -1).mean(axis=1)
        self._scale = _bisect(
            lambda scale: expected_auc(_sigmoid(scale * logit + _shift(scale * logit, click_rate))),
            auc,
            0.0,
            50.0,
        )
        self._intercept = _shift(self._scale * logit, click_rate)


def _effects(count: int, key: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Normal numbers: (5, count), an id's effect and vector each, and (13, 1) of dense features."""
    rng = np.random.default_rng(key)
    of_ids = rng.standard_normal((1 + _RANK, count), dtype=np.float32)
    return of_ids, rng.standard_normal((NUM_DENSE, 1)).astype(np.float32)


def expected_auc(probability: Floats) -> float:
    """AUC of the true probabilities (N,) as scores, expected over the labels they give."""
    p = np.sort(probability)
    negatives_below = np.cumsum(1 - p) - (1 - p) / 2
    return float(p @ negatives_below / (p.sum() * (1 - p).sum()))


def oracle(probability: Floats, labels: NDArray[np.floating]) -> Oracle:
    """Scores of the true probabilities (N,) on the labels (N,) that were drawn from them."""
    order = np.argsort(probability)
    positive = labels[order] > 0.5
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    negatives_below = np.cumsum(~positive)[positive].sum()
    chosen = np.where(labels > 0.5, probability, 1 - probability)
    return Oracle(
        auc=float(negatives_below / (num_positive * num_negative)),
        logloss=float(-np.log(chosen).mean()),
        click_rate=num_positive / len(labels),
    )


def mean_oracle(probability: Floats, labels: NDArray[np.floating]) -> Oracle:
    """`oracle` of each task, (T, N), and the means over the tasks."""
    each = [oracle(p, clicked) for p, clicked in zip(probability, labels, strict=True)]
    scores = np.array([(o.auc, o.logloss, o.click_rate) for o in each])
    return Oracle(*scores.mean(axis=0).tolist())


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def _shift(logit: Floats, click_rate: float) -> float:
    """The intercept at which these logits give this mean probability."""
    return _bisect(lambda shift: float(_sigmoid(logit + shift).mean()), click_rate, -60.0, 60.0)


def _bisect(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    for _ in range(32):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2
