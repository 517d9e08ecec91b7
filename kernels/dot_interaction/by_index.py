"""dot_interaction with the pairs as index tensors, as models have them.

TorchRec's model keeps the triangle's indices in a buffer, whose contents no graph shows. So the
operator looks at them when it runs: for one of the two triangles the kernel runs, for other pairs
plain PyTorch. They are looked at once, a write to them is noticed by their version.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import autocast
from kernels.dot_interaction import reference
from kernels.launch import can_launch
from kernels.operators import operator

MAX_KNOWN = 64
"""Index tensors that are remembered; what makes new ones in every step runs in plain PyTorch."""


def dot_interaction_at(dense: Tensor, embedded: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`dense` and the products of the pairs (rows[p], columns[p]) of [dense, embedded].

    dense: (B, D). embedded: (B, F, D). rows, columns: (P,) int64, each from 0 to F. Returns
    (B, D + P); types as for `dot_interaction`.
    """
    result: Tensor = torch.ops.kernels.dot_interaction_at(dense, embedded, rows, columns)
    return result


def order_of(rows: Tensor, columns: Tensor, num_vectors: int) -> bool | None:
    """True: the upper triangle; False: the lower; None: other pairs, or not to be told now.

    Waits for the GPU the first time that it sees these tensors.
    """
    key = (*_place(rows), *_place(columns), num_vectors)
    if key in _known:
        return _known[key][0]
    capturing = rows.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or len(_known) >= MAX_KNOWN:
        return None
    pairs = torch.stack((rows, columns)).cpu()
    order = None
    for upper in (True, False):
        if torch.equal(pairs, reference.triangle(num_vectors, upper, pairs.device)):
            order = upper
    _known[key] = (order, rows, columns)
    return order


# The tensors are kept: their memory cannot become that of others while it is known here.
_known: dict[tuple[Any, ...], tuple[bool | None, Tensor, Tensor]] = {}


def _place(index: Tensor) -> tuple[Any, ...]:
    return index.data_ptr(), index.numel(), index.stride(), index._version, index.device


def _triangle(embedded: Tensor, rows: Tensor, columns: Tensor, *others: Tensor) -> bool | None:
    """The order of the pairs if a kernel can run."""
    if embedded.shape[1] >= 128 or not can_launch(embedded, *others):
        return None
    return order_of(rows, columns, embedded.shape[1] + 1)


@operator("dot_interaction_at")
def _forward(dense: Tensor, embedded: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    upper = _triangle(embedded, rows, columns, dense)
    if upper is None:
        return reference.dot_interaction(dense, embedded, rows, columns)
    from kernels.dot_interaction import triton

    return triton.forward(dense, embedded, upper)


@_forward.register_fake
def _(dense: Tensor, embedded: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    dtype = torch.promote_types(dense.dtype, embedded.dtype)
    return dense.new_empty(dense.shape[0], dense.shape[1] + rows.shape[0], dtype=dtype)


@operator("dot_interaction_at_backward", differentiable=False)
def _backward(
    grad: Tensor, dense: Tensor, embedded: Tensor, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    upper = _triangle(embedded, rows, columns, grad, dense)
    if upper is None:
        return reference.backward(grad, dense, embedded, rows, columns)
    from kernels.dot_interaction import triton

    return triton.backward(grad, dense, embedded, upper)


@_backward.register_fake
def _(
    grad: Tensor, dense: Tensor, embedded: Tensor, rows: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    return dense.new_empty(dense.shape), embedded.new_empty(embedded.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors), None, None)


def _cast(dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[Any, ...]:
    dense, embedded, rows, columns = args
    return dense, autocast.lowered(embedded, dtype), rows, columns


_forward.register_autograd(_differentiate, setup_context=_setup_context)
autocast.register("dot_interaction_at", _cast)
