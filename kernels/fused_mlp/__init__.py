"""A narrow MLP, or one for each of T towers, as one kernel forward and three backward.

The layers of DLRM's bottom MLP (13-512-256-128) and of prediction towers (256-128-64-1) are too
small for a kernel each: most of their time is launches and hidden layers going through memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import autocast
from kernels.activations import check_activation
from kernels.fused_mlp import reference
from kernels.fused_mlp.columns import active_widths, starts
from kernels.fused_mlp.sizes import fits
from kernels.launch import can_multiply
from kernels.operators import operator

__all__ = ["fused_mlp"]


def fused_mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    activation: str = "relu",
    activate_last: bool = False,
) -> Tensor:
    """linear, activation, linear, ..., with an activation behind the last too if `activate_last`.

    One network: x (B, S0), weights[l] (Sl+1, Sl) as in nn.Linear, biases[l] (Sl+1,); returns
    (B, SL). T towers at once: x (T, B, S0) of any strides, weights[l] (T, Sl+1, Sl), biases[l]
    (T, Sl+1); returns (T, B, SL), contiguous. activation: a name in kernels.activations.
    2 to 4 layers of widths to 512 run as a kernel, other networks layer by layer. Sums are taken in
    float32, hidden layers rounded to x's type; under autocast all is done in autocast's type.
    Raises ValueError for shapes that do not fit each other and for unknown activations.
    """
    check_activation(activation)
    if x.dim() == 2:
        rows = [b.unsqueeze(0) for b in biases or ()]
        towers = [w.unsqueeze(0) for w in weights]
        out = fused_mlp(
            x.unsqueeze(0), towers, rows, activation=activation, activate_last=activate_last
        )
        return out.squeeze(0)
    _check(x, weights, biases or ())
    inputs = (x, *weights, *(biases or ()))
    save = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return _forward(x, list(weights), list(biases or ()), activation, activate_last, save)[0]


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
    if x.dim() != 3 or not weights or len(biases) not in (0, len(weights)):
        raise ValueError(
            f"fused_mlp needs x (B, S0) or (T, B, S0), weights and as many biases or none, got x "
            f"{tuple(x.shape)}, {len(weights)} weights and {len(biases)} biases"
        )
    size = x.shape[2]
    for i, weight in enumerate(weights):
        if weight.dim() != 3 or weight.shape[0] != x.shape[0] or weight.shape[2] != size:
            raise ValueError(f"weight {i} {tuple(weight.shape)} does not fit {size} inputs")
        size = weight.shape[1]
        if biases and biases[i].shape != weight.shape[:2]:
            raise ValueError(f"bias {i} {tuple(biases[i].shape)} does not fit {size} outputs")


@operator("fused_mlp", traced=True)
def _forward(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    activation: str,
    last: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    if not _launches(x, weights, biases):
        out, kept = reference.fused_mlp(x, weights, biases, activation, last)
        return out.contiguous(), kept if save else x.new_empty(0)
    from kernels.fused_mlp import triton

    return triton.forward(x, _lined_up(weights), _lined_up(biases), activation, last, save)


@_forward.register_fake
def _(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    activation: str,
    last: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    widths = active_widths(weights, last) if save else []
    kept = x.new_empty(*x.shape[:2], starts(widths)[-1]) if widths else x.new_empty(0)
    return x.new_empty(*x.shape[:2], weights[-1].shape[1]), kept


@operator("fused_mlp_backward", differentiable=False, traced=True)
def _backward(
    grad: Tensor,
    x: Tensor,
    weights: list[Tensor],
    kept: Tensor,
    has_bias: bool,
    activation: str,
    last: bool,
    needs_x: bool,
) -> list[Tensor]:
    if not _launches(x, weights, [kept, grad]):
        grads = reference.backward(grad, x, weights, kept, has_bias, activation, last)
        grads = [g.contiguous() for g in grads]
        return grads if needs_x else [x.new_empty(0), *grads[1:]]
    from kernels.fused_mlp.triton_backward import backward

    return backward(grad, x, _lined_up(weights), kept, has_bias, activation, last, needs_x)


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weights: list[Tensor],
    kept: Tensor,
    has_bias: bool,
    activation: str,
    last: bool,
    needs_x: bool,
) -> list[Tensor]:
    grads = [w.new_empty(w.shape) for w in weights]
    grads += [w.new_empty(w.shape[:2]) for w in weights if has_bias]
    return [x.new_empty(x.shape) if needs_x else x.new_empty(0), *grads]


def _launches(x: Tensor, weights: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    if not x.numel() or not can_multiply(x, *weights, *others):
        return False
    return fits([x.shape[2], *(w.shape[1] for w in weights)], x.element_size())


def _lined_up(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.contiguous() for t in tensors]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, biases, ctx.activation, ctx.last, ctx.is_saved = inputs
    ctx.num_weights, kept = len(weights), output[1]
    ctx.mark_non_differentiable(kept)
    ctx.save_for_backward(x, kept, *weights, *biases)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    x, kept, *rest = ctx.saved_tensors
    weights, biases = rest[: ctx.num_weights], rest[ctx.num_weights :]
    needs_x = bool(ctx.needs_input_grad[0])
    how = (ctx.activation, ctx.last)
    if not ctx.is_saved:
        _, kept = _forward(x, weights, biases, *how, True)
    grad_x, *grads = _backward(grad, x, weights, kept, bool(biases), *how, needs_x)
    grad_weights, grad_biases = grads[: ctx.num_weights], grads[ctx.num_weights :]
    return grad_x if needs_x else None, grad_weights, grad_biases, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
autocast.register("fused_mlp")
