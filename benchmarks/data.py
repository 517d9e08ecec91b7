"""How many rows a second each data module makes, converts and reads.

    python -m benchmarks.data --out benchmarks/results/data.csv

One core each: one thread, no workers. Rates are given by processor time, which other work on the
machine disturbs little, and by wall-clock time. In the cases with workers the processor time is
that of the training process alone: what a batch costs there. The text that is converted is written
by this script: Criteo's format, random values.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from recsys.data.criteo import Criteo
from recsys.data.criteo_convert import convert
from recsys.data.criteo_synthetic import CriteoSynthetic
from recsys.data.datamodule import RecDataModule

BATCH = 4096


@dataclass
class Row:
    """One line of the results. Rates are rows a second, the best of the rounds."""

    date: str
    commit: str
    machine: str
    case: str
    rows: int
    rows_per_cpu_second: float
    rows_per_second: float


def measure(case: str, rows: int, work: Callable[[], object], rounds: int = 5) -> Row:
    """Time `work`, which handles `rows` rows, after one round to warm up."""
    work()
    cpu, wall = [], []
    for _ in range(rounds):
        cpu_start, wall_start = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - wall_start)
    row = Row(*_where(), case, rows, round(rows / min(cpu)), round(rows / min(wall)))
    print(f"{case:40s} {row.rows_per_cpu_second:>12,} {row.rows_per_second:>12,}", flush=True)
    return row


def epoch(data: RecDataModule) -> Callable[[], int]:
    """One pass over the training batches."""
    loader = data.train_dataloader()
    return lambda: sum(len(batch) for batch in loader)


def synthetic(rows: int) -> list[Row]:
    """Rows made as they are read, kept in memory, and read by two workers."""
    cases: dict[str, dict[str, Any]] = {
        "criteo_synthetic, made": {},
        "criteo_synthetic, made, Kaggle tables": {"max_rows_per_table": None},
        "criteo_synthetic, made, multi-hot": {"multi_hot": True},
        "criteo_synthetic, in memory": {"in_memory": True},
        "criteo_synthetic, made, 2 workers": {"num_workers": 2},
        "criteo_synthetic, in memory, 2 workers": {"in_memory": True, "num_workers": 2},
    }
    results: list[Row] = []
    for case, options in cases.items():
        data = CriteoSynthetic(train_rows=rows, batch_size=BATCH, **{"num_workers": 0, **options})
        data.setup()
        results.append(measure(case, rows // BATCH * BATCH, epoch(data)))
        data.teardown("fit")
    return results


def criteo(rows: int) -> list[Row]:
    """Text converted, and the arrays read shuffled and in order."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder / "train.txt", rows)
        turns = iter(range(100))
        size = text.stat().st_size / rows
        results = [
            measure(
                f"criteo, text of {size:.0f} bytes a row converted",
                rows,
                lambda: convert(text, folder / str(next(turns))),
            )
        ]
        for shuffle in ("rows", "batches", "none"):
            data = Criteo(text, data_dir=folder, batch_size=BATCH, num_workers=0, shuffle=shuffle)
            data.prepare_data()
            data.setup()
            count = len(data.source("train")) // BATCH * BATCH
            results.append(measure(f"criteo, memory-mapped, shuffle={shuffle}", count, epoch(data)))
    return results


def write_text(path: Path, rows: int) -> Path:
    """Lines in Criteo's format with as many digits and empty fields as Kaggle's have on average."""
    rng = np.random.default_rng(0)
    kinds = 10_000
    lines = []
    for _ in range(kinds):
        integers = [str(int(x)) for x in np.expm1(rng.normal(3, 2, 13)).clip(0)]
        words = [f"{int(x):08x}" for x in rng.integers(0, 2**32, 26)]
        cells = [
            cell if keep else ""
            for cell, keep in zip([*integers, *words], rng.random(39) > 0.15, strict=True)
        ]
        lines.append("\t".join([str(rng.integers(0, 2)), *cells]))
    with path.open("w") as file:
        for start in range(0, rows, kinds):
            file.write("\n".join(lines[: rows - start]) + "\n")
    return path


@cache
def _where() -> tuple[str, str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return date, commit or "unknown", _processor()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def append(rows: Sequence[Row], path: Path) -> None:
    """Add `rows` to a CSV file, with a header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'case':40s} {'rows/cpu s':>12s} {'rows/s':>12s}")
    rows = [*synthetic(options.rows), *criteo(options.rows)]
    if options.out is not None:
        append(rows, options.out)


if __name__ == "__main__":
    main()
