"""Kernels of dot_interaction.

Shapes: dense (B, D), embedded (B, F, D), V = F + 1 vectors a sample, P = V (V - 1) / 2 pairs;
result (B, D + P).

1. One program takes one sample after another (ROWS of them): its vectors are read once into a
   (BLOCK_V, BLOCK_D) tile, row 0 from `dense`, so that they are never concatenated in memory.
2. The products are one `tl.dot` of the tile with its transpose; only the triangle is written, next
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
    tile(ROWS=1, num_warps=2),
    tile(ROWS=1, num_warps=4),
    tile(ROWS=4, num_warps=2),
    tile(ROWS=4, num_warps=4),
)


def forward(dense: Tensor, embedded: Tensor, upper: bool) -> Tensor:
    """The result (B, D + P), fresh."""
    batch, num_features, size = embedded.shape
    num_pairs = (num_features + 1) * num_features // 2
    dtype = torch.promote_types(dense.dtype, embedded.dtype)
    out = embedded.new_empty(batch, size + num_pairs, dtype=dtype)
    if batch:
        _launch(dot_interaction_fwd_kernel, "fwd", dense, embedded, (out,), upper)
    return out


def backward(grad: Tensor, dense: Tensor, embedded: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `dense` and `embedded`, fresh and contiguous."""
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    grads = (
        torch.empty(dense.shape, dtype=dense.dtype, device=dense.device),
        torch.empty(embedded.shape, dtype=embedded.dtype, device=dense.device),
    )
    if len(grad):
        _launch(dot_interaction_bwd_kernel, "bwd", dense, embedded, (grad, *grads), upper)
    return grads


def _launch(
    kernel: triton.JITFunction,
    name: str,
    dense: Tensor,
    embedded: Tensor,
    others: tuple[Tensor, ...],
    upper: bool,
) -> None:
    batch, num_features, size = embedded.shape
    block_v = max(16, triton.next_power_of_2(num_features + 1))

    def run(choice: Tile) -> None:
        launch(
            kernel,
            (triton.cdiv(batch, choice.sizes["ROWS"]),),
            dense,
            embedded,
            *others,
            batch,
            *dense.stride(),
            *embedded.stride(),
            others[0].stride(0),
            num_features + 1,
            size,
            UPPER=upper,
            BLOCK_V=block_v,
            BLOCK_D=min(128, max(16, triton.next_power_of_2(size))),
            PRECISION=dot_precision(embedded.dtype),
            SUM=sum_type(embedded.dtype),
            **choice.options(),
        )

    with on_device(dense):
        sizes = (batch, num_features, size)
        run(choose(f"dot_interaction_{name}", sizes, embedded.dtype, TILES, run))


@triton.jit
def load_vectors(
    dense_ptr, embedded_ptr, sample, offsets_d, strides, num_vectors, size, BLOCK_V: tl.constexpr
):
    """(BLOCK_V, BLOCK_D) of a sample's vectors, zero outside; and the dense part by itself."""
    vector = tl.arange(0, BLOCK_V)[:, None]
    inside = offsets_d[None, :] < size
    is_dense = (vector == 0) & inside
    from_dense = tl.load(
        dense_ptr + sample * strides[0] + offsets_d[None, :].to(tl.int64) * strides[1] + vector * 0,
        mask=is_dense,
        other=0.0,
    )
    rows = (vector - 1).to(tl.int64) * strides[3]
    from_table = tl.load(
        embedded_ptr + sample * strides[2] + rows + offsets_d[None, :].to(tl.int64) * strides[4],
        mask=(vector > 0) & (vector < num_vectors) & inside,
        other=0.0,
    )
    both = tl.where(vector == 0, operand(from_dense).to(operand(from_table).dtype), 0.0)
    return tl.where(vector == 0, both, operand(from_table)).to(
        operand(from_table).dtype
    ), from_dense


@triton.jit
def pair_index(one, other, num_vectors, UPPER: tl.constexpr):
    """Where the pair of two vectors stands in the result, whichever comes first."""
    low, high = tl.minimum(one, other), tl.maximum(one, other)
    if UPPER:
        return low * (2 * num_vectors - low - 1) // 2 + high - low - 1
    else:
        return high * (high - 1) // 2 + low


@triton.jit
def dot_interaction_fwd_kernel(
    dense_ptr,
    embedded_ptr,
    out_ptr,
    batch,
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
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
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
    first = tl.program_id(0).to(tl.int64) * ROWS
    for sample in range(first, tl.minimum(first + ROWS, batch)):
        out = out_ptr + sample * stride_out
        products = tl.zeros((BLOCK_V, BLOCK_V), SUM)
        for start in range(0, size, BLOCK_D):
            offsets = start + tl.arange(0, BLOCK_D)
            vectors, dense = load_vectors(
                dense_ptr, embedded_ptr, sample, offsets, strides, num_vectors, size, BLOCK_V
            )
            tl.store(
                out + offsets[None, :] + row * 0,
                narrow(wide(dense), out_ptr.dtype.element_ty),
                mask=(row == 0) & (offsets[None, :] < size),
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
    batch,
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
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    ROWS: tl.constexpr,
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
    is_pair = (row != column) & (row < num_vectors) & (column < num_vectors)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for sample in range(first, tl.minimum(first + ROWS, batch)):
        grad = grad_ptr + sample * stride_grad
        pairs = wide(tl.load(grad + size + place, mask=is_pair, other=0.0))
        pairs = operand(narrow(pairs, embedded_ptr.dtype.element_ty))
        for start in range(0, size, BLOCK_D):
            offsets = start + tl.arange(0, BLOCK_D)
            vectors, _ = load_vectors(
                dense_ptr, embedded_ptr, sample, offsets, strides, num_vectors, size, BLOCK_V
            )
            grads = tl.dot(pairs, vectors, input_precision=PRECISION, out_dtype=SUM)
            is_dense = (row == 0) & (offsets[None, :] < size)
            direct = tl.load(grad + offsets[None, :] + row * 0, mask=is_dense, other=0.0)
            tl.store(
                grad_dense_ptr + sample * size + offsets[None, :] + row * 0,
                narrow(grads + wide(direct), grad_dense_ptr.dtype.element_ty),
                mask=is_dense,
            )
            tl.store(
                grad_embedded_ptr
                + (sample * (num_vectors - 1) + row - 1) * size
                + offsets[None, :],
                narrow(grads, grad_embedded_ptr.dtype.element_ty),
                mask=(row > 0) & (row < num_vectors) & (offsets[None, :] < size),
            )
