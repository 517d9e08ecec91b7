"""How far two runs of a graph are from a float64 run, and whether that may be chance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import hypot
from typing import Any

import torch
from torch.fx import Graph

from optimus.legality import tensor_of
from optimus.outcome import TOLERANCE, special

PLAIN = 16.0
"""How many times the original's own error cannot be luck."""


@dataclass
class Trace:
    """What one run returned and left behind. `facts`: types, strides and sharing of memory;
    `untouched`: inputs that are what they were before."""

    values: dict[str, torch.Tensor | None] = field(default_factory=dict[str, torch.Tensor | None])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    untouched: set[str] = field(default_factory=set[str])


@dataclass(frozen=True)
class Gap:
    """How far a value of the original (`own`) and of the rewritten graph (`error`) are from the
    reference, in the Frobenius norm; `slack` is what rounding in another order may cost. `reason`
    says what is wrong beyond any rounding."""

    own: float = 0.0
    error: float = 0.0
    slack: float = 0.0
    reason: str = ""

    @property
    def is_allowed(self) -> bool:
        """Whether the rewritten graph is as right as the original, by the factor TOLERANCE."""
        return not self.reason and self.error <= TOLERANCE * self.own + self.slack

    @property
    def is_plain(self) -> bool:
        """Whether the difference is too large to be a matter of luck."""
        return bool(self.reason) or self.error > PLAIN * (self.own + self.slack)


def compare(
    expected: Trace,
    actual: Trace,
    reference: Trace | None,
    rounding: float = 0.0,
    gradient_error: float = 0.0,
) -> dict[str, Gap]:
    """How far the values of two runs of one seed are from the reference, by name.

    Relative to its norm a value may be off by `rounding`, a gradient by `gradient_error`, besides.
    """
    exact = reference.values if reference is not None else {}
    scales = _scales(expected)
    gaps: dict[str, Gap] = {}
    for name, value in expected.values.items():
        if name in expected.untouched:
            gaps[name] = _unless_equal(value, actual.values.get(name))
            continue
        gap = _gap(value, actual.values.get(name), exact.get(name), scales[_kind(name)])
        if value is not None:
            more = rounding + (gradient_error if _is_gradient(name) else 0.0)
            gap = replace(gap, slack=gap.slack + more * _norm(value))
        gaps[name] = gap
    return gaps


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all elements are equal, NaN to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _unless_equal(expected: torch.Tensor | None, actual: torch.Tensor | None) -> Gap:
    if expected is None or actual is None:
        return Gap(reason="" if expected is actual else "is missing on one side")
    return Gap(reason="" if same(expected, actual) else "is written to, not so by the original")


def rounding_of(graph: Graph) -> float:
    """How far, relative to its norm, any value of a graph that computes in half precision may be
    off; 0 for other graphs.

    Sums of many such numbers, like the statistics of a batch norm, are nearer to float64 than the
    numbers are, by luck in part. A sixteenth of their unit is a quarter of what it costs to round
    every number once, so that a value that ought not to be rounded is still found.
    """
    types = {value.dtype for node in graph.nodes if (value := tensor_of(node)) is not None}
    return max((torch.finfo(t).eps / 16 for t in types & _HALF), default=0.0)


_HALF = {torch.bfloat16, torch.float16}


def gradient_error(expected: Trace, actual: Trace) -> tuple[float, str]:
    """How far the gradient that differs most is off, relative to the expected one's norm, and its
    name."""
    errors = [(0.0, "no gradient")]
    for name, value in expected.values.items():
        got = actual.values.get(name)
        if _is_gradient(name) and value is not None and got is not None:
            off, size = _norm(got.double() - value.double()), _norm(value)
            errors.append((off / size if size else off, name))
    return max(errors)


def _is_gradient(name: str) -> bool:
    return name.startswith("gradient")


def pool(gaps: dict[str, Gap], more: dict[str, Gap]) -> dict[str, Gap]:
    """The gaps of several runs as those of one that is longer."""
    return {
        name: Gap(
            hypot(gap.own, more[name].own),
            hypot(gap.error, more[name].error),
            hypot(gap.slack, more[name].slack),
            gap.reason or more[name].reason,
        )
        for name, gap in gaps.items()
    }


def on_average(first: dict[str, Gap], pooled: dict[str, Gap], runs: int) -> dict[str, Gap]:
    """The gaps of the first run, on the data at hand, beside what the original is off by on an
    average of all `runs`: luck is in the original's single run, not in that. What is plainly wrong
    on these data alone, such as with ties, is so for all that others are right on."""
    found = {
        name: replace(gap, own=max(gap.own, pooled[name].own / runs**0.5))
        for name, gap in first.items()
    }
    return {name: gap for name, gap in found.items() if gap.is_plain}


def worst(gaps: dict[str, Gap]) -> tuple[str, Gap] | None:
    """The name and gap that are least allowed; None if all are."""
    wrong = [(name, gap) for name, gap in gaps.items() if not gap.is_allowed]
    return max(wrong, key=lambda item: (item[1].is_plain, item[1].error), default=None)


def describe(found: tuple[str, Gap] | None) -> str | None:
    """A gap in words."""
    if found is None:
        return None
    name, gap = found
    off = f"is off by {gap.error:.3g} (the original's own: {gap.own:.3g})"
    return f"{name} {gap.reason or off}"


def _kind(name: str) -> str:
    """What has one scale. An input is by itself: others may hold numbers of any size."""
    return name if name.startswith("input") else name.rstrip("0123456789")


def _scales(run: Trace) -> dict[str, float]:
    """The largest root mean square among the outputs and the gradients; each written input's own.

    A gradient that is zero but for rounding is judged by the size of its kind, not by its own.
    """
    scales: dict[str, float] = {}
    for name, value in run.values.items():
        if name in run.untouched:
            continue
        scales[_kind(name)] = max(scales.get(_kind(name), 0.0), _root_mean_square(value))
    return scales


def _root_mean_square(value: torch.Tensor | None) -> float:
    if value is None or not value.is_floating_point() or not value.numel():
        return 0.0
    return _norm(value) / value.numel() ** 0.5


def _gap(
    expected: torch.Tensor | None,
    actual: torch.Tensor | None,
    exact: torch.Tensor | None,
    scale: float,
) -> Gap:
    if expected is None or actual is None:
        return Gap(reason="" if expected is actual else "is missing on one side")
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return Gap(reason=f"is {actual.dtype} {list(actual.shape)}")
    if not expected.is_floating_point():
        return Gap(reason="" if torch.equal(expected, actual) else "differs")
    if not torch.equal(special(expected), special(actual)):
        return Gap(reason="has NaN or infinities in other places")
    known = exact is not None and exact.shape == expected.shape
    reference = exact.double() if exact is not None and known else expected.double()
    own, error = _norm(expected.double() - reference), _norm(actual.double() - reference)
    # What rounding in another order may cost: a few units, more where no reference tells.
    units = (4 if known else 64) * expected.numel() ** 0.5
    return Gap(own, error, units * torch.finfo(expected.dtype).eps * scale)


def _norm(value: torch.Tensor) -> float:
    """Frobenius norm, non-finite elements left out."""
    return value.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).norm().item()
