"""Tensors that a kernel loads and stores by TMA, the copy engine of Hopper and newer GPUs.

In place of a pointer and strides the kernel gets a descriptor. Whole blocks then move between the
tensor and shared memory without a thread computing addresses or masks; what lies outside the tensor
is read as zero and not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_ALIGNMENT = 16


@dataclass(frozen=True)
class Blocks:
    """An argument of a launch: `tensor` in blocks of `shape`, their rows of 16 bytes or more."""

    tensor: Tensor
    shape: tuple[int, ...]


def has_tma(device: torch.device) -> bool:
    """Whether the device copies by TMA, and this version of torch lets such launches be traced."""
    return device.type == "cuda" and can_trace() and _has_tma(device.index)


def fits(matrix: Tensor, offset: int | torch.SymInt) -> bool:
    """Whether TMA can copy `matrix`, whose address is `offset` bytes past a multiple of 16."""
    rows, columns = matrix.shape
    distance, step = matrix.stride()
    aligned = offset % _ALIGNMENT == 0 and distance * matrix.itemsize % _ALIGNMENT == 0
    whole = rows > 0 and columns > 0 and step == 1 and distance >= columns
    return matrix.dtype in _TYPES and bool(aligned) and bool(whole)


def described(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a launch with descriptors made."""
    if not any(isinstance(arg, Blocks) for arg in args):
        return args
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [
        TensorDescriptor.from_tensor(a.tensor, list(a.shape)) if isinstance(a, Blocks) else a
        for a in args
    ]


def trace(kernel: Any, grid: tuple[Any, ...], args: Sequence[Any], options: dict[str, Any]) -> None:
    """The launch as a node of the graph that is traced.

    What torch.library.wrap_triton does, but that one knows no descriptors outside Dynamo. The node
    is Dynamo's own: it takes the plain tensors, and beside them the shapes of their blocks.
    """
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    shapes: dict[str, Any] = {
        name: wrap.create_tma_stable_metadata(list(arg.shape))
        for name, arg in zip(kernel.arg_names, args, strict=False)
        if isinstance(arg, Blocks)
    }

    class Tracer(wrap.TracingTritonHOPifier):
        def call_HOP(self, variable: Any, grids: Any, combined_args: Any, tx: Any) -> None:
            in_graph, others = self.store_non_graphable_args(combined_args)
            wrap.triton_kernel_wrapper_mutation(
                kernel_idx=variable.kernel_idx,
                constant_args_idx=others,
                grid=grids,
                tma_descriptor_metadata=shapes,
                kwargs=in_graph,
            )

    plain = [arg.tensor if isinstance(arg, Blocks) else arg for arg in args]
    launched = wrap.TraceableTritonKernelWrapper(kernel, None, grid)
    Tracer().call_triton_kernel(launched, plain, dict(options), None)


@cache
def can_trace() -> bool:
    """Whether torch has the private names that `trace` and `_has_tma` need."""
    try:
        from torch._higher_order_ops.triton_kernel_wrap import (  # noqa: F401
            TraceableTritonKernelWrapper,
            TracingTritonHOPifier,
            create_tma_stable_metadata,
            triton_kernel_wrapper_mutation,
        )
        from torch.utils._triton import has_triton_tensor_descriptor_host_tma  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _has_tma(index: int | None) -> bool:
    from torch.utils._triton import has_triton_tensor_descriptor_host_tma as torch_knows

    # Where torch thinks that there is no TMA it misreads what a kernel with descriptors writes.
    return torch_knows() and torch.cuda.get_device_capability(index) >= (9, 0)
