"""What a run says: the figures it logs, the lines it prints, and the summary file at its end."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from optimus.figures import Phase, Window
from optimus.gain import FEW
from optimus.pattern import GroupPattern
from optimus.pipeline import PIPELINE
from optimus.summary_page import page
from optimus.takeover import Takeover

FILE_STEM = "optimus_summary"
FORMAT = 1
MIB = 2**20


def window_metrics(takeover: Takeover, window: Window) -> dict[str, float]:
    """The metrics of a new window, by the name they are logged under; only what was measured.

    `optimus/qps` and the gains are of all windows so far, `qps` and its percentiles of this one.
    """
    phase = takeover.recorder.phases[takeover.phase_at(window.first_step)]
    found = takeover.gain() if phase.name == "optimised" else None
    p10, p50, p90 = window.step_rates
    samples = phase.unit == "samples/s"
    figures: dict[str, float | None] = {
        "optimus/qps": phase.rate() if samples else None,
        "qps": window.rate if samples else None,
        "qps_p10": p10 if samples else None,
        "qps_p50": p50 if samples else None,
        "qps_p90": p90 if samples else None,
        "optimus/step_ms": window.seconds / window.steps * 1e3,
        "optimus/qps_gain": found.qps if found else None,
        "optimus/qps_gain_doubts": len(found.doubts) if found and found.qps is not None else None,
        "optimus/peak_memory_gain": found.peak_memory if found else None,
        "optimus/kernels_per_step": phase.kernels_per_step,
        "optimus/recompiles": phase.recompiles,
        "optimus/compile_seconds": phase.compile_seconds,
        "optimus/optimised": float(phase.name == "optimised"),
    }
    for kind, peak in window.peak_memory.items():
        figures[f"optimus/peak_{kind}_mib"] = peak / MIB
    return {name: float(value) for name, value in figures.items() if value is not None}


def compiling(takeover: Takeover, told: set[str]) -> list[str]:
    """A line before the first step of each phase that compiles, which may take minutes."""
    compiled, phase = takeover.compiled, takeover.phase_at(takeover.step - 1)
    if compiled is None or compiled.graphs or not compiled.targets:
        return []
    if f"compiling {phase}" in told:
        return []
    told.add(f"compiling {phase}")
    names, settings = _names(takeover), takeover.settings
    if phase == "baseline":
        return [f"compiling {names} for the baseline, {settings.runs(phase)} ..."]
    what = "compiling" if settings.selects_nothing else "rewriting and compiling"
    return [f"{what} {names} ..."]


def compiling_evaluation(takeover: Takeover, told: set[str]) -> list[str]:
    """A line before the first evaluation that runs compiled, in graphs without gradients."""
    targets = takeover.compiled.targets if takeover.compiled is not None else ()
    waiting = any(target.active and not target.no_grad_graphs for target in targets)
    if not waiting or "compiling evaluation" in told:
        return []
    told.add("compiling evaluation")
    return [f"compiling {_names(takeover)} for evaluation ..."]


def announcements(takeover: Takeover, told: set[str], measured: bool) -> list[str]:
    """Lines to print once each: what compiling the baseline took, the pattern table at the
    take-over, and the gain as soon as there are a few windows of it.

    `measured` says whether there are new windows, so that nothing is worked out in other steps.
    """
    lines: list[str] = []
    compiled, begun = takeover.compiled, "compiling baseline" in told
    if begun and "compiled baseline" not in told and compiled is not None and compiled.graphs:
        told.add("compiled baseline")
        lines.append(f"the baseline is compiled, in {compiled.compile_seconds:.1f} s")
    if "table" not in told and takeover.report.graphs:
        told.add("table")
        lines.append(_takeover_line(takeover))
    if measured and "gain" not in told and "table" in told:
        phase = takeover.recorder.phases.get("optimised")
        is_clear = phase is not None and len(phase.windows) >= FEW
        if is_clear and takeover.gain().qps is not None:
            told.add("gain")
            lines.append(gain_line(takeover))
    return lines


def _takeover_line(takeover: Takeover) -> str:
    compiled = takeover.compiled
    took = f", compiled in {compiled.compile_seconds:.1f} s" if compiled is not None else ""
    where = f"runs from step {takeover.step - 1} on, in {_names(takeover)}{took}"
    if takeover.settings.selects_nothing:
        return f"the graph as it is, no pattern being selected, {where}"
    hint = [] if _has_something(takeover) else [NOTHING_FOUND]
    table = takeover.report.table(f"see {FILE_STEM}.html, or explain=NAME for one in full")
    return "\n".join([f"the optimised graph {where}", table, *hint])


def _names(takeover: Takeover) -> str:
    return ", ".join(t.label for t in takeover.targets or ())


NOTHING_FOUND = "no branches alike to merge and no detours to remove: expect little gain here"


_FAMILIES = ("vertical", "kernels")


def _has_something(takeover: Takeover) -> bool:
    """Whether patterns that make a model faster have fired, or were not asked to."""
    every = [p for phase in PIPELINE for p in phase.patterns]
    faster = {p.name() for p in every if isinstance(p, GroupPattern) or p.family in _FAMILIES}
    found = [p for g in takeover.report.graphs for p in g.patterns if p.name in faster]
    return not found or any(p.fired for p in found)


def gain_line(takeover: Takeover) -> str:
    """The gain in one line, or why there is none."""
    found, phases = takeover.gain(), takeover.recorder.phases
    if found.qps is None:
        return f"no gain measured: {found.qps_note}"
    baseline, optimised = phases["baseline"], phases["optimised"]
    memory = (
        f", {_memory(found.peak_memory)}"
        if found.peak_memory is not None
        else f" (peak memory: {found.memory_note})"
    )
    doubts = f" ({'; '.join(found.doubts)})" if found.doubts else ""
    stored = f" ({baseline.source})" if baseline.source != "measured" else ""
    return (
        f"{optimised.rate():,.0f} {optimised.unit} against {baseline.rate():,.0f} under "
        f"{baseline.runs}{stored}: {found.qps:+.1%}{doubts}{memory}"
    )


def _memory(gained: float) -> str:
    """In words: a sign would be that of the gain to one reader, of the memory to the next."""
    if abs(gained) < 0.0005:
        return "peak memory the same"
    return f"peak memory {abs(gained):.1%} {'lower' if gained > 0 else 'higher'}"


def collect(takeover: Takeover, status: str) -> dict[str, Any]:
    """Everything that the summary file says, as plain data."""
    return {
        "format": FORMAT,
        "status": status,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "environment": _environment(),
        "model": type(takeover.root).__name__,
        "targets": [t.label for t in takeover.targets or ()],
        "settings": takeover.settings.to_dict(),
        "steps": takeover.step,
        "takeover_step": takeover.takeover_step,
        "phases": {n: _phase(p) for n, p in takeover.recorder.phases.items()},
        "gain": asdict(takeover.gain()),
        "patterns": [asdict(p) for p in takeover.report.totals()],
        "graphs": takeover.report.to_dict()["graphs"],
        "cuda_graphs": takeover.graphs_to_dict(),
        "remarks": takeover.remarks(),
    }


def headline(collected: Mapping[str, Any]) -> dict[str, float | None]:
    """One row of figures for a table of runs, from what `collect` gave: None if not measured.

    The rates are those of the optimised phase, or of the baseline in a run that had no other.
    """
    phases: Mapping[str, Any] = collected.get("phases", {})
    phase: Mapping[str, Any] = phases.get("optimised") or phases.get("baseline") or {}
    rates = phase.get("rates") or (None, None, None)
    peaks: Mapping[str, int] = phase.get("peak_memory", {})
    peak = peaks.get("allocated", peaks.get("resident"))
    gains: Mapping[str, Any] = collected.get("gain", {})
    return {
        "qps_p10": rates[0],
        "qps_p50": rates[1],
        "qps_p90": rates[2],
        "qps_gain": gains.get("qps"),
        "peak_memory_mib": peak / MIB if peak is not None else None,
        "peak_memory_gain": gains.get("peak_memory"),
        "kernels_per_step": phase.get("kernels_per_step"),
        "recompiles": phase.get("recompiles"),
        "compile_seconds": phase.get("compile_seconds"),
    }


def write(collected: Mapping[str, Any], directory: Path) -> Path:
    """Write the summary as JSON and as one HTML page without outside parts; the page's path.

    Each file is complete or not there at all. Raises OSError when it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / f"{FILE_STEM}.json", json.dumps(collected, indent=1))
    html = directory / f"{FILE_STEM}.html"
    _replace(html, page(collected))
    return html


def _replace(path: Path, text: str) -> None:
    draft = path.with_suffix(path.suffix + ".part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _phase(phase: Phase) -> dict[str, Any]:
    derived = {
        "rate": phase.rate(),
        "rates": phase.rates(),
        "step_ms": phase.step_ms(),
        "peak_memory": phase.peak_memory(),
    }
    return phase.to_dict() | derived


def _environment() -> dict[str, str]:
    names = ("torch", "lightning", "pytorch-lightning", "triton", "torchrec", "optimus-recsys")
    found = {name: _version(name) for name in names}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **{name: v for name, v in found.items() if v},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
