"""Operators that cast under autocast as PyTorch's own do.

Autocast that is entered outside a compiled function is not in its graph, so casting is the
operator's business: here it is a kernel at the dispatcher's autocast key, as for `linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Cast = Callable[[torch.dtype, tuple[Any, ...]], tuple[Any, ...]]
NAMESPACE = "kernels"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def lower(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All floating-point tensors in autocast's type, as for `linear`; float64 stays what it is."""
    return pytree.tree_map_only(Tensor, lambda t: lowered(t, dtype), args)


def lowered(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """One tensor as autocast hands it to a matrix product."""
    casts = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if casts else tensor


def register(name: str, cast: Cast = lower) -> None:
    """Have operator `kernels::name` called with `cast(autocast's type, arguments)`.

    The operator then sees no autocast, and every argument must be given in the schema's order.
    """
    for device, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
        LIBRARY.impl(name, _under_autocast(name, device, cast), key)


def _under_autocast(name: str, device: str, cast: Cast) -> Callable[..., Any]:
    packet = getattr(torch.ops.kernels, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = cast(torch.get_autocast_dtype(device), args)
        with torch.autocast(device, enabled=False):
            return packet(*arguments, **kwargs)

    return call
