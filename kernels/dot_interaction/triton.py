"""Kernels of dot_interaction.

Shapes: dense (B, D), embedded (B, F, D), V = F + 1 vectors a sample, P = V (V - 1) / 2 pairs;
result (B, D + P).

1. A program takes one sample, mostly with one warp: its vectors are read once in tiles (BLOCK_V,
   WIDTH), row 0 from `dense`, so that they are never concatenated in memory. What is loaded goes to
   the tensor cores as it is, and so the next tile is under way while one is multiplied.
2. The products are a `tl.dot` of each tile with its transpose; only the triangle is written, next
   to the dense vector, in the order that the models' index tensors have.
3. Backward is S @ vectors with S symmetric, gathered from the triangle's gradient: each element of
   both gradients is written once, by one program. No atomics, the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dot_precision, launch, on_device
from kernels.tiles import narrow, operand, sum_type, wide
from kernels.tuning import Tile, choose, tile

MAX_VECTORS = 128
"""More vectors a sample than that do not fit the registers of one program."""

TILES = (
    tile(WIDTH=64, num_warps=1, num_stages=2),
    tile(WIDTH=32, num_warps=1, num_stages=4),
    tile(WIDTH=32, num_warps=1, num_stages=2),
    tile(WIDTH=32, num_warps=2, num_stages=4),
    tile(WIDTH=64, num_warps=4, num_stages=2),
    tile(WIDTH=128, num_warps=4, num_stages=1),
)


def forward(dense: Tensor, embedded: Tensor, upper: bool) -> Tensor:
    """The result (B, D + P), fresh."""
    batch, num_features, size = embedded.shape
    num_pairs = (num_features + 1) * num_features // 2
    dtype = torch.promote_types(dense.dtype, embedded.dtype)
    out = embedded.new_empty(batch, size + num_pairs, dtype=dtype)
    if batch:
        whole = {"SIZE": triton.next_power_of_2(size)}
        _launch(dot_interaction_fwd_kernel, "fwd", dense, embedded, (out,), upper, **whole)
    return out


def backward(grad: Tensor, dense: Tensor, embedded: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `dense` and `embedded`, fresh and contiguous."""
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    grads = (
        torch.empty(dense.shape, dtype=dense.dtype, device=dense.device),
        torch.empty(embedded.shape, dtype=embedded.dtype, device=dense.device),
    )
    if grad.shape[0]:
        _launch(dot_interaction_bwd_kernel, "bwd", dense, embedded, (grad, *grads), upper)
    return grads


def _launch(
    kernel: triton.JITFunction,
    name: str,
    dense: Tensor,
    embedded: Tensor,
    others: tuple[Tensor, ...],
    upper: bool,
    **constants: int,
) -> None:
    batch, num_features, size = embedded.shape
    block_v = max(16, triton.next_power_of_2(num_features + 1))

    def run(choice: Tile) -> None:
        launch(
            kernel,
            (batch,),
            dense,
            embedded,
            *others,
            *dense.stride(),
            *embedded.stride(),
            others[0].stride(0),
            num_features + 1,
            size,
            UPPER=upper,
            BLOCK_V=block_v,
            **constants,
            PRECISION=dot_precision(embedded.dtype),
            SUM=sum_type(embedded.dtype),
            **choice.options(),
        )

    with on_device(dense):
        sizes = (batch, num_features, size)
        run(choose(f"dot_interaction_{name}", sizes, embedded.dtype, TILES, run))


@triton.jit
def load_vectors(
    dense_ptr, embedded_ptr, sample, columns, strides, num_vectors, size, BLOCK_V: tl.constexpr
):
    """(BLOCK_V, columns) of a sample's vectors, the dense one first; zero outside."""
    row = tl.arange(0, BLOCK_V)[:, None]
    inside = (row < num_vectors) & (columns[None, :] < size)
    dense = dense_ptr + sample * strides[0] + columns[None, :].to(tl.int64) * strides[1]
    rows = (row - 1).to(tl.int64) * strides[3]
    embedded = embedded_ptr + sample * strides[2] + rows
    embedded += columns[None, :].to(tl.int64) * strides[4]
    if dense_ptr.dtype == embedded_ptr.dtype:
        # One load, which goes to the tensor cores as it is.
        return operand(tl.load(tl.where(row == 0, dense, embedded), mask=inside, other=0.0))
    else:
        first = narrow(
            wide(tl.load(dense + row * 0, mask=inside & (row == 0), other=0.0)),
            embedded_ptr.dtype.element_ty,
        )
        rest = tl.load(embedded, mask=inside & (row > 0), other=0.0)
        return operand(tl.where(row == 0, first, rest))


