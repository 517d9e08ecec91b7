"""LayerNorm or RMSNorm of each slice of a tensor with its own affine parameters, in one kernel.

Sources: Ba et al., https://arxiv.org/abs/1607.06450; Zhang and Sennrich,
https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import autocast
from kernels.activations import check_activation
from kernels.batched_norm import reference
from kernels.launch import can_launch
from kernels.operators import operator

__all__ = ["batched_norm"]


def batched_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    kind: str = "layer",
    activation: str = "none",
) -> Tensor:
    """activation(norm(x) * weight + bias), each (D,) of x normalised by itself.

    x: (B, N, D). weight, bias: (N, D), contiguous. kind: "layer", or "rms" (no mean taken off).
    activation: a name in kernels.activations. Returns (B, N, D), contiguous, of x's type; all is
    computed in float32 and rounded once. Under autocast x becomes float32 where `layer_norm`'s
    would (on CUDA), and so does the result. Raises ValueError for other shapes and names.
    """
    check_activation(activation)
    if kind not in ("layer", "rms"):
        raise ValueError(f"kind is 'layer' or 'rms', not {kind!r}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if x.dim() != 3 or (parameter is not None and parameter.shape != x.shape[1:]):
            raise ValueError(
                f"batched_norm needs x (B, N, D) and {name} (N, D), got {tuple(x.shape)} and "
                f"{None if parameter is None else tuple(parameter.shape)}"
            )
    return _forward(x, weight, bias, eps, kind == "layer", activation)


@operator("batched_norm", traced=True)
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    activation: str,
) -> Tensor:
    if not _launches(x, x, weight, bias):
        return reference.batched_norm(x, weight, bias, eps, centered, activation).contiguous()
    from kernels.batched_norm import triton

    weight, bias = _lined_up(weight), _lined_up(bias)
    return triton.forward(x, weight, bias, eps, centered, activation)


@_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    activation: str,
) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("batched_norm_backward", differentiable=False, traced=True)
def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _launches(x, grad, x, weight, bias):
        return reference.backward(grad, x, weight, bias, eps, centered, activation)
    from kernels.batched_norm import triton

    weight, bias = _lined_up(weight), _lined_up(bias)
    return triton.backward(grad, x, weight, bias, eps, centered, activation)


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    affine = [
        x.new_empty(0) if p is None else torch.empty_like(p).contiguous() for p in (weight, bias)
    ]
    return grad_x, affine[0], affine[1]


def _launches(x: Tensor, *tensors: Tensor | None) -> bool:
    fits = x.numel() > 0 and x.shape[-1] <= 4096
    return fits and can_launch(*(t for t in tensors if t is not None))


def _lined_up(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.how = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    grad_x, grad_weight, grad_bias = _backward(grad, x, weight, bias, *ctx.how)
    return (
        grad_x,
        None if weight is None else grad_weight,
        None if bias is None else grad_bias,
        None,
        None,
        None,
    )


def _cast(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """CUDA's autocast runs norms in float32, the CPU's leaves them as they are."""
    x, *rest = args
    return (autocast.lowered(x, torch.float32) if x.is_cuda else x, *rest)


_forward.register_autograd(_differentiate, setup_context=_setup_context)
autocast.register("batched_norm", _cast)
