"""DLRM's pairwise interaction (Naumov et al., https://arxiv.org/abs/1906.00091) in one kernel.

Source: section 2.1.3 there; `torchrec.models.dlrm.InteractionArch` computes the same with `upper`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import autocast
from kernels.dot_interaction import reference
from kernels.dot_interaction.by_index import dot_interaction_at
from kernels.launch import can_launch
from kernels.operators import operator

__all__ = ["dot_interaction", "dot_interaction_at"]


def dot_interaction(dense: Tensor, embedded: Tensor, upper: bool = False) -> Tensor:
    """Dot products of all pairs of a sample's vectors, behind its dense vector.

    dense: (B, D). embedded: (B, F, D). Returns (B, D + F (F + 1) / 2), contiguous, of the wider of
    the two types: `dense`, then the products of all pairs of the F + 1 vectors [dense, embedded] in
    the order of `torch.tril_indices(F + 1, F + 1, -1)`, or of `torch.triu_indices(F + 1, F + 1, 1)`
    with `upper`. Products are taken in the type of `embedded` and summed in float32; under autocast
    in autocast's type. Raises ValueError for other shapes.
    """
    if dense.dim() != 2 or embedded.dim() != 3:
        raise ValueError(
            f"dot_interaction needs dense (B, D) and embedded (B, F, D), "
            f"got {tuple(dense.shape)} and {tuple(embedded.shape)}"
        )
    if dense.shape[0] != embedded.shape[0] or dense.shape[1] != embedded.shape[2]:
        raise ValueError(
            f"dense {tuple(dense.shape)} does not fit embedded {tuple(embedded.shape)}"
        )
    return _forward(dense, embedded, upper)


@operator("dot_interaction", traced=True)
def _forward(dense: Tensor, embedded: Tensor, upper: bool) -> Tensor:
    if _launches(dense, embedded):
        from kernels.dot_interaction import triton

        return triton.forward(dense, embedded, upper)
    return reference.dot_interaction(dense, embedded, *_pairs(embedded, upper))


@_forward.register_fake
def _(dense: Tensor, embedded: Tensor, upper: bool) -> Tensor:
    batch, num_features, size = embedded.shape
    num_pairs = (num_features + 1) * num_features // 2
    dtype = torch.promote_types(dense.dtype, embedded.dtype)
    return dense.new_empty(batch, size + num_pairs, dtype=dtype)


@operator("dot_interaction_backward", differentiable=False, traced=True)
def _backward(grad: Tensor, dense: Tensor, embedded: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    if _launches(grad, dense, embedded):
        from kernels.dot_interaction import triton

        return triton.backward(grad, dense, embedded, upper)
    return reference.backward(grad, dense, embedded, *_pairs(embedded, upper))


@_backward.register_fake
def _(grad: Tensor, dense: Tensor, embedded: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    return dense.new_empty(dense.shape), embedded.new_empty(embedded.shape)


def _pairs(embedded: Tensor, upper: bool) -> Tensor:
    return reference.triangle(embedded.shape[1] + 1, upper, embedded.device)


def _launches(*tensors: Tensor) -> bool:
    return tensors[-1].shape[1] < 128 and can_launch(*tensors)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dense, embedded, ctx.upper = inputs
    ctx.save_for_backward(dense, embedded)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    dense, embedded = ctx.saved_tensors
    return (*_backward(grad, dense, embedded, ctx.upper), None)


def _cast(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Only products are lowered: the concatenation keeps the dense vector as it is."""
    dense, embedded, upper = args
    return dense, autocast.lowered(embedded, dtype), upper


_forward.register_autograd(_differentiate, setup_context=_setup_context)
autocast.register("dot_interaction", _cast)
