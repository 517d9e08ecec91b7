"""Results as rows of CSV files, and tables of those of `benchmarks.step` in Markdown."""

from __future__ import annotations

import csv
import datetime
import math
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

NAN = float("nan")


@dataclass
class Row:
    """One provider on one model at one batch size.

    Times are milliseconds of a training step, memory MiB in a process of the provider's own, with
    all it holds. `compile_seconds` is the first step's, with cold caches. Errors are relative to
    float64, of the logits and of the gradients of the inputs. `failure` says why there is no more.
    """

    date: str
    commit: str
    gpu: str
    torch: str
    model: str
    batch: int
    provider: str
    ms: float = NAN
    ms_p10: float = NAN
    ms_p90: float = NAN
    qps: float = NAN
    kernels: int = 0
    gpu_busy_ms: float = NAN
    peak_allocated_mb: float = NAN
    peak_reserved_mb: float = NAN
    compile_seconds: float = NAN
    error: float = NAN
    eager_error: float = NAN
    failure: str = ""
    gradient_error: float = NAN
    eager_gradient_error: float = NAN
    size: str = "full"
    precision: str = "bf16"
    inner: str = "inductor"
    python: str = ""
    triton: str = ""

    @property
    def is_right(self) -> bool:
        """Whether logits and gradients are as near to float64 as eager's, by a factor of two."""
        gradients = math.isnan(self.eager_gradient_error) or _is_near(
            self.gradient_error, self.eager_gradient_error
        )
        return not self.failure and _is_near(self.error, self.eager_error) and gradients

    def fill_times(self, times: Sequence[float]) -> None:
        """Median and deciles of the milliseconds of single steps."""
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        self.ms, self.ms_p10, self.ms_p90 = statistics.median(times), deciles[0], deciles[-1]
        self.qps = self.batch / self.ms * 1e3


def _is_near(error: float, eager_error: float) -> bool:
    return error <= 2 * eager_error + 1e-6


def commit() -> str:
    """The short id of the code that runs, with a plus sign if it was changed since."""
    found = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return (found or "unknown") + ("+" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    folder = Path(__file__).parent
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    return found.stdout.strip()


def where(device: torch.device) -> dict[str, str]:
    """Date, hardware and versions, for the fields of `Row`."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = ""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "triton": triton,
    }


def append(rows: Sequence[Any], path: Path) -> None:
    """Add `rows`, of one dataclass, to a CSV file; columns that it lacks come behind those that it
    has."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    old = list(_read(path)) if path.exists() else []
    names = list(old[0]) if old else []
    names += [f.name for f in fields(rows[0]) if f.name not in names]
    # Written anew and then moved: a run that is killed here loses nothing.
    draft = path.with_suffix(".tmp")
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(old)
        writer.writerows(asdict(row) for row in rows)
    draft.replace(path)


def _read(path: Path) -> Iterable[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; the speed-up is over plain compile, for right results only."""
    base = _base(rows)
    lines = [
        "| model | provider | ms (p10 to p90) | QPS | speed-up | kernels | busy ms "
        "| allocated, reserved MB | compile s | error, of gradients |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.model} {r.batch} | {r.provider} | {r.ms:.2f} ({r.ms_p10:.2f} to {r.ms_p90:.2f})"
            f" | {r.qps:.0f} | {_gain(r, base)} | {r.kernels} | {r.gpu_busy_ms:.2f} "
            f"| {r.peak_allocated_mb:.0f}, {r.peak_reserved_mb:.0f} | {r.compile_seconds:.1f} "
            f"| {r.error:.1e}, {r.gradient_error:.1e} |"
        )
    return "\n".join(lines).replace("nan", "-")


def summary(rows: Sequence[Row], repeated: Sequence[str]) -> str:
    """For each provider the geometric means over the `repeated` models (those with repeated
    branches): QPS and peak memory against plain compile, and the smallest gain."""
    base = _base(rows)
    lines = [
        "| provider | models | QPS, geometric mean | smallest | memory, geometric mean |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r.provider for r in rows):
        mine = [r for r in rows if r.provider == name and r.model in repeated and r.is_right]
        pairs = [(r, base[_key(r)]) for r in mine if _key(r) in base]
        gains = [plain.ms / r.ms for r, plain in pairs if r.ms > 0 and plain.ms > 0]
        memory = [r.peak_allocated_mb / plain.peak_allocated_mb for r, plain in pairs]
        memory = [share for share in memory if share > 0]
        if gains:
            lines.append(
                f"| {name} | {len(gains)} | {statistics.geometric_mean(gains):.2f} "
                f"| {min(gains):.2f} | {_mean(memory)} |"
            )
    return "\n".join(lines)


def speed_ups(rows: Sequence[Row]) -> dict[int, float]:
    """Speed-ups over plain compile by position, of the rows whose results are right."""
    base = _base(rows)
    found = {i: base[_key(r)].ms / r.ms for i, r in enumerate(rows) if _key(r) in base}
    return {i: gain for i, gain in found.items() if rows[i].is_right and gain > 0}


def _gain(row: Row, base: dict[tuple[str, int], Row]) -> str:
    if row.failure:
        return row.failure[:60].replace("|", "/")
    if not row.is_right:
        return "wrong"
    plain = base.get(_key(row))
    return "-" if plain is None else f"{plain.ms / row.ms:.2f}"


def _base(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    return {_key(r): r for r in rows if r.provider == "compile" and not r.failure}


def _key(row: Row) -> tuple[str, int]:
    return row.model, row.batch


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(values):.2f}" if values else "-"
