"""Jobs of a multirun: their own processes, their results, their failures."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from conf.jobs import Result, describe, recorded
from conf.lock import hold
from tests import processes

ROOT = Path(__file__).parents[2]

# A program as train.py is, with jobs that count what a job before them left in the process.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import hydra
from lightning.pytorch.utilities.exceptions import SIGTERMException
from conf import jobs
# As in a terminal: tests may run in the background of a script, where SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
LEFT = []
def stop(*_):
    raise SIGTERMException
@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    if jobs.in_multirun():
        return jobs.run_in_own_process(Path(__file__), "score")
    folder = hydra.core.hydra_config.HydraConfig.get().runtime.output_dir
    with jobs.recorded(Path(folder)) as result:
        if cfg.x == 2:
            raise RuntimeError("two is too many\\nsecond line")
        if cfg.x == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if cfg.x == 5:
            signal.signal(signal.SIGTERM, stop)
            Path(folder, "began").touch()
            time.sleep(60)
        LEFT.append(cfg.x)
        result.metrics = {"score": float(cfg.x), "left": float(len(LEFT)), "bad": float("nan")}
        print("cache", os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
    return result.metric("score")
if __name__ == "__main__":
    main()
"""


def sweep(tmp_path: Path, *arguments: str, **environment: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = str(tmp_path / "it's = a, {sweep}").replace("'", r"\'")
    command = [sys.executable, str(program), "-m", f"hydra.sweep.dir='{folder}'", *arguments]
    done = processes.run(command, forked=True, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the four kinds of jobs ran, and what they said."""
    folder = tmp_path_factory.mktemp("swept")
    return folder, sweep(folder, "+x=1,2,3,4")


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_sweep_says_how_far_it_came(
    tmp_path: Path, ended_by: signal.Signals
) -> None:
    program, said, folder = tmp_path / "program.py", tmp_path / "said", tmp_path / "swept"
    program.write_text(PROGRAM)
    table = "+hydra.callbacks.table._target_=conf.table.SummaryTable"
    said.touch()
    command = [sys.executable, str(program), "-m", f"hydra.sweep.dir={folder}", table, "+x=1,5,4"]
    with processes.running(command, err=str(said), forked=True) as running:
        deadline = time.monotonic() + 100
        while not (folder / "1" / "began").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        with (folder / "summary.csv").open() as file:
            assert [row["label"] for row in csv.DictReader(file)] == ["+x=1"]
        os.kill(running.pid, ended_by)
        assert running.wait(60) == 128 + ended_by
    line = f"train.py: interrupted, 1 of 3 jobs are done: {folder / 'summary.csv'}"
    assert said.read_text().splitlines()[-1] == line
    with (folder / "summary.csv").open() as file:
        rows = [(row["job"], row["label"], row["error"]) for row in csv.DictReader(file)]
    assert rows == [("0", "+x=1", ""), ("1", "+x=5", "interrupted by SIGTERM")]


def results(tmp_path: Path) -> list[Result]:
    found = [Result.read(file.parent) for file in tmp_path.rglob("result.json")]
    return sorted((r for r in found if r), key=lambda r: r.job)


def test_every_job_has_its_own_process_and_a_failure_stops_no_other(
    swept: tuple[Path, str],
) -> None:
    one, two, three, four = results(swept[0])
    assert [r.job for r in (one, two, three, four)] == [0, 1, 2, 3]
    assert [r.overrides for r in (one, four)] == [["+x=1"], ["+x=4"]]
    assert (one.error, four.error) == ("", "")
    assert one.metrics["left"] == four.metrics["left"] == 1
    assert math.isnan(one.metrics["bad"])
    assert two.error == "RuntimeError: two is too many"
    assert "SIGKILL" in three.error


def test_each_job_compiles_cold_unless_a_cache_is_named(
    swept: tuple[Path, str], tmp_path: Path
) -> None:
    caches = [line for line in swept[1].splitlines() if line.startswith("cache ")]
    assert len(set(caches)) == 2
    assert "cache None" not in caches
    assert not any(Path(line.split()[1]).exists() for line in caches)
    named = sweep(tmp_path, "+x=1,4", TORCHINDUCTOR_CACHE_DIR="/somewhere/warm")
    assert named.count("cache /somewhere/warm") == 2


def test_no_job_runs_in_the_folder_of_a_run(tmp_path: Path) -> None:
    hold(tmp_path / "it's = a, {sweep}" / "0", "run")
    sweep(tmp_path, "+x=1,4")
    refused, other = results(tmp_path)
    assert refused.error == "the job's process ended with exit status 1"
    assert other.error == ""


KILLED = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from conf import jobs
context = multiprocessing.get_context("fork")
context.Process(target=jobs._be_program, args=(sys.argv[1:], {})).start()
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
JOB = """
import os, sys, time
from pathlib import Path
os.setsid()  # or the test's end would be its own
Path(sys.argv[1]).with_suffix(".part").write_text(str(os.getpid()))
Path(sys.argv[1]).with_suffix(".part").rename(sys.argv[1])
time.sleep(60)
"""


def test_no_job_outlives_a_multirun_that_is_killed(tmp_path: Path) -> None:
    multirun, job, told = tmp_path / "multirun.py", tmp_path / "job.py", tmp_path / "pid"
    multirun.write_text(KILLED)
    job.write_text(JOB)
    done = processes.run([sys.executable, str(multirun), str(job), str(told)], forked=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(told.read_text())
    deadline = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_result_survives_the_file_and_says_which_metrics_there_are(tmp_path: Path) -> None:
    with recorded(tmp_path) as result:
        result.metrics = {"test/auc": 0.75, "test/ne": math.inf}
    read = Result.read(tmp_path)
    assert read is not None
    assert read.metric("test/auc") == 0.75
    json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    with pytest.raises(ValueError, match="test/auc, test/ne"):
        read.metric("val/auc")


def test_an_error_is_recorded_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), recorded(tmp_path):
        raise KeyboardInterrupt
    read = Result.read(tmp_path)
    assert read is not None
    assert read.error == "interrupted by SIGINT"
    assert math.isnan(read.metric("test/auc"))


def test_signals_are_named_whatever_lightning_makes_of_them(tmp_path: Path) -> None:
    exit_after = SystemExit(1)
    exit_after.__context__ = KeyboardInterrupt()
    with pytest.raises(SystemExit) as ended, recorded(tmp_path):
        raise exit_after
    read = Result.read(tmp_path)
    assert read is not None and read.error == "interrupted by SIGINT" and ended.value.code == 1
    with pytest.raises(SystemExit) as ended, recorded(tmp_path):
        raise SIGTERMException
    read = Result.read(tmp_path)
    assert read is not None and read.error == "interrupted by SIGTERM"
    assert ended.value.code == 128 + signal.SIGTERM


def test_describe_is_one_line() -> None:
    assert describe(ValueError("first\nsecond")) == "ValueError: first"
    assert describe(SystemExit("train.py: no")) == "train.py: no"
    assert describe(SystemExit(3)) == "exit status 3"


def test_no_or_broken_result_is_none(tmp_path: Path) -> None:
    assert Result.read(tmp_path) is None
    (tmp_path / "result.json").write_text("{")
    assert Result.read(tmp_path) is None
