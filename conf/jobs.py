"""How one run ends (result.json), and how each job of a multirun gets a process of its own.

Hydra's launcher runs all jobs in one process, where compiler configuration, compile caches, peak
memory and random state would leak from one job to the next. Here the job that the launcher starts
only starts train.py again with the composed configuration and waits for it.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only

RESULT = "result.json"


@dataclass
class Result:
    """How a run ended. `error` is empty when it ended well; `metrics` are the last ones logged."""

    error: str = ""
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    job: int = 0

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
    """Write the result of the block into `folder`, also when it raises; on rank 0 only."""
    result, began = Result(), time.monotonic()
    try:
        yield result
    except BaseException as error:
        result.error = describe(error)
        raise
    finally:
        result.seconds = round(time.monotonic() - began, 3)
        # A full disk may be why the run ended: its error is the one to show.
        with contextlib.suppress(OSError):
            if getattr(rank_zero_only, "rank", 0) == 0:
                result.write(folder)


def describe(error: BaseException) -> str:
    """One line for a table: the kind of error, unless it speaks for itself, and its first line."""
    lines = str(error).strip().splitlines()
    if isinstance(error, SystemExit):
        return lines[0] if isinstance(error.code, str) and lines else f"exit status {error.code}"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def in_multirun() -> bool:
    """Whether this is the job of a multirun as Hydra's launcher starts it."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def run_in_own_process(script: Path, metric: str) -> float:
    """Run the current job of a multirun as a process of its own; its `metric`, NaN if it failed.

    The process has the job's folder for its output, and compile caches of its own unless the
    environment names some: compile seconds are then those of a first run, whatever ran before.
    """
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    began = time.monotonic()
    with _compile_cache() as cache:
        code = subprocess.run(_command(script, folder), env=_environment(cache), check=False)
    result = Result.read(folder) or Result(seconds=round(time.monotonic() - began, 3))
    if code.returncode and not result.error:
        result.error = _exit_reason(code.returncode)
    result.job = int(job.job.num)
    result.overrides = list(job.overrides.task)
    result.write(folder)
    return result.metric(metric)


def _command(script: Path, folder: Path) -> list[str]:
    # The configuration as composed for this job is what Hydra has just written to its folder.
    quoted = "'" + str(folder).replace("'", r"\'") + "'"
    return [
        sys.executable,
        str(script),
        f"--config-path={folder / '.hydra'}",
        "--config-name=config",
        f"hydra.run.dir={quoted}",
        "hydra.output_subdir=null",
    ]


def _environment(cache: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **cache}


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
