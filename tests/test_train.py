"""train.py as users run it, in processes of its own: ends, failures, resume, sweeps."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.lock import hold
from tests import processes

# 40 steps, small tables and layers; the rewritten graph runs as it is.
SMALL = (
    "trainer.accelerator=cpu",
    "optimus.inner=eager",
    "optimus.baseline_steps=12",
    "optimus.warmup_steps=2",
    "optimus.window=4",
    "model.embedding_dim=4",
    "model.bottom_layers=[8]",
    "model.over_layers=[8]",
    "data.train_rows=2560",
    "data.val_rows=128",
    "data.test_rows=128",
    "data.max_rows_per_table=50",
    "data.batch_size=64",
    "data.eval_batch_size=128",
    "trainer.log_every_n_steps=5",
    "trainer.num_sanity_val_steps=0",
    "trainer.enable_progress_bar=false",
    "~callbacks.progress_bar",
)

# What a run computes, beside what it measures of itself.
RESULTS = ("train/loss", "val/auc", "val/logloss", "test/auc", "test/logloss", "test/ne")
# Patterns of this family prepare the graph for the others: no ablation leaves them out.
NORMALIZE = "normalize"


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
sys.argv[0] = "{script}"
runpy.run_path("{script}", run_name="__main__")
"""


def command(folder: Path, *overrides: str) -> list[str]:
    own = [f"hydra.run.dir={folder}", f"paths.runs={folder.parent}"]
    flags = [word for word in overrides if word.startswith("-")]
    rest = [word for word in overrides if not word.startswith("-")]
    return [sys.executable, "train.py", *flags, *own, *SMALL, *rest]


