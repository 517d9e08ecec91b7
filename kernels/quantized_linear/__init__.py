"""A linear that keeps its input for backward in eight bits an element.

1. Forward, the input's gradient and the bias' are those of `linear`; the weight's gradient reads
   what was kept.
2. The operator is made of PyTorch's own, so that a compiler sees the product and fuses the coding
   with what makes the input. Only the weight's gradient is opaque: a partitioner would save the
   decoded values otherwise, in full size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import autocast
from kernels.operators import operator
from kernels.quantized_linear.reference import CODES, encode, grad_of_weight

__all__ = ["CODES", "linear_saving_quantized"]


def linear_saving_quantized(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, storage: str = "int8"
) -> Tensor:
    """x @ weight.T + bias, whose backward pass reads x as `storage` kept it.

    x: (..., K), at least one dimension in front. weight: (N, K). bias: (N,). storage: a name in
    CODES. Returns (..., N). Under autocast all is done in its type.
    Raises ValueError for an unknown storage and an x of one dimension.
    """
    if storage not in CODES:
        raise ValueError(f"unknown storage {storage!r}; valid: {', '.join(CODES)}")
    if x.dim() < 2:
        raise ValueError(f"linear_saving_quantized needs x (..., K), got {tuple(x.shape)}")
    out: Tensor = torch.ops.kernels.linear_saving_quantized(x, weight, bias, storage)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, storage: str) -> Tensor:
        ctx.storage, ctx.has_bias = storage, bias is not None
        ctx.save_for_backward(weight, *encode(x, storage))
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, codes, scale = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        of_x = grad @ weight if wants_x else None
        of_weight = _grad_of_weight(grad, codes, scale, ctx.storage) if wants_weight else None
        of_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return of_x, of_weight, of_bias, None


@operator("grad_of_weight_from_quantized", differentiable=False)
def _grad_of_weight(grad: Tensor, codes: Tensor, scale: Tensor, storage: str) -> Tensor:
    return grad_of_weight(grad, codes, scale, storage)


@_grad_of_weight.register_fake
def _(grad: Tensor, codes: Tensor, scale: Tensor, storage: str) -> Tensor:
    return grad.new_empty(grad.shape[-1], codes.shape[-1])


def _composite(x: Tensor, weight: Tensor, bias: Tensor | None, storage: str) -> Tensor:
    if not torch.is_grad_enabled() or not weight.requires_grad or x.shape[-1] == 0:
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias, storage)
    return out


_library = torch.library.Library("kernels", "FRAGMENT")
_library.define("linear_saving_quantized(Tensor x, Tensor w, Tensor? b, str storage) -> Tensor")
_library.impl("linear_saving_quantized", _composite, "CompositeImplicitAutograd")
autocast.register("linear_saving_quantized")