@triton.jit
def pair_index(row, column, num_vectors, UPPER: tl.constexpr):
    """Where the pair of vectors `row` > `column` stands in the result."""
    if UPPER:
        return column * (2 * num_vectors - column - 1) // 2 - column - 1 + row
    else:
        return row * (row - 1) // 2 + column


@triton.jit
def dot_interaction_fwd_kernel(
    dense_ptr,
    embedded_ptr,
    out_ptr,
    stride_dense_b,
    stride_dense_d,
    stride_embedded_b,
    stride_embedded_v,
    stride_embedded_d,
    stride_out,
    num_vectors,
    size,
    UPPER: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    strides = (
        stride_dense_b,
        stride_dense_d,
        stride_embedded_b,
        stride_embedded_v,
        stride_embedded_d,
    )
    row = tl.arange(0, BLOCK_V)[:, None]
    column = tl.arange(0, BLOCK_V)[None, :]
    place = pair_index(row, column, num_vectors, UPPER)
    wanted = (row > column) & (row < num_vectors)
    sample = tl.program_id(0).to(tl.int64)
    out = out_ptr + sample * stride_out
    all_columns = tl.arange(0, SIZE)
    dense = tl.load(
        dense_ptr + sample * stride_dense_b + all_columns.to(tl.int64) * stride_dense_d,
        mask=all_columns < size,
        other=0.0,
    )
    dense = narrow(wide(dense), out_ptr.dtype.element_ty)
    tl.store(out + all_columns, dense, mask=all_columns < size)
    products = tl.zeros((BLOCK_V, BLOCK_V), SUM)
    for start in range(0, size, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        vectors = load_vectors(
            dense_ptr, embedded_ptr, sample, columns, strides, num_vectors, size, BLOCK_V
        )
        products = tl.dot(vectors, tl.trans(vectors), products, PRECISION, out_dtype=SUM)
    products = wide(narrow(products, embedded_ptr.dtype.element_ty))
    tl.store(out + size + place, narrow(products, out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def dot_interaction_bwd_kernel(
    dense_ptr,
    embedded_ptr,
    grad_ptr,
    grad_dense_ptr,
    grad_embedded_ptr,
    stride_dense_b,
    stride_dense_d,
    stride_embedded_b,
    stride_embedded_v,
    stride_embedded_d,
    stride_grad,
    num_vectors,
    size,
    UPPER: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    strides = (
        stride_dense_b,
        stride_dense_d,
        stride_embedded_b,
        stride_embedded_v,
        stride_embedded_d,
    )
    row = tl.arange(0, BLOCK_V)[:, None]
    column = tl.arange(0, BLOCK_V)[None, :]
    place = tl.where(
        row > column,
        pair_index(row, column, num_vectors, UPPER),
        pair_index(column, row, num_vectors, UPPER),
    )
    is_pair = (row != column) & (row < num_vectors) & (column < num_vectors)
    sample = tl.program_id(0).to(tl.int64)
    grad = grad_ptr + sample * stride_grad
    pairs = wide(tl.load(grad + size + place, mask=is_pair, other=0.0))
    pairs = operand(narrow(pairs, embedded_ptr.dtype.element_ty))
    for start in range(0, size, WIDTH):
        columns = start + tl.arange(0, WIDTH)
        vectors = load_vectors(
            dense_ptr, embedded_ptr, sample, columns, strides, num_vectors, size, BLOCK_V
        )
        grads = tl.dot(pairs, vectors, input_precision=PRECISION, out_dtype=SUM)
        is_dense = (row == 0) & (columns[None, :] < size)
        direct = tl.load(grad + columns[None, :] + row * 0, mask=is_dense, other=0.0)
        tl.store(
            grad_dense_ptr + sample * size + columns[None, :] + row * 0,
            narrow(grads + wide(direct), grad_dense_ptr.dtype.element_ty),
            mask=is_dense,
        )
        tl.store(
            grad_embedded_ptr + (sample * (num_vectors - 1) + row - 1) * size + columns[None, :],
            narrow(grads, grad_embedded_ptr.dtype.element_ty),
            mask=(row > 0) & (row < num_vectors) & (columns[None, :] < size),
        )
