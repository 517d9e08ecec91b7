"""N linears of unequal shapes on column slices of one tensor, in one launch.

Recommender models project each feature by a linear of its own; one at a time they are all launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kernels import autocast
from kernels.activations import check_activation, slope
from kernels.grouped_linear import reference
from kernels.launch import can_multiply
from kernels.operators import operator

__all__ = ["grouped_linear"]


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    *,
    offsets: Sequence[int] | None = None,
    activation: str = "none",
) -> Tensor:
    """activation(x[:, offsets[g] : offsets[g] + Kg] @ weights[g].T + biases[g]), side by side.

    x: (B, C) of any strides. weights[g]: (Ng, Kg). biases[g]: (Ng,), of all groups or of none.
    offsets: each group's first column in x; by default the slices adjoin from column 0 on. Slices
    may not overlap (linears of one input are one wide linear). activation: a name in
    kernels.activations. Returns (B, sum of Ng), contiguous. Under autocast all is done in its type.
    Raises ValueError for shapes that do not fit, overlapping slices and unknown activations.
    """
    check_activation(activation)
    biases = list(biases or ())
    if x.dim() != 2 or not weights or len(biases) not in (0, len(weights)):
        raise ValueError(
            f"grouped_linear needs x (B, C), weights and as many biases or none, got x "
            f"{tuple(x.shape)}, {len(weights)} weights and {len(biases)} biases"
        )
    for g, weight in enumerate(weights):
        if weight.dim() != 2 or (biases and biases[g].shape != weight.shape[:1]):
            raise ValueError(f"group {g} needs a weight (N, K) and a bias (N,)")
    ins = [weight.shape[1] for weight in weights]
    places = list(offsets) if offsets is not None else [0, *accumulate(ins)][:-1]
    _check_slices(places, ins, x.shape[1])
    return _forward(x, list(weights), biases, places, activation)


def _check_slices(offsets: Sequence[int], ins: Sequence[int], width: int) -> None:
    if len(offsets) != len(ins):
        raise ValueError(f"{len(offsets)} offsets for {len(ins)} weights")
    slices = sorted((o, o + size) for o, size in zip(offsets, ins, strict=True) if size)
    for (_, end), (start, _) in pairwise([(0, 0), *slices, (width, width)]):
        if start < end:
            raise ValueError(f"slices overlap, or reach beyond the {width} columns: {slices}")


@operator("grouped_linear")
def _forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], offsets: list[int], activation: str
) -> Tensor:
    if not x.numel() or not can_multiply(x, *weights, *biases):
        return reference.grouped_linear(x, weights, biases, offsets, activation).contiguous()
    from kernels.grouped_linear import triton

    return triton.forward(x, _lined_up(weights), _lined_up(biases), offsets, activation)


@_forward.register_fake
def _(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], offsets: list[int], activation: str
) -> Tensor:
    return x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))


@operator("grouped_linear_backward", differentiable=False)
def _backward(
    grad: Tensor,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    offsets: list[int],
    activation: str,
) -> list[Tensor]:
    if not x.numel() or not can_multiply(grad, x, *weights, *biases):
        return reference.backward(grad, x, weights, biases, offsets, activation)
    from kernels.grouped_linear import triton

    weights, biases = _lined_up(weights), _lined_up(biases)
    if activation != "none":
        grad = grad * slope(triton.forward(x, weights, biases, offsets, "none"), activation)
    grad_x = triton.grad_of_x(grad, x, weights, offsets)
    grad_weights, grad_biases = triton.grads_of_parameters(grad, x, weights, offsets)
    kept = grad_biases.to(x.dtype) if biases else x.new_empty(0)
    return [grad_x, grad_weights.to(x.dtype), kept]


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    offsets: list[int],
    activation: str,
) -> list[Tensor]:
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_weights = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    num_biases = sum(bias.shape[0] for bias in biases)
    return [grad_x, x.new_empty(num_weights), x.new_empty(num_biases)]


def _lined_up(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, biases, ctx.offsets, ctx.activation = inputs
    ctx.num_weights = len(weights)
    ctx.save_for_backward(x, *weights, *biases)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    weights, biases = rest[: ctx.num_weights], rest[ctx.num_weights :]
    grads = _backward(grad, x, weights, biases, ctx.offsets, ctx.activation)
    of_weights = grads[1].split([weight.shape[0] * weight.shape[1] for weight in weights])
    of_weights = [part.view(w.shape) for part, w in zip(of_weights, weights, strict=True)]
    of_biases = list(grads[2].split([bias.shape[0] for bias in biases])) if biases else []
    return grads[0], of_weights, of_biases, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
autocast.register("grouped_linear")
