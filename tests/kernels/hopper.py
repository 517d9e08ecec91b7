"""Compiles every kernel for Hopper, on a machine without a GPU: python -m tests.kernels.hopper

Runs the operators' launchers on CPU tensors with a driver that only compiles; nothing is executed.
Prints one line a kernel: registers a thread, bytes of stack (spilled), shared memory. With --first
only the first tile that fits is compiled, words select launches by name. Exits with 1 when a
kernel does not compile or needs more shared memory than a Hopper GPU has for one program.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import descriptors, tuning
from tests.kernels import launches

SHARED_MEMORY = 227 * 1024


class _Hopper:
    """As much of a driver as compiling takes."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _Compiler:
    """Stands in for every launch and for the choice of a tile: all tiles are compiled."""

    def __init__(self, only_first: bool) -> None:
        self.only_first = only_first
        self.failures: list[str] = []
        self.seen: set[str] = set()
        self.chosen: dict[str, int] = {}
        self.largest = 0
        self.op = ""

    def install(self) -> None:
        driver.set_active(_Hopper())
        JITFunction.run = partialmethod(_launch, self)
        tuning._fastest = self.every_tile  # type: ignore[assignment]
        tuning._chosen = lambda: self.chosen  # type: ignore[assignment]
        tuning._save = lambda: None
        tuning._key = lambda *choice: f"{len(self.chosen)}"
        descriptors.has_tma = lambda device: True
        torch.cuda.is_current_stream_capturing = lambda: False

    def every_tile(self, tiles: Any, run: Callable[[Any], Any]) -> Any:
        fits = (t for t in tiles if self._fits(run, t))
        found = list(itertools.islice(fits, 1 if self.only_first else None))
        if not found:
            self.failures.append(f"{self.op}: no tile fits")
        return (found or tiles)[0]

    def _fits(self, run: Callable[[Any], Any], tile: Any) -> bool:
        self.largest = 0
        run(tile)
        return self.largest <= SHARED_MEMORY

    def note(self, compiled: Any) -> None:
        self.largest = max(self.largest, compiled.metadata.shared)
        if compiled.hash not in self.seen:
            self.seen.add(compiled.hash)
            usage = _usage(compiled.asm["cubin"])
            print(
                f"{self.op}: {compiled.metadata.name} {usage}, {compiled.metadata.shared} shared,"
                f" {compiled.metadata.num_warps} warps",
                flush=True,
            )


def _launch(
    kernel: Any, compiler: _Compiler, *args: Any, grid: Any, warmup: bool, **options: Any
) -> None:
    compiler.note(_RUN(kernel, *args, grid=grid, warmup=True, **options))


_RUN = JITFunction.run


def _usage(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=False, capture_output=True, text=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    return f"{found[1]} registers, {found[2]} stack" if found else "usage unknown"


def main() -> int:
    """Compile what `launches` lists, or those of its names that are given."""
    compiler = _Compiler("--first" in sys.argv)
    compiler.install()
    torch.set_float32_matmul_precision("high")  # exact products of float32 are not the kernels'
    wanted = [word for word in sys.argv[1:] if word != "--first"]
    for name, launch in launches.LAUNCHES.items():
        if wanted and not any(word in name for word in wanted):
            continue
        compiler.op = name
        try:
            launch()
        except Exception as error:
            compiler.failures.append(f"{name}: {type(error).__name__}: {error}")
    print("\n".join(compiler.failures))
    return bool(compiler.failures)


if __name__ == "__main__":
    sys.exit(main())
