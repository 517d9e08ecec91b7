"""The gain of the optimised phase over the baseline, and the reasons there are to doubt it.

Whatever tells the gain (the log, the progress bar, the closing line, the summary) takes it, and the
doubts where it has them, from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from optimus.figures import Phase, Window

FEW = 3
"""One window proves nothing: from so many on a gain is announced, and not called one of few."""

UNSTEADY = 2.0
"""Levels of one phase that differ by so much are of two speeds of the machine.

Where nothing else runs they differ by 1.2 to 1.4 (benchmarks/results/train/*.json), though single
windows by up to 4.5; a process that comes or goes on a machine of few cores makes it 2 and more.
"""

AGREEMENT = 0.1
"""Two gains agree when the rates that they say differ by less than this fraction."""


@dataclass(frozen=True)
class Gain:
    """The optimised phase against the baseline, as fractions; more is better for both.

    `qps` 0.63 means 63 % more samples a second; `peak_memory` 0.06 means 6 % less memory. None: it
    could not be measured, and `qps_note` or `memory_note` says why. `qps_range` is the gain of slow
    windows over fast ones of the baseline, and the reverse (10th and 90th percentiles): when zero
    lies inside, the gain is within the noise. `doubts` are the reasons, in words, not to take `qps`
    at its word.
    """

    qps: float | None = None
    qps_range: tuple[float, float] | None = None
    peak_memory: float | None = None
    qps_note: str = ""
    memory_note: str = ""
    doubts: tuple[str, ...] = ()


def gain(baseline: Phase | None, optimised: Phase) -> Gain:
    """Compare two phases; a figure that would not be like for like is left out, with the reason."""
    if baseline is None:
        note = "no baseline was run"
        return Gain(qps_note=note, memory_note=note)
    note = _not_comparable(baseline, optimised)
    if note:
        return Gain(qps_note=note, memory_note=note)
    qps = _rates(optimised)[1] / _rates(baseline)[1] - 1
    qps_range = (
        _rates(optimised)[0] / _rates(baseline)[2] - 1,
        _rates(optimised)[2] / _rates(baseline)[0] - 1,
    )
    doubts = (
        _unsteady(baseline, optimised, qps) or _noisy(qps_range),
        _few(baseline, optimised),
        _stored(baseline, optimised, qps),
    )
    return Gain(
        qps=qps,
        qps_range=qps_range,
        peak_memory=_memory_gain(baseline, optimised),
        memory_note="" if _memory_kind(baseline, optimised) else _no_memory(baseline, optimised),
        doubts=tuple(doubt for doubt in doubts if doubt),
    )


def _not_comparable(baseline: Phase, optimised: Phase) -> str:
    for phase in (baseline, optimised):
        if not phase.windows:
            return f"too few steps: the {phase.name} phase had no warm window ({_steps(phase)})"
    for what in ("device", "world_size", "unit"):
        then, now = getattr(baseline, what), getattr(optimised, what)
        if then != now:
            label = what.replace("_", " ")
            return f"the baseline was measured with {label} {then}, this run has {now}"
    return ""


def _steps(phase: Phase) -> str:
    discarded = phase.windows_discarded
    tail = f", {discarded} windows thrown away because something compiled" if discarded else ""
    return f"{phase.steps} steps{tail}"


def _rates(phase: Phase) -> tuple[float, float, float]:
    rates = phase.rates()
    assert rates, "a phase with windows has rates"
    return rates


def _memory_kind(baseline: Phase, optimised: Phase) -> str | None:
    shared = baseline.peak_memory().keys() & optimised.peak_memory().keys()
    same_method = baseline.memory_note == optimised.memory_note
    return next((k for k in ("allocated", "resident") if k in shared and same_method), None)


def _memory_gain(baseline: Phase, optimised: Phase) -> float | None:
    kind = _memory_kind(baseline, optimised)
    if kind is None:
        return None
    return 1 - optimised.peak_memory()[kind] / max(baseline.peak_memory()[kind], 1)


def _no_memory(baseline: Phase, optimised: Phase) -> str:
    notes = sorted({baseline.memory_note, optimised.memory_note} - {""})
    return "; ".join(notes) or "peak memory was not measured in both phases"


def _unsteady(baseline: Phase, optimised: Phase, qps: float) -> str:
    """The machine's speed changed within a phase: the medians may be of a fast and a slow one."""
    spread, name = max((_spread(phase.windows), phase.name) for phase in (baseline, optimised))
    if spread < UNSTEADY:
        return ""
    near = _gain_around_takeover(baseline.windows, optimised.windows)
    verdict = "" if near is not None and _agree(near, qps) else "not to be trusted: "
    fold = f"{spread:.1f}" if spread < 10 else f"{spread:.0f}"
    return (
        f"{verdict}windows of the {name} phase differ {fold}-fold, as when something else uses "
        "the machine" + ("" if near is None else f"; around the take-over: {near:+.1%}")
    )


def _spread(windows: list[Window]) -> float:
    """The highest level over the lowest.

    A level is the median of three windows in a row, so that one odd window among many, which
    changes no median, is no change of speed; where there are too few for that, it is one window.
    """
    rates = [w.rate for w in windows]
    if len(rates) >= 2 * FEW - 1:
        rates = [median(rates[i : i + FEW]) for i in range(len(rates) - FEW + 1)]
    return max(rates) / max(min(rates), 1e-9)


def _gain_around_takeover(baseline: list[Window], optimised: list[Window]) -> float | None:
    """The first optimised windows against as many last ones of the baseline.

    None where a resume lies between them.
    """
    count = min(FEW, len(baseline), len(optimised))
    last, first = baseline[-count:], optimised[:count]
    if len({w.process for w in [*last, *first]}) > 1:
        return None
    return _gain_of(last, first)


def _gain_of(baseline: list[Window], optimised: list[Window]) -> float:
    return median(w.rate for w in optimised) / median(w.rate for w in baseline) - 1


def _agree(one: float, other: float) -> bool:
    return abs(one - other) < AGREEMENT * (1 + other)


def _noisy(qps_range: tuple[float, float]) -> str:
    """The gain lies within the windows' own spread."""
    low, high = qps_range
    if not low < 0 < high:
        return ""
    return f"within the noise: {low:+.0%} to {high:+.0%} from window to window"


def _few(baseline: Phase, optimised: Phase) -> str:
    counts = len(baseline.windows), len(optimised.windows)
    if min(counts) >= FEW:
        return ""
    longer = "a longer run" if counts[0] >= FEW else "more baseline_steps"
    return f"few windows: {counts[0]} and {counts[1]}; {longer} would tell more"


def _stored(baseline: Phase, optimised: Phase, qps: float) -> str:
    """Windows of several processes are compared, and no single process has the same to say."""
    processes = {w.process for w in [*baseline.windows, *optimised.windows]}
    if len(processes) == 1:
        return ""
    within = _gain_within_a_process(baseline.windows, optimised.windows)
    if within is not None and _agree(within, qps):
        return ""
    return (
        "windows from before and after a resume are compared, and machine and load may have been "
        "others" + ("" if within is None else f"; within one process: {within:+.1%}")
    )


def _gain_within_a_process(baseline: list[Window], optimised: list[Window]) -> float | None:
    """The gain as the last process with enough steady windows of both phases measured it."""
    for process in sorted({w.process for w in baseline}, reverse=True):
        phases = [[w for w in phase if w.process == process] for phase in (baseline, optimised)]
        if all(len(p) >= FEW and _spread(p) < UNSTEADY for p in phases):
            return _gain_of(*phases)
    return None
