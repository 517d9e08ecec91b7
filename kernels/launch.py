"""Where a Triton kernel can run: on a GPU, or on the CPU under Triton's interpreter.

Every operator asks `can_launch` and runs its reference where the answer is no, so that a program
with kernels in it works on any machine. Kernels are launched by `launch`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels import descriptors

_ON_GPU = (torch.float16, torch.bfloat16, torch.float32)
_INTERPRETED = (*_ON_GPU, torch.float64)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 in the environment.

    Triton reads it when a kernel's module is loaded; setting it later has no effect on that module.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def can_launch(*tensors: Tensor) -> bool:
    """Whether a kernel can run on these tensors: all on one GPU and in half or single precision,
    or on the CPU with the interpreter on (float64 too)."""
    if not tensors or not _has_triton() or len({t.device for t in tensors}) > 1:
        return False
    if is_interpreted():
        return all(t.device.type == "cpu" and t.dtype in _INTERPRETED for t in tensors)
    return all(t.is_cuda and t.dtype in _ON_GPU for t in tensors)


def can_multiply(*tensors: Tensor) -> bool:
    """Whether a kernel that multiplies matrices can run on them, and should: exact float32 products
    do not run on tensor cores, where a BLAS library is faster than Triton and need not compile."""
    exact = any(t.dtype == torch.float32 and dot_precision(t.dtype) == "ieee" for t in tensors)
    return can_launch(*tensors) and (is_interpreted() or not exact)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one: Triton launches there, wherever the data are."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel; within `compiling_only` it is compiled and not launched, within
    `tracing` the launch becomes a node of the graph that is traced. `args` may be Blocks."""
    if _here.tracing and any(isinstance(arg, descriptors.Blocks) for arg in args):
        descriptors.trace(kernel, grid, args, options)
    elif _here.tracing:
        torch.library.wrap_triton(kernel)[grid](*args, **options)
    elif _here.compiling_only:
        kernel.warmup(*descriptors.described(args), grid=grid, **options)
    else:
        kernel[grid](*descriptors.described(args), **options)


def can_describe(*matrices: Tensor) -> bool:
    """Whether kernels can load and store these matrices by TMA: on a GPU that has it or in the
    interpreter, with addresses and distances of rows that are multiples of 16 bytes."""
    on_device = is_interpreted() or all(descriptors.has_tma(m.device) for m in matrices)
    return on_device and all(descriptors.fits(m, _offset(m)) for m in matrices)


def _offset(tensor: Tensor) -> int | torch.SymInt:
    """Where it begins, in bytes past some multiple of 16. What is traced has no address yet, but
    the compiler aligns storages, and copies inputs that come less aligned than they were traced."""
    if _here.tracing:
        return tensor.storage_offset() * tensor.itemsize
    return tensor.data_ptr()


@contextmanager
def compiling_only() -> Iterator[None]:
    """Nothing is launched by this thread."""
    before, _here.compiling_only = _here.compiling_only, True
    try:
        yield
    finally:
        _here.compiling_only = before


@contextmanager
def tracing(on: bool = True) -> Iterator[None]:
    """What is launched by this thread is traced, or not."""
    before, _here.tracing = _here.tracing, on
    try:
        yield
    finally:
        _here.tracing = before


def hint(size: int | torch.SymInt) -> int:
    """A size, or what a dynamic one is at the moment. Raises ValueError where that is unknown."""
    if isinstance(size, int):
        return size
    known = getattr(size.node, "hint", None)
    if known is None:
        raise ValueError(f"size {size} is not known before the program runs")
    return int(known)


class _Here(threading.local):
    compiling_only = False
    tracing = False


_here = _Here()


def dot_precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies float32: "tf32" where PyTorch's own products do, else "ieee"."""
    exact = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
