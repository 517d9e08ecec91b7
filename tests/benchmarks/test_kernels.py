"""benchmarks.kernels stays alive: every case runs, is right, and is written down."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.kernel_cases import CASES
from benchmarks.kernels import Row, main, table

SMALL = ["mlp 256-128-64-1", "dot_interaction 26x128", "batched_norm 39x10 none"]


@pytest.mark.slow
def test_cases_run_and_are_right(tmp_path: Path) -> None:
    out = tmp_path / "kernels.csv"
    rows = main(["--case", *SMALL, "--rows", "3", "--out", str(out), "--plots", str(tmp_path)])
    assert {row.provider for row in rows} >= {"eager", "ours"}
    for row in rows:
        assert row.is_right, row
    with out.open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    assert len(list(tmp_path.glob("*.png"))) == len(SMALL)


def test_least_traffic_and_work_are_counted() -> None:
    case = CASES["mlp 256-128-64-1"]
    weights = 256 * 128 + 128 * 64 + 64
    assert case.flops(10) == 2 * 10 * weights
    assert case.bytes(10, 2) == 2 * (10 * 256 + weights + 128 + 64 + 1 + 10)


def test_a_wrong_result_gets_no_speed_up() -> None:
    def row(provider: str, us: float, error: float) -> Row:
        known = Row("", "", "", "", "", "", "case", 8, provider, False, False, us)
        known.error, known.eager_error = error, 1e-3
        return known

    text = table([row("eager", 8.0, 1e-3), row("compile", 4.0, 1e-3), row("ours", 2.0, 1e-1)])
    right, wrong = text.splitlines()[-2:]
    assert "| 2.00 | 1.00 |" in right
    assert "wrong: 1.0e-01" in wrong
