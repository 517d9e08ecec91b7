"""DCN-V2's cross layer with everything behind the product in the GEMM's epilogue.

Source: Wang et al., https://arxiv.org/abs/2008.13535, equations 1 (full rank) and 2 (low rank).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import autocast
from kernels.cross_layer import reference
from kernels.launch import can_launch, can_multiply
from kernels.operators import operator

__all__ = ["cross_layer", "low_rank_cross_layer"]


def cross_layer(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x0 * (x @ weight.T + bias) + x.

    x0, x: (B, N). weight: (N, N). bias: (N,). Returns (B, N), contiguous, of the type that the
    operations one by one would give. Under autocast the product is taken in autocast's type. Raises
    ValueError for other shapes.
    """
    return low_rank_cross_layer(x0, x, None, weight, bias)


def low_rank_cross_layer(
    x0: Tensor, x: Tensor, down: Tensor | None, up: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x0 * (x @ down.T @ up.T + bias) + x.

    x0, x: (B, N). down: (R, N), or None for no product with it. up: (N, R). bias: (N,). `down` and
    `up` are the V_kernels and W_kernels of `torchrec.modules.crossnet.LowRankCrossNet`. Returns
    (B, N); raises ValueError for other shapes.
    """
    y = x if down is None else F.linear(x, down)
    fits = x.dim() == 2 and x0.shape == x.shape and up.shape == (x.shape[1], y.shape[1])
    if not fits or (bias is not None and bias.shape != x.shape[1:]):
        raise ValueError(
            f"cross_layer needs x0 and x (B, N), a weight (N, {y.shape[-1]}) and a bias (N,), got "
            f"{tuple(x0.shape)}, {tuple(x.shape)}, {tuple(up.shape)} and "
            f"{None if bias is None else tuple(bias.shape)}"
        )
    return _forward(x0, y, up, bias, x)


@operator("cross_layer", traced=True)
def _forward(x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if not can_multiply(y, weight) or not _launches(x0, bias, x):
        return reference.cross_layer(x0, y, weight, bias, x)
    from kernels.cross_layer import triton

    out = torch.empty(x0.shape, dtype=_result_type(x0, weight, bias, x), device=x0.device)
    if out.numel():
        triton.forward(x0, y, weight, bias, x, out)
    return out


@_forward.register_fake
def _(x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.empty(x0.shape, dtype=_result_type(x0, weight, bias, x), device=x0.device)


@operator("cross_layer_backward", differentiable=False, traced=True)
def _backward(
    grad: Tensor, x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if not grad.numel() or not can_multiply(y, weight) or not _launches(grad, x0, bias):
        return reference.backward(grad, x0, y, weight, bias)
    from kernels.cross_layer import triton

    return triton.backward(grad, x0, y, weight, bias)


@_backward.register_fake
def _(
    grad: Tensor, x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    projected = torch.empty(x0.shape, dtype=y.dtype, device=y.device)
    grad_bias = grad.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return torch.empty(x0.shape, dtype=x0.dtype, device=x0.device), projected, grad_bias


def _launches(*tensors: Tensor | None) -> bool:
    return can_launch(*(t for t in tensors if t is not None))


def _result_type(x0: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> torch.dtype:
    dtype = torch.promote_types(torch.promote_types(x0.dtype, x.dtype), weight.dtype)
    return dtype if bias is None else torch.promote_types(dtype, bias.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x0, y, weight, bias, x = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(x0, y, weight, bias)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x0, y, weight, bias = ctx.saved_tensors
    grad_x0, projected, grad_bias = _backward(grad, x0, y, weight, bias)
    grad_weight = projected.mT @ y if ctx.needs_input_grad[2] else None
    grad_y = projected @ weight if ctx.needs_input_grad[1] else None
    return grad_x0, grad_y, grad_weight, None if bias is None else grad_bias, grad.to(ctx.x_dtype)


def _cast(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Only the product is lowered."""
    x0, y, weight, bias, x = args
    return x0, autocast.lowered(y, dtype), autocast.lowered(weight, dtype), bias, x


_forward.register_autograd(_differentiate, setup_context=_setup_context)
autocast.register("cross_layer", _cast)
