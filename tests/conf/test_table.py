"""The table of a multirun: from the job folders to rows, text, CSV and plot."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.jobs import Result
from conf.swept import BASIC, num_jobs, swept_keys
from conf.table import plot, rows, text, write_csv
from conf.unfired import unfired_result
from optimus.pipeline import pattern_names


def job(
    folder: Path, number: int, overrides: list[str], qps: float | None, **result: object
) -> None:
    """A job's folder as a run leaves it; `qps` None is a job that never trained."""
    there = folder / str(number)
    there.mkdir()
    Result(job=number, overrides=overrides, **result).write(there)  # type: ignore[arg-type]
    if qps is not None:
        phase = {
            "rates": [qps - 10, qps, qps + 10],
            "peak_memory": {"resident": 3 * 2**20},
            "kernels_per_step": 40,
            "compile_seconds": 2.5,
            "recompiles": 0,
        }
        summary = {
            "phases": {"optimised": phase},
            "gain": {"qps": 0.5, "peak_memory": 0.25, "doubts": ["few windows", "noise"]},
            "patterns": [{"name": "a", "fired": 3}, {"name": "b", "fired": 4}],
        }
        (there / "optimus_summary.json").write_text(json.dumps(summary))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    metrics = {"test/auc": 0.75, "test/logloss": 0.5, "val/auc": 0.1}
    job(tmp_path, 0, ["optimus.patterns=none", "seed=1"], 100.0, metrics=metrics)
    job(tmp_path, 10, ["optimus.patterns=all", "seed=2"], 300.0, metrics={"val/auc": 0.7})
    job(tmp_path, 2, ["optimus.patterns=all", "seed=1"], 150.0, metrics=metrics, seconds=7.0)
    job(tmp_path, 3, ["optimus.patterns=[x]", "seed=1"], None, error="ValueError: no, not that")
    return tmp_path


def test_rows_in_the_order_of_jobs_with_their_figures(sweep: Path) -> None:
    table = rows(sweep)
    assert [row.job for row in table] == [0, 2, 3, 10]
    row = table[1]
    assert (row.qps_p10, row.qps_p50, row.qps_p90) == (140, 150, 160)
    assert (row.qps_gain, row.peak_memory_gain, row.peak_memory_mib) == (0.5, 0.25, 3)
    assert (row.kernels_per_step, row.compile_seconds, row.fired) == (40, 2.5, 7)
    assert (row.auc, row.logloss, row.seconds) == (0.75, 0.5, 7.0)
    assert row.doubts == "few windows; noise"
    assert table[3].auc == 0.7


def test_gain_is_against_the_none_job_of_the_same_settings(sweep: Path) -> None:
    assert [row.qps_gain_vs_none for row in rows(sweep)] == [0.0, 0.5, None, None]


def test_what_the_two_gains_compare_is_said_under_the_table(sweep: Path) -> None:
    head, *_, note, error = text(rows(sweep)).splitlines()
    assert "  gain  " in head and "  vs none  " in head
    assert note.startswith("gain: against the job's own first steps")
    assert "vs none: p50 against that of the job alike" in note
    assert error.startswith("job 3 ")


def test_a_failed_job_is_a_row_with_its_error(sweep: Path) -> None:
    failed = rows(sweep)[2]
    assert failed.error == "ValueError: no, not that"
    assert failed.qps_p50 is None
    assert "job 3 (optimus.patterns=[x] seed=1) failed: ValueError: no, not that" in text(
        rows(sweep)
    )


def test_labels_say_what_differs(tmp_path: Path) -> None:
    for number, case in enumerate(("none", "all", "without_x")):
        job(tmp_path, number, [f"case={case}", "sweep=leave_one_out"], 1000.0 * (number + 1))
    assert [row.label for row in rows(tmp_path)] == ["none", "all", "without_x"]
    assert "+100.0%" in text(rows(tmp_path))


def test_the_first_row_has_its_label_before_there_are_others(tmp_path: Path) -> None:
    job(tmp_path, 0, ["case=none", "seed=1"], 1000.0)
    assert [row.label for row in rows(tmp_path, ["case"])] == ["none"]


def test_what_a_multirun_varies_and_how_many_jobs_it_has() -> None:
    sweeper = {"_target_": BASIC, "params": {"case": "none,all,without_x", "model": "dlrm"}}
    overrides = {"task": ["seed=range(1,3)", "case=none,all", "sweep=leave_one_out"]}
    config = OmegaConf.create({"hydra": {"sweeper": sweeper, "overrides": overrides}})
    assert swept_keys(config) == {"case": 2, "seed": 2}
    assert num_jobs(config) == 4
    config.hydra.sweeper._target_ = "hydra_plugins.another.Sweeper"
    assert num_jobs(config) is None


def test_a_job_not_run_repeats_the_figures_of_the_one_it_equals(tmp_path: Path) -> None:
    metrics = {"test/auc": 0.75}
    job(tmp_path, 0, ["case=none"], 100.0, metrics=metrics)
    job(tmp_path, 1, ["case=all"], 150.0, metrics=metrics, seconds=7.0)
    job(tmp_path, 2, ["case=without_c"], None, metrics=metrics, same_as=1)
    run, copy = rows(tmp_path)[1:]
    assert replace(copy, job=1, label="all", same_as=None, seconds=7.0) == run
    assert "not run: it fires nowhere, as job 1" in text([copy])


def test_only_a_pattern_that_fired_nowhere_is_known(tmp_path: Path) -> None:
    one, other, *_ = pattern_names()
    overrides = ["seed=1", "case=all"]
    job(tmp_path, 1, overrides, 150.0, metrics={"test/auc": 0.75}, seconds=7.0)
    file = tmp_path / "1" / "optimus_summary.json"
    patterns = [{"name": one, "fired": 0}, {"name": other, "fired": 2}]
    file.write_text(json.dumps({"patterns": patterns}))
    found = unfired_result(tmp_path, ["seed=1", f"case=without_{one}"], f"without_{one}")
    assert found is not None
    assert (found.same_as, found.seconds, found.metrics) == (1, 0.0, {"test/auc": 0.75})
    for seed, name in (("seed=1", other), ("seed=2", one)):
        assert unfired_result(tmp_path, [seed, f"case=without_{name}"], f"without_{name}") is None
    assert unfired_result(tmp_path, overrides, "all") is None
    file.unlink()
    assert unfired_result(tmp_path, ["seed=1", f"case=without_{one}"], f"without_{one}") is None


def test_one_job_alone(tmp_path: Path) -> None:
    job(tmp_path, 0, ["seed=1"], 100.0)
    assert [row.label for row in rows(tmp_path)] == ["defaults"]


def test_csv_has_all_columns_and_empty_cells(sweep: Path) -> None:
    write_csv(rows(sweep), sweep / "summary.csv")
    with (sweep / "summary.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [line["job"] for line in read] == ["0", "2", "3", "10"]
    assert read[1]["qps_p50"] == "150"
    assert read[2]["qps_p50"] == ""
    assert read[2]["error"] == "ValueError: no, not that"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(sweep: Path, suffix: str) -> None:
    plot(rows(sweep), sweep / f"summary.{suffix}")
    written = (sweep / f"summary.{suffix}").read_bytes()
    assert written.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        # Three jobs were measured: a bar for each in both halves.
        assert (
            written.count(b'style="fill: #4c72b0"') == written.count(b'style="fill: #dd8452"') == 3
        )
