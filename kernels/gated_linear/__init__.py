"""Gated linear units (GeGLU, SwiGLU): both products and the gate in one kernel.

Source: Shazeer, https://arxiv.org/abs/2002.05202, equation 6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import autocast
from kernels.activations import check_activation
from kernels.gated_linear import reference
from kernels.launch import can_multiply
from kernels.operators import operator

__all__ = ["gated_linear"]


def gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "gelu",
) -> Tensor:
    """activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias).

    x: (..., K). gate, up: (N, K). Biases: (N,). activation: a name in kernels.activations; "gelu"
    makes it GeGLU, "silu" SwiGLU. Returns (..., N), contiguous. The gate is applied in float32 and
    the result rounded once; under autocast inputs are taken in its type. Raises ValueError for
    shapes that do not fit and unknown activations.
    """
    check_activation(activation)
    fits = x.dim() >= 1 and gate.dim() == 2 and gate.shape == up.shape
    fits = fits and gate.shape[1] == x.shape[-1]
    if not fits or any(b is not None and b.shape != gate.shape[:1] for b in (gate_bias, up_bias)):
        raise ValueError(
            f"gated_linear needs x (..., K), gate and up (N, K) and biases (N,), got "
            f"{tuple(x.shape)}, {tuple(gate.shape)} and {tuple(up.shape)}"
        )
    inputs = (x, gate, up, gate_bias, up_bias)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    rows = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out, _, _ = _forward(rows, gate, up, gate_bias, up_bias, activation, save)
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], gate.shape[0])


@operator("gated_linear", traced=True)
def _forward(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = [t for t in (x, gate, up, gate_bias, up_bias) if t is not None]
    if not x.shape[0] or not gate.shape[0] or not can_multiply(*tensors):
        out, *sums = reference.gated_linear(x, gate, up, gate_bias, up_bias, activation)
        opened, value = (t.contiguous() if save else x.new_empty(0) for t in sums)
        return out.contiguous(), opened, value
    from kernels.gated_linear import triton

    one, other = (None if b is None else b.contiguous() for b in (gate_bias, up_bias))
    return triton.forward(x, gate, up, one, other, activation, save)


@_forward.register_fake
def _(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    out = x.new_empty(x.shape[0], gate.shape[0])
    opened, value = (torch.empty_like(out) if save else x.new_empty(0) for _ in range(2))
    return out, opened, value


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gate, up, gate_bias, up_bias, ctx.activation, save = inputs
    if not save:
        raise ValueError("gated_linear needs save=True where gradients are wanted")
    ctx.has_biases = (gate_bias is not None, up_bias is not None)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, gate, up, *output[1:])


def _differentiate(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    x, gate, up, opened, value = ctx.saved_tensors
    of_opened, of_value = reference.backward(grad, opened, value, ctx.activation)
    grad_x = torch.addmm(of_opened @ gate, of_value, up) if ctx.needs_input_grad[0] else None
    biases = [
        part.sum(0) if has else None
        for part, has in zip((of_opened, of_value), ctx.has_biases, strict=True)
    ]
    return grad_x, of_opened.mT @ x, of_value.mT @ x, *biases, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
autocast.register("gated_linear")
