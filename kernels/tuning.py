"""Tile shapes by measurement: timed once on a GPU, kept in a file for every later process.

A choice is keyed by operator, sizes (the large ones rounded up to powers of two), type, device and
versions. The file lies in $OPTIMUS_KERNEL_CACHE, by default ~/.cache/optimus/kernels; it is only a
cache: deleted, unreadable or unwritable it costs the time to measure again.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from kernels.launch import compiling_only, hint, is_interpreted


@dataclass(frozen=True)
class Tile:
    """One way to cut the work: a kernel's constants, warps a program, depth of the pipeline."""

    constants: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 2

    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {**self.sizes, "num_warps": self.num_warps, "num_stages": self.num_stages}

    @property
    def sizes(self) -> dict[str, int]:
        """The kernel's constants by name."""
        return dict(self.constants)


def tile(*, num_warps: int = 4, num_stages: int = 2, **constants: int) -> Tile:
    """A Tile with its constants as keywords."""
    return Tile(tuple(sorted(constants.items())), num_warps, num_stages)


def choose(
    op: str,
    sizes: Sequence[int],
    dtype: torch.dtype,
    tiles: Sequence[Tile],
    run: Callable[[Tile], Any],
) -> Tile:
    """The fastest of `tiles` for `op` at these sizes: from the cache, else by timing `run`.

    `sizes`: whatever the choice depends on, numbers over 512 count as the next power of two.
    `run(tile)` launches the kernel by `launch`, must give the same result each time, may raise for
    a tile that does not fit the device and is also called by other threads, to compile only. Raises
    the last of these errors when no tile fits. Under the
    interpreter and while a CUDA graph is captured it is the first tile, unmeasured.
    """
    if op in _pinned:
        return _pinned[op]
    if is_interpreted() or len(tiles) == 1:
        return tiles[0]
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    key = _key(op, tuple(map(hint, sizes)), dtype, tuple(tiles), device)
    chosen, valid = _chosen(), range(len(tiles))
    if chosen.get(key) not in valid:
        if torch.cuda.is_current_stream_capturing():
            return tiles[0]
        chosen.pop(key, None)
        chosen.update(_read() | chosen)  # another process may have measured meanwhile
    if chosen.get(key) not in valid:
        chosen[key] = tiles.index(_fastest(tiles, run))
        _save()
    return tiles[chosen[key]]


@contextmanager
def pinned(op: str, choice: Tile) -> Iterator[None]:
    """Have `choose` answer `choice` for `op`, unmeasured (tests, comparisons of tiles)."""
    before = _pinned.get(op)
    _pinned[op] = choice
    try:
        yield
    finally:
        del _pinned[op]
        if before is not None:
            _pinned[op] = before


def bucket(size: int) -> int:
    """Sizes up to 512 as they are, larger ones rounded up to a power of two."""
    return size if size <= 512 else 1 << (size - 1).bit_length()


def num_programs(wanted: int) -> int:
    """At most as many programs as keep a large GPU busy in a two-stage sum; the same number on
    every device, so that sums are taken in the same order everywhere."""
    return max(1, min(wanted, 1024))


_pinned: dict[str, Tile] = {}


@lru_cache(4096)  # asked for in every launch
def _key(
    op: str, sizes: tuple[int, ...], dtype: torch.dtype, tiles: tuple[Tile, ...], device: int
) -> str:
    import triton

    where = torch.cuda.get_device_name(device) if device >= 0 else "cpu"
    # Choices are indices: another list of tiles is another key.
    menu = "/".join(f"{t.constants}{t.num_warps},{t.num_stages}" for t in tiles)
    shape = "x".join(str(bucket(size)) for size in sizes)
    return "|".join(
        (op, shape, str(dtype), where, torch.__version__, triton.__version__, menu)
    ).replace(" ", "")


def _fastest(tiles: Sequence[Tile], run: Callable[[Tile], Any]) -> Tile:
    from triton.testing import do_bench

    times: dict[Tile, float] = {}
    error: Exception | None = None
    _compile_all(tiles, run)
    for candidate in tiles:
        try:
            run(candidate)
            times[candidate] = do_bench(
                lambda candidate=candidate: run(candidate), warmup=5, rep=20, return_mode="median"
            )
        except Exception as failure:  # out of shared memory or registers: not for this device
            error = failure
    if not times:
        assert error is not None
        raise error
    return min(times, key=lambda t: times[t])


def _compile_all(tiles: Sequence[Tile], run: Callable[[Tile], Any]) -> None:
    """Compile for all tiles side by side: the compiler and the assembler hold no lock."""
    has_gpu = torch.cuda.is_available()
    device = torch.cuda.current_device() if has_gpu else None

    def one(candidate: Tile) -> None:
        # A thread begins on the first GPU. What fails, fails again, and is looked at, when it runs.
        on_gpu = torch.cuda.device(device) if has_gpu else contextlib.nullcontext()
        with on_gpu, compiling_only(), contextlib.suppress(Exception):
            run(candidate)

    with ThreadPoolExecutor(len(tiles)) as pool:
        list(pool.map(one, tiles))


@cache
def _chosen() -> dict[str, int]:
    return _read()


def _read() -> dict[str, int]:
    try:
        stored = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    valid = isinstance(stored, dict) and all(type(v) is int for v in stored.values())
    return stored if valid else {}


def _save() -> None:
    """Write all choices, those that other processes have saved meanwhile included, in one move."""
    merged = _read() | _chosen()
    with contextlib.suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=_file().parent, suffix=".json")
        with os.fdopen(handle, "w") as out:
            json.dump(merged, out, indent=1)
        Path(name).replace(_file())


def cache_folder() -> Path:
    """Where measurements are kept: $OPTIMUS_KERNEL_CACHE, or ~/.cache/optimus/kernels."""
    folder = os.environ.get("OPTIMUS_KERNEL_CACHE", "")
    return Path(folder) if folder else Path.home() / ".cache/optimus/kernels"


def _file() -> Path:
    return cache_folder() / "tiles.json"
