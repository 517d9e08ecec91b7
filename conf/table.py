"""The table at the end of a multirun: one row a job, as text, as summary.csv and as a plot."""

from __future__ import annotations

import csv
import functools
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from conf.interrupts import at_interrupt
from conf.jobs import RESULT, Result, was_interrupted
from conf.swept import num_jobs, swept_keys
from optimus.summary import FILE_STEM, headline

CSV_NAME = "summary.csv"
_SELECTING = ("optimus.patterns", "optimus.disable", "case")
_NONE = {"optimus.patterns=none", "case=none"}


GAINS = (
    "gain: against the job's own first steps, without patterns (optimus.baseline); "
    "vs none: p50 against that of the job alike with no pattern at all"
)


@dataclass(frozen=True)
class Row:
    """One job. Figures are of the optimised phase; None where the run has none (see `error`).

    `qps_gain` compares the phase with the baseline steps of the same job, `qps_gain_vs_none` the
    median QPS with that of the job that differs in `optimus.patterns=none` alone: fractions, 0.63
    is 63 % more. `doubts` are the reasons to doubt the first. `same_as` names the job whose figures
    these are, where this one was not run.
    """

    job: int
    label: str
    qps_p10: float | None = None
    qps_p50: float | None = None
    qps_p90: float | None = None
    qps_gain: float | None = None
    qps_gain_vs_none: float | None = None
    peak_memory_mib: float | None = None
    peak_memory_gain: float | None = None
    kernels_per_step: float | None = None
    recompiles: int | None = None
    compile_seconds: float | None = None
    fired: int | None = None
    doubts: str = ""
    auc: float | None = None
    logloss: float | None = None
    seconds: float | None = None
    same_as: int | None = None
    error: str = ""


def rows(folder: Path, swept: Collection[str] = ()) -> list[Row]:
    """One row for each job of the multirun in `folder` that has ended, by job number.

    Labels say the values of `swept` keys, and of all others that differ from job to job.
    """
    found = [(Result.read(path.parent), path.parent) for path in folder.rglob(RESULT)]
    ended = sorted(((r, p) for r, p in found if r), key=lambda pair: pair[0].job)
    differing = {*swept, *_differing([result.overrides for result, _ in ended])}
    folders = {result.job: path for result, path in ended}
    table = [
        _row(result, path if result.same_as is None else folders[result.same_as], differing)
        for result, path in ended
    ]
    return _against_none(table, [result.overrides for result, _ in ended])


def write_csv(table: Sequence[Row], path: Path) -> None:
    """All columns; a missing figure is an empty cell. An interrupt leaves the file as it was."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in fields(Row))
        for row in table:
            writer.writerow(_cell(getattr(row, field.name)) for field in fields(Row))
    part.replace(path)


def text(table: Sequence[Row]) -> str:
    """The table for a terminal."""
    cells = [list(_COLUMNS), *([show(row) for show in _COLUMNS.values()] for row in table)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = ["  ".join(_pad(line, widths)).rstrip() for line in cells]
    errors = [f"job {row.job} ({row.label}) failed: {row.error}" for row in table if row.error]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], GAINS, *errors])


def plot(table: Sequence[Row], path: Path) -> None:
    """Bars: QPS with its 10th and 90th percentile beside peak memory, of the jobs that ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [row for row in table if row.qps_p50 and row.same_as is None]
    height = 1.2 + 0.32 * max(len(done), 1)
    figure, (speed, memory) = pyplot.subplots(1, 2, figsize=(11, height), sharey=True)
    places = range(len(done))
    middle = [row.qps_p50 or 0.0 for row in done]
    below = [m - (row.qps_p10 or m) for m, row in zip(middle, done, strict=True)]
    above = [(row.qps_p90 or m) - m for m, row in zip(middle, done, strict=True)]
    speed.barh(places, middle, xerr=[below, above], color="#4c72b0", ecolor="#333333", capsize=2)
    speed.set_yticks(places, [row.label for row in done])
    speed.set_xlabel("samples a second (median; whiskers: 10th and 90th percentile)")
    memory.barh(places, [row.peak_memory_mib or 0.0 for row in done], color="#dd8452")
    memory.set_xlabel("peak memory, MiB")
    speed.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


