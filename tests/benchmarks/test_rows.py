"""Rows of the step benchmark: the gate, the files, the tables."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots import draw
from benchmarks.rows import Row, append, speed_ups, summary, table

GOOD = {"error": 0.003, "eager_error": 0.002, "gradient_error": 0.01, "eager_gradient_error": 0.01}


def row(provider: str, ms: float, **more: Any) -> Row:
    first = {"date": "2026-11-30", "commit": "abc", "gpu": "G", "torch": "2", "batch": 64}
    made = Row(**({"model": "m"} | first | GOOD | more), provider=provider)  # type: ignore[arg-type]
    made.fill_times([ms] * 5)
    return made


@pytest.mark.parametrize(
    ("wrong", "is_right"),
    [
        ({}, True),
        ({"error": 0.0041}, False),
        ({"error": math.nan}, False),
        ({"gradient_error": 0.03}, False),
        ({"gradient_error": math.nan}, False),
        ({"gradient_error": math.inf}, False),
        ({"gradient_error": math.nan, "eager_gradient_error": math.nan}, True),
        ({"failure": "died"}, False),
    ],
)
def test_only_what_is_as_exact_as_eager_is_right(wrong: dict[str, Any], is_right: bool) -> None:
    assert row("p", 1.0, **wrong).is_right is is_right


def test_times_are_median_and_deciles_of_the_steps() -> None:
    made = row("p", 1.0)
    made.fill_times([float(i) for i in range(11)])
    assert (made.ms, made.ms_p10, made.ms_p90) == (5.0, 1.0, 9.0)
    assert made.qps == 64 / 5.0 * 1e3


def test_no_speed_up_is_printed_for_wrong_results() -> None:
    rows = [row("compile", 8.0), row("fast", 2.0), row("wrong", 1.0, error=1.0)]
    lines = table(rows).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")][5] for line in lines]
    assert cells == ["1.00", "4.00", "wrong"]
    assert speed_ups(rows) == {0: 1.0, 1: 4.0}


def test_a_failure_is_shown_in_the_table() -> None:
    rows = [row("compile", 8.0), row("broken", 1.0, failure="RuntimeError: a | b")]
    assert "RuntimeError: a / b" in table(rows)
    assert table(rows).splitlines()[-1].count("|") == table(rows).splitlines()[0].count("|")


def test_summary_is_over_models_with_repeated_branches_that_are_right() -> None:
    rows = [
        row("compile", 8.0, peak_allocated_mb=100.0),
        row("fast", 2.0, peak_allocated_mb=50.0),
        row("compile", 9.0, model="n", peak_allocated_mb=100.0),
        row("fast", 1.0, model="n", peak_allocated_mb=200.0),
        row("compile", 9.0, model="control"),
        row("fast", 9.0, model="control"),
    ]
    assert "| fast | 2 | 6.00 | 4.00 | 1.00 |" in summary(rows, ["m", "n"])
    rows[3].error = 1.0
    assert "| fast | 1 | 4.00 | 4.00 | 0.50 |" in summary(rows, ["m", "n"])


def test_new_columns_are_added_behind_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    path.write_text("date,provider,note\n2026-01-01,old,kept\n")
    append([row("new", 2.0)], path)
    append([row("newer", 3.0)], path)
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [r["provider"] for r in found] == ["old", "new", "newer"]
    assert list(found[0])[:3] == ["date", "provider", "note"]
    assert found[0]["note"] == "kept" and found[0]["ms"] == "" and found[2]["ms"] == "3.0"


def test_plots_are_drawn_of_any_number_of_models(tmp_path: Path) -> None:
    rows = [row("compile", 8.0), row("optimus_all", 2.0), row("wrong", 1.0, error=1.0)]
    rows += [row("compile", 8.0, model=f"m{i}") for i in range(4)]
    draw(rows, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    draw([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