def run(folder: Path, *overrides: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run train.py with its output in `folder` and wait for it."""
    return processes.run(command(folder, *overrides), timeout=500, forked=True, **extra)


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run from start to end, started as users do, and what it said on both streams."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = processes.run(command(folder), timeout=500, TORCH_LOGS="recompiles")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


@pytest.fixture(scope="module")
def whole(started: tuple[Path, str, str]) -> Path:
    return started[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without any pattern."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    done = run(folder, "optimus.patterns=none")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_leaves_everything_in_its_folder(whole: Path) -> None:
    there = {str(f.relative_to(whole)) for f in whole.rglob("*") if f.is_file()}
    assert {
        "result.json",
        "optimus_summary.json",
        "optimus_summary.html",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "csv/metrics.csv",
        ".hydra/config.yaml",
    } <= there
    found = result(whole)
    assert found["error"] == ""
    assert 0 <= found["metrics"]["test/auc"] <= 1
    assert found["metrics"]["test/num_samples"] == 128


def test_the_log_has_the_gain(whole: Path) -> None:
    with (whole / "csv" / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    gains = [float(line["optimus/qps_gain"]) for line in lines if line["optimus/qps_gain"]]
    rates = [float(line["qps"]) for line in lines if line["qps"]]
    assert gains
    assert all(rate > 0 for rate in rates)
    summary = json.loads((whole / "optimus_summary.json").read_text())
    then, now = (summary["phases"][name]["rate"] for name in ("baseline", "optimised"))
    assert summary["gain"]["qps"] == pytest.approx(now / then - 1)
    assert gains[-1] == pytest.approx(summary["gain"]["qps"])
    assert result(whole)["metrics"]["optimus/qps_gain"] == pytest.approx(summary["gain"]["qps"])
    assert result(whole)["metrics"]["optimus/qps"] == pytest.approx(now)


def test_the_log_file_has_what_the_console_has(started: tuple[Path, str, str]) -> None:
    folder, out, errors = started
    kept = (folder / "train.log").read_text()
    assert errors.startswith("Optimus: loading PyTorch")
    for line, shown in (
        ("Optimus: the optimised graph runs from step 12 on", out),
        ("Optimus: summary in ", out),
        ("`Trainer.fit` stopped: `max_epochs=1` reached", errors),
    ):
        assert kept.count(line) == shown.count(line) == 1, line
    assert "][INFO] - Optimus:" not in out


def test_the_test_runs_what_validation_compiled(started: tuple[Path, str, str]) -> None:
    _, _, errors = started
    assert not re.findall(r"Recompiling function optimus_optimised.*\n.*\n.* - (.*)", errors)


def test_optimus_changes_no_result(whole: Path, plain: Path) -> None:
    with_optimus, without = (result(folder)["metrics"] for folder in (whole, plain))
    for name in ("test/auc", "test/logloss", "val/logloss", "train/loss"):
        assert with_optimus[name] == pytest.approx(without[name], abs=2e-4), name


@pytest.mark.slow
def test_killed_and_resumed_ends_as_if_never_stopped(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    last = folder / "checkpoints" / "last.ckpt"
    every = ["callbacks.last.every_n_train_steps=7"]
    # A step takes milliseconds: wait for the file and kill, wherever the run is by then.
    with processes.running(command(folder, *every), forked=True) as running:
        deadline = time.monotonic() + 240
        while not last.exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
    assert last.exists()
    assert not (folder / "result.json").exists()
    done = run(tmp_path / "resumed", *every, "resume=last")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "resumed")["metrics"]["train/loss"] > 0
    for name in ("train/loss", "val/auc", "val/logloss", "test/auc", "test/logloss"):
        resumed = result(tmp_path / "resumed")["metrics"][name]
        assert resumed == result(whole)["metrics"][name], name


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    growing = ["dense_optimizer.name=sgd", "dense_optimizer.lr=1e7", "trainer.log_every_n_steps=1"]
    done = run(tmp_path / "run", *growing, "callbacks.last.every_n_train_steps=1")
    message = last_line(done)
    kept = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert "not finite" in message or "the training loss is" in message
    assert "lower them" in message
    assert f"The last good checkpoint is {kept}" in message
    found = result(tmp_path / "run")
    assert found["error"] == message
    assert {"train/loss", "lr/dense"} <= found["metrics"].keys()
    weights = torch.load(kept, weights_only=True)["state_dict"]
    assert all(value.isfinite().all() for value in weights.values())


def test_a_full_disk_keeps_the_last_good_checkpoint(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole / "checkpoints", folder / "checkpoints")
    before = (folder / "checkpoints" / "last.ckpt").read_bytes()
    # Writing more than this to one file fails, as on a full disk.
    python, script, *rest = command(folder)
    limited = LIMITED.format(size=len(before) // 2, script=script)
    message = last_line(processes.run([python, "-c", limited, *rest], forked=True))
    assert "could not be written" in message
    assert f"The last good checkpoint is {folder / 'checkpoints'}" in message
    assert {f.name for f in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert (folder / "checkpoints" / "last.ckpt").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimus.patterns=horizontl", "nearest valid: horizontal"),
        ("model.embedding_dim=0", "embedding_dim is 0, must be at least 1"),
        ("sparse_arch=fused trainer.gradient_clip_val=1", "clip_val=1 could not reach"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    tmp_path: Path, override: str, expected: str
) -> None:
    done = run(tmp_path / "run", *override.split())
    assert last_line(done).startswith("train.py: ")
    assert expected in last_line(done)
    assert "Optimus" not in done.stdout


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_the_folder_of_a_run_that_goes_on_is_refused(tmp_path: Path, kind: str) -> None:
    hold(tmp_path / "taken", kind)
    mode = ["-m"] if kind == "sweep" else []
    done = run(tmp_path / "taken", *mode, f"hydra.sweep.dir={tmp_path / 'taken'}")
    assert f"another run is writing to {tmp_path / 'taken'}: " in last_line(done)
    assert [file.name for file in (tmp_path / "taken").iterdir()] == [f".{kind}.lock"]


def sweep(folder: Path, *overrides: str, **extra: str) -> subprocess.CompletedProcess[str]:
    done = run(folder, "-m", f"hydra.sweep.dir={folder}", *overrides, **extra)
    assert (folder / "summary.csv").exists(), done.stderr
    return done


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_multirun_goes_on_after_a_failure(whole: Path, tmp_path: Path) -> None:
    # What starts its jobs is a Python of its own, as for users.
    real = {processes.PYTHON: sys.executable}
    done = sweep(tmp_path, "optimus.patterns=none,all", "model.embedding_dim=4,0", **real)
    assert "2 of 4 jobs failed" in done.stderr
    rows = table(tmp_path)
    failed = [row for row in rows if "embedding_dim=0" in row["label"]]
    none, all_ = (row for row in rows if "embedding_dim=4" in row["label"])
    assert len(failed) == 2
    assert all("embedding_dim is 0" in row["error"] for row in failed)
    assert "patterns=none" in none["label"] and "patterns=all" in all_["label"]
    # The same numbers as a run of its own, whatever ran before it.
    for name in RESULTS:
        own = result(tmp_path / all_["job"])["metrics"][name]
        assert own == result(whole)["metrics"][name], name
    for row in (none, all_):
        assert row["error"] == ""
        assert float(row["qps_p10"]) <= float(row["qps_p50"]) <= float(row["qps_p90"])
        assert float(row["peak_memory_mib"]) > 0
        assert float(row["compile_seconds"]) > 0
    assert none["qps_gain"] == ""
    assert math.isfinite(float(all_["qps_gain"]))
    assert float(none["qps_gain_vs_none"]) == 0
    assert "what" in done.stdout
    assert (tmp_path / "summary.png").stat().st_size > 0


@pytest.mark.slow
def test_leave_one_out_ends_in_one_table(whole: Path, plain: Path, tmp_path: Path) -> None:
    summary = json.loads((whole / "optimus_summary.json").read_text())
    left_out = {
        bool(p["fired"]): p["name"] for p in summary["patterns"] if p["family"] != NORMALIZE
    }
    cases = ["none", "all", f"without_{left_out[False]}", f"without_{left_out[True]}"]
    done = sweep(tmp_path, "sweep=leave_one_out", f"case={','.join(cases)}")
    assert done.returncode == 0, done.stderr
    rows = table(tmp_path)
    assert [row["label"] for row in rows] == cases
    # The baseline of the table is the run that a user makes by hand.
    for name in RESULTS:
        assert result(tmp_path / "0")["metrics"][name] == result(plain)["metrics"][name], name
    # What fires nowhere is not run again, and the table says so.
    assert [row["same_as"] for row in rows] == ["", "", "1", ""]
    assert rows[2]["auc"] == rows[1]["auc"]
    assert "it fires nowhere, as job 1" in done.stdout
    summary = json.loads((tmp_path / "3" / "optimus_summary.json").read_text())
    assert summary["settings"]["disable"] == [left_out[True]]
    assert left_out[True] not in {pattern["name"] for pattern in summary["patterns"]}
