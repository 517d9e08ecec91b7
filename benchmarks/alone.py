"""Compile seconds and peak memory of one provider, in a process of its own with cold caches.

Side by side in one process the providers' memory and caches would be in one another's figures.
`measure` starts `python -m benchmarks.alone`, which prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.bench import Bench, Setting, memory_of
from benchmarks.models import MODELS
from benchmarks.providers import PROVIDERS, Provider

_MARK = "benchmarks.alone: "


@dataclass(frozen=True)
class Figures:
    """What one provider needs; `failure` says why there are no figures."""

    compile_seconds: float = float("nan")
    peak_allocated_mb: float = float("nan")
    peak_reserved_mb: float = float("nan")
    failure: str = ""


def caches(folder: Path) -> dict[str, str]:
    """Environment in which all that is compiled goes into `folder`."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def measure(setting: Setting, provider: Provider, cache: Path, timeout: float | None) -> Figures:
    """Figures of one provider whose caches are in `cache`, from a process that ends in time."""
    command = [sys.executable, "-m", "benchmarks.alone", "--model", setting.model.name]
    command += ["--batch", str(setting.batch), "--provider", provider.name]
    command += ["--device", str(setting.device), "--size", setting.size, "--inner", setting.inner]
    command += [] if setting.amp else ["--no-amp"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | caches(cache),
        cwd=Path(__file__).parents[1],
        start_new_session=True,  # with its compile workers it can then be ended as one group
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Figures(failure=f"took more than {timeout:.0f} s in its own process")
    return _read(output, errors, process.returncode)


def _read(output: str, errors: str, code: int) -> Figures:
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    if lines:
        return Figures(**json.loads(lines[-1].removeprefix(_MARK)))
    return Figures(failure=f"its own process ended with {code}: {_reason(errors)}"[:300])


def _reason(errors: str) -> str:
    """The line that names the exception: PyTorch's messages go on with advice."""
    lines = errors.strip().splitlines() or ["no output"]
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])


_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b")


def figures(setting: Setting, provider: Provider) -> Figures:
    """Compile and warm up in this process, and measure."""
    bench = Bench(setting)
    job = bench.job(provider)
    # Only the job counts: no other provider has a naive model beside its own.
    bench.naive = torch.nn.Identity()
    bench.inputs = ()
    _, seconds = bench.first_step(provider, job)
    step = bench.warm(provider, job)
    return Figures(seconds, *memory_of(step, setting.device))


def main(arguments: Sequence[str] | None = None) -> None:
    """See `measure`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, choices=list(MODELS))
    parser.add_argument("--batch", required=True, type=int)
    parser.add_argument("--provider", required=True, choices=list(PROVIDERS))
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--inner", required=True)
    parser.add_argument("--no-amp", action="store_true")
    options = parser.parse_args(arguments)
    setting = Setting(
        MODELS[options.model],
        options.batch,
        options.device,
        options.size,
        not options.no_amp,
        options.inner,
    )
    found = figures(setting, PROVIDERS[options.provider])
    print(_MARK + json.dumps(found.__dict__), flush=True)


if __name__ == "__main__":
    main()