class SummaryTable(Callback):
    """Hydra callback: keeps summary.csv up to date while jobs end, then prints and plots all."""

    def __init__(self) -> None:
        self._swept: Collection[str] = ()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """From now on SIGTERM and SIGINT end the multirun with its table written."""
        self._swept = swept_keys(config)
        at_interrupt(functools.partial(self._tell_interrupted, config))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write what there is so far: a sweep that is killed keeps its table."""
        folder = Path(config.hydra.sweep.dir)
        if config.hydra.mode is not None and "MULTIRUN" in str(config.hydra.mode):
            write_csv(rows(folder, self._swept), folder / CSV_NAME)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table and where its files are; exit status 1 if a job failed."""
        folder = Path(config.hydra.sweep.dir)
        table = rows(folder, self._swept)
        write_csv(table, folder / CSV_NAME)
        files = [CSV_NAME]
        if any(row.qps_p50 for row in table):
            for name in ("summary.png", "summary.svg"):
                plot(table, folder / name)
                files.append(name)
        print(f"\n{text(table)}\n\n{', '.join(files)} in {folder}", flush=True)
        failed = sum(bool(row.error) for row in table)
        if failed:
            raise SystemExit(f"train.py: {failed} of {len(table)} jobs failed")

    def _tell_interrupted(self, config: DictConfig) -> None:
        folder = Path(config.hydra.sweep.dir)
        table = rows(folder, self._swept)
        write_csv(table, folder / CSV_NAME)
        done = sum(not was_interrupted(row.error) for row in table)
        total = num_jobs(config)
        of = "" if total is None else f" of {total}"
        message = f"train.py: interrupted, {done}{of} jobs are done: {folder / CSV_NAME}"
        print(message, file=sys.stderr, flush=True)


def _row(result: Result, folder: Path, differing: set[str]) -> Row:
    label = " ".join(o for o in result.overrides if _key(o) in differing) or "defaults"
    metrics = result.metrics
    return Row(
        job=result.job,
        label=_short(label),
        auc=_finite(metrics.get("test/auc", metrics.get("val/auc"))),
        logloss=_finite(metrics.get("test/logloss", metrics.get("val/logloss"))),
        seconds=result.seconds,
        same_as=result.same_as,
        error=result.error,
        **_measured(folder),
    )


def _measured(folder: Path) -> dict[str, Any]:
    """The figures in a job's summary file; none where the job ended before it wrote one."""
    try:
        summary: dict[str, Any] = json.loads((folder / f"{FILE_STEM}.json").read_text())
    except (OSError, ValueError):
        return {}
    fired = sum(pattern["fired"] for pattern in summary.get("patterns", ()))
    doubts = "; ".join(summary.get("gain", {}).get("doubts", ()))
    return {**headline(summary), "fired": fired, "doubts": doubts}


def _against_none(table: Sequence[Row], overrides: Sequence[Sequence[str]]) -> list[Row]:
    others = [frozenset(o for o in job if _key(o) not in _SELECTING) for job in overrides]
    none = {
        other: row.qps_p50
        for row, other, job in zip(table, others, overrides, strict=True)
        if row.qps_p50 and _NONE.intersection(job)
    }
    return [
        replace(row, qps_gain_vs_none=row.qps_p50 / none[other] - 1)
        if row.qps_p50 and other in none
        else row
        for row, other in zip(table, others, strict=True)
    ]


def _differing(overrides: Iterable[Sequence[str]]) -> set[str]:
    """Keys whose override is not the same in all jobs: what a label needs to say."""
    jobs = [{_key(o): o for o in job} for job in overrides]
    keys = {key for job in jobs for key in job}
    return {key for key in keys if len({job.get(key) for job in jobs}) > 1}


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _short(label: str) -> str:
    """`case=all` and `optimus.patterns=all` alone are just `all`."""
    found = re.fullmatch(r"(?:case|optimus\.patterns)=(\S+)", label)
    return found[1] if found else label


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _reused(row: Row) -> str:
    return "" if row.same_as is None else f"not run: it fires nowhere, as job {row.same_as}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_COLUMNS = {
    "job": lambda row: str(row.job),
    "what": lambda row: row.label,
    "QPS p10": lambda row: _number(row.qps_p10, ",.0f"),
    "p50": lambda row: _number(row.qps_p50, ",.0f"),
    "p90": lambda row: _number(row.qps_p90, ",.0f"),
    "gain": lambda row: _number(row.qps_gain, "+.1%"),
    "vs none": lambda row: _number(row.qps_gain_vs_none, "+.1%"),
    "peak MiB": lambda row: _number(row.peak_memory_mib, ",.0f"),
    "kernels": lambda row: _number(row.kernels_per_step, ",.0f"),
    "compile s": lambda row: _number(row.compile_seconds, ".1f"),
    "fired": lambda row: _number(row.fired, "d"),
    "AUC": lambda row: _number(row.auc, ".5f"),
    "note": lambda row: row.error[:60] or _reused(row) or row.doubts[:60],
}


def _pad(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first = [line[0].rjust(widths[0]), line[1].ljust(widths[1])]
    numbers = [c.rjust(w) for c, w in zip(line[2:-1], widths[2:-1], strict=True)]
    return [*first, *numbers, line[-1]]
