"""How one run ends (result.json), and how each job of a multirun gets a process of its own.

Hydra's launcher runs all jobs in one process, where compiler configuration, compile caches, peak
memory and random state would leak from one job to the next. Here the job that the launcher starts
only runs train.py again, in a new process with the composed configuration, and waits for it. That
process is forked from a server which has imported all that train.py imports and done nothing else:
a job is as isolated as a program of its own, and does not spend its first seconds on importing.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from conf import transcript

RESULT = "result.json"
# What a job has to end by itself: less than schedulers give a program between SIGTERM and SIGKILL.
_GRACE_S = 8.0
_INTERRUPTED = "interrupted by "


@dataclass
class Result:
    """How a run ended. `error` is empty when it ended well; `metrics` are the last ones logged.

    `same_as` is set where a job of a multirun was not run because another's result is its own, too.
    """

    error: str = ""
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    job: int = 0
    same_as: int | None = None

    def metric(self, name: str) -> float:
        """The value Hydra's sweepers get; NaN when the run failed.

        Raises ValueError, naming what there is, when a run that ended well has no such metric.
        """
        if self.error:
            return math.nan
        if name not in self.metrics:
            there = ", ".join(sorted(self.metrics)) or "none"
            raise ValueError(f"metric {name!r} was not logged; these were: {there}")
        return self.metrics[name]

    def write(self, folder: Path) -> None:
        """Write RESULT into `folder`; NaN and infinity become null, which all JSON readers take."""
        plain = asdict(self)
        plain["metrics"] = {k: v if math.isfinite(v) else None for k, v in self.metrics.items()}
        (folder / RESULT).write_text(json.dumps(plain, indent=2) + "\n")

    @staticmethod
    def read(folder: Path) -> Result | None:
        """What `write` wrote, None when there is nothing (readable) there."""
        try:
            plain: dict[str, Any] = json.loads((folder / RESULT).read_text())
        except (OSError, ValueError):
            return None
        metrics = {k: math.nan if v is None else v for k, v in plain["metrics"].items()}
        return Result(**{**plain, "metrics": metrics})


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[Result]:
    """Write the result of the block into `folder`, also when it raises; on rank 0 only.

    What is said in the block goes to Hydra's log file, too. A block that SIGTERM ended
    raises SystemExit with the exit status that shells give for it, where Lightning's would be 0.
    """
    result, began = Result(), time.monotonic()
    transcript.begin()
    if HydraConfig.initialized():
        result.overrides = list(HydraConfig.get().overrides.task)
    try:
        yield result
    except BaseException as error:
        result.error = describe(error)
        transcript.stopped(result.error)
        if isinstance(error, SIGTERMException):
            raise SystemExit(128 + signal.SIGTERM) from error
        raise
    finally:
        result.seconds = round(time.monotonic() - began, 3)
        # A full disk may be why the run ended: its error is the one to show.
        with contextlib.suppress(OSError):
            if getattr(rank_zero_only, "rank", 0) == 0:
                result.write(folder)


def was_interrupted(error: str) -> bool:
    """Whether a Result's `error` says that a signal ended the run, and nothing of its own."""
    return error.startswith(_INTERRUPTED)


def describe(error: BaseException) -> str:
    """One line for a table: the kind of error, unless it speaks for itself, and its first line."""
    lines = str(error).strip().splitlines()
    if signal_name := _interrupted_by(error):
        return f"{_INTERRUPTED}{signal_name}"
    if isinstance(error, SystemExit):
        return lines[0] if isinstance(error.code, str) and lines else f"exit status {error.code}"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _interrupted_by(error: BaseException) -> str:
    """The signal that ended the run, where one did: Lightning makes exits of both."""
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return signal.SIGINT.name
    return signal.SIGTERM.name if isinstance(error, SIGTERMException) else ""


def in_multirun() -> bool:
    """Whether this is the job of a multirun as Hydra's launcher starts it."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def run_in_own_process(script: Path, metric: str, known: Result | None = None) -> float:
    """Run the current job of a multirun as a process of its own; its `metric`, NaN if it failed.

    A `known` result is recorded as the job's, and nothing is run.

    The process has the job's folder for its output, and compile caches of its own unless the
    environment names some: compile seconds are then those of a first run, whatever ran before.
    """
    folder = Path(HydraConfig.get().runtime.output_dir)
    result = known or _result_of(script, folder)
    _write_as_job(result, folder)
    return result.metric(metric)


def _write_as_job(result: Result, folder: Path) -> None:
    job = HydraConfig.get()
    result.job = int(job.job.num)
    result.overrides = list(job.overrides.task)
    result.write(folder)


def _result_of(script: Path, folder: Path) -> Result:
    began = time.monotonic()
    (folder / RESULT).unlink(missing_ok=True)  # of a multirun before, in the same folder
    try:
        with _compile_cache() as cache:
            code = _run(_command(script, folder), cache)
    except SystemExit:  # a signal to the multirun has ended the job, too
        if result := Result.read(folder):
            _write_as_job(result, folder)
        raise
    result = Result.read(folder) or Result(seconds=round(time.monotonic() - began, 3))
    if code and not result.error:
        result.error = _exit_reason(code)
    return result


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Exit status of `command`, a script and its arguments; minus the signal that killed it."""
    context = multiprocessing.get_context("forkserver")
    # The server reads it when it starts, at the first job: what takes long to import.
    context.set_forkserver_preload(["conf.build", "conf.table"])
    process = context.Process(target=_be_program, args=(list(command), dict(environment)))
    process.start()
    try:
        process.join()
    finally:
        process.terminate()
        process.join(_GRACE_S)
        process.kill()
        process.join()
    return process.exitcode or 0


def _be_program(command: list[str], environment: Mapping[str, str]) -> None:
    """What the new process does: `python COMMAND` in `environment`."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")


def _end_with_parent() -> None:
    """End, as by SIGTERM, when the multirun is gone: one that is killed can end no job itself."""
    multirun = multiprocessing.parent_process()
    assert multirun is not None
    multirun.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _command(script: Path, folder: Path) -> list[str]:
    # The configuration as composed for this job is what Hydra has just written to its folder.
    quoted = "'" + str(folder).replace("'", r"\'") + "'"
    return [
        str(script),
        f"--config-path={folder / '.hydra'}",
        "--config-name=config",
        f"hydra.run.dir={quoted}",
        "hydra.output_subdir=null",
        "+hydra.callbacks.one_run_a_folder._target_=conf.lock.OneRunAFolder",
    ]


@contextlib.contextmanager
def _compile_cache() -> Iterator[dict[str, str]]:
    # PyTorch sets the variable itself, to its default, as soon as it imports its compiler.
    default = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(default)) != str(default):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="optimus-job-", ignore_cleanup_errors=True) as folder:
        yield {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"the job's process ended with exit status {code}"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"the job's process was killed by {name}{hint}"
