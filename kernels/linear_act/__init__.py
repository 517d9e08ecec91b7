"""A wide linear layer with bias and activation in its epilogue."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import autocast
from kernels.activations import FROM_SUM, check_activation
from kernels.launch import can_launch, can_multiply
from kernels.linear_act import reference
from kernels.operators import operator

__all__ = ["linear_act"]


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "relu"
) -> Tensor:
    """activation(x @ weight.T + bias).

    x: (..., K). weight: (N, K). bias: (N,). activation: a name in kernels.activations. Returns
    (..., N), contiguous. Summed in float32 and rounded once, behind the activation; under autocast
    inputs are taken in its type. For backward ReLU, sigmoid and tanh keep the result, GELU and SiLU
    the sum. Raises ValueError for shapes that do not fit and unknown activations.
    """
    check_activation(activation)
    fits = x.dim() >= 1 and weight.dim() == 2 and weight.shape[1] == x.shape[-1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"linear_act needs x (..., K), weight (N, K) and bias (N,), got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}"
        )
    wanted = any(t is not None and t.requires_grad for t in (x, weight, bias))
    save = torch.is_grad_enabled() and wanted
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out, _ = _forward(rows, weight, bias, activation, save)
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], weight.shape[0])


@operator("linear_act", traced=True)
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    keeps = save and activation in FROM_SUM
    tensors = [t for t in (x, weight, bias) if t is not None]
    if not x.shape[0] or not weight.shape[0] or not can_multiply(*tensors):
        out, z = reference.linear_act(x, weight, bias, activation)
        return out.contiguous(), z.contiguous() if keeps else x.new_empty(0)
    from kernels.linear_act import triton

    row = None if bias is None else bias.contiguous()
    return triton.forward(x, weight, row, activation, keeps)


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    keeps = save and activation in FROM_SUM
    return out, torch.empty_like(out) if keeps else x.new_empty(0)


@operator("linear_act_backward", differentiable=False, traced=True)
def _backward(grad: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if not grad.numel() or not can_launch(grad, saved):
        of_sum, of_bias = reference.backward(grad, saved, activation)
        return of_sum.contiguous(), of_bias
    from kernels.linear_act import triton

    return triton.backward(grad, saved, activation)


@_backward.register_fake
def _(grad: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.activation, save = inputs
    if not save:
        raise ValueError("linear_act needs save=True where gradients are wanted")
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(output[1])
    saved = output[1] if ctx.activation in FROM_SUM else output[0]
    ctx.save_for_backward(x, weight, saved)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, saved = ctx.saved_tensors
    if ctx.activation == "none":
        of_sum, of_bias = grad, grad.sum(0) if ctx.has_bias else None
    else:
        of_sum, of_bias = _backward(grad, saved, ctx.activation)
    grad_x = of_sum @ weight if ctx.needs_input_grad[0] else None
    return grad_x, of_sum.mT @ x, of_bias if ctx.has_bias else None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
autocast.register("linear_act")
