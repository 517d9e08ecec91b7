"""Kernels of grouped_linear.

Shapes: x (B, C), group g: Kg columns of it from og on, weight (Ng, Kg), bias (Ng,); result
(B, sum of Ng), the groups side by side.

1. One launch for all groups: a program looks up in a table which tile of which group it has. Slices
   are read where they lie in x and written where they belong in the result.
2. Sizes come from memory, so the compiler is told what they are multiples of (ALIGN); without that
   it would load one element at a time.
3. The weights' gradients are summed over shares of the rows, then over the shares; a share depends
   on sizes alone. No atomics, the same bits each time for the same tile shape. The biases' come
   with the first block of K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.grouped_linear.tables import Groups, groups_of, table, tile_table
from kernels.launch import launch, on_device
from kernels.matmul import number_types
from kernels.tiles import activate, narrow, operand, wide, wide_type
from kernels.tuning import Tile, choose, num_programs, tile

TILES = (
    tile(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
    tile(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
    tile(BLOCK_M=128, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=3),
    tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3),
    tile(BLOCK_M=64, BLOCK_N=32, BLOCK_K=64, num_warps=4, num_stages=3),
)


def forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    offsets: Sequence[int],
    activation: str,
) -> Tensor:
    """The result, fresh. Weights and biases must be contiguous."""
    groups = groups_of(weights, biases, offsets)
    out = torch.empty(len(x), sum(groups.outs), dtype=x.dtype, device=x.device)
    places = table(groups, x.device)

    def run(choice: Tile) -> None:
        tiles = tile_table(groups, choice.sizes["BLOCK_N"], 0, x.device)
        grid = (len(tiles), triton.cdiv(len(x), choice.sizes["BLOCK_M"]))
        launch(
            grouped_linear_fwd_kernel,
            grid,
            x,
            weights[0],
            biases[0] if biases else x,
            out,
            places,
            tiles,
            len(x),
            *x.stride(),
            out.stride(0),
            ALIGN=groups.alignment,
            HAS_BIAS=len(biases) > 0,
            ACTIVATION=activation,
            **number_types(x.dtype),
            **choice.options(),
        )

    with on_device(x):
        run(choose("grouped_linear_fwd", _sizes(x, groups), x.dtype, TILES, run))
    return out


def grad_of_x(grad: Tensor, x: Tensor, weights: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
    """The gradient of x, fresh and contiguous, zero in columns that no group has."""
    groups = groups_of(weights, (), offsets)
    make = torch.empty if sum(groups.ins) == x.shape[1] else torch.zeros
    grad_x = make(x.shape, dtype=x.dtype, device=x.device)
    places = table(groups, x.device)

    def run(choice: Tile) -> None:
        tiles = tile_table(groups, 0, choice.sizes["BLOCK_K"], x.device)
        grid = (len(tiles), triton.cdiv(len(x), choice.sizes["BLOCK_M"]))
        launch(
            grouped_linear_dgrad_kernel,
            grid,
            grad,
            weights[0],
            grad_x,
            places,
            tiles,
            len(x),
            *grad.stride(),
            grad_x.stride(0),
            ALIGN=groups.alignment,
            **number_types(x.dtype),
            **choice.options(),
        )

    with on_device(x):
        run(choose("grouped_linear_dgrad", _sizes(x, groups), x.dtype, TILES, run))
    return grad_x


def grads_of_parameters(
    grad: Tensor, x: Tensor, weights: Sequence[Tensor], offsets: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Gradients of all weights and of all biases, one vector each, in SUM's type."""
    groups = groups_of(weights, (), offsets)
    num_weights = sum(a * b for a, b in zip(groups.ins, groups.outs, strict=True))
    places = table(groups, x.device)
    partial: list[Tensor] = []

    def run(choice: Tile) -> None:
        block_m = choice.sizes["BLOCK_M"]
        tiles = tile_table(groups, choice.sizes["BLOCK_N"], choice.sizes["BLOCK_K"], x.device)
        blocks = triton.cdiv(len(x), block_m)
        steps = triton.cdiv(blocks, num_programs(1024 // len(tiles)))
        shares = triton.cdiv(blocks, steps)
        partial[:] = [
            torch.empty(shares, size, dtype=wide_type(x.dtype), device=x.device)
            for size in (num_weights, sum(groups.outs))
        ]
        launch(
            grouped_linear_wgrad_kernel,
            (len(tiles), shares),
            grad,
            x,
            *partial,
            places,
            tiles,
            len(x),
            steps,
            *grad.stride(),
            *x.stride(),
            num_weights,
            sum(groups.outs),
            ALIGN=groups.alignment,
            **number_types(x.dtype),
            **choice.options(),
        )

    with on_device(x):
        run(choose("grouped_linear_wgrad", _sizes(x, groups), x.dtype, TILES, run))
    return partial[0].sum(0), partial[1].sum(0)


def _sizes(x: Tensor, groups: Groups) -> tuple[int, ...]:
    return (len(x), len(groups.ins), max(groups.ins), max(groups.outs), sum(groups.ins))


@triton.jit
def place_of(places, group, ALIGN: tl.constexpr):
    """A group's numbers: see tables.FIELDS."""
    row = places + group * 7
    first_in = tl.multiple_of(tl.load(row), ALIGN)
    num_in = tl.multiple_of(tl.load(row + 1), ALIGN)
    first_out = tl.multiple_of(tl.load(row + 2), ALIGN)
    num_out = tl.multiple_of(tl.load(row + 3), ALIGN)
    return first_in, num_in, first_out, num_out, row


@triton.jit
def grouped_linear_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    places,
    tiles,
    num_rows,
    stride_x_m,
    stride_x_k,
    stride_out,
    ALIGN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 3
    first_in, num_in, first_out, num_out, row = place_of(places, tl.load(tile), ALIGN)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.load(tile + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight = weight_ptr + tl.multiple_of(tl.load(row + 4), ALIGN)
    is_row, is_out = rows[:, None] < num_rows, outs[None, :] < num_out
    total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for start in range(0, num_in, BLOCK_K):
        ins = start + tl.arange(0, BLOCK_K)
        x_places = rows[:, None] * stride_x_m + (first_in + ins)[None, :] * stride_x_k
        x = tl.load(x_ptr + x_places, mask=is_row & (ins[None, :] < num_in), other=0.0)
        w_places = outs[None, :] * num_in + ins[:, None]
        w = tl.load(weight + w_places, mask=is_out & (ins[:, None] < num_in), other=0.0)
        total = tl.dot(operand(x), operand(w), total, PRECISION, out_dtype=SUM)
    if HAS_BIAS:
        bias = bias_ptr + tl.load(row + 5)
        total += wide(tl.load(bias + outs, mask=outs < num_out, other=0.0))[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = narrow(activate(total, ACTIVATION, dtype), dtype)
    out_places = rows[:, None] * stride_out + first_out + outs[None, :]
    tl.store(out_ptr + out_places, out, mask=is_row & is_out)


@triton.jit
def grouped_linear_dgrad_kernel(
    grad_ptr,
    weight_ptr,
    grad_x_ptr,
    places,
    tiles,
    num_rows,
    stride_grad_m,
    stride_grad_n,
    stride_grad_x,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 3
    first_in, num_in, first_out, num_out, row = place_of(places, tl.load(tile), ALIGN)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ins = tl.load(tile + 2) * BLOCK_K + tl.arange(0, BLOCK_K)
    weight = weight_ptr + tl.multiple_of(tl.load(row + 4), ALIGN)
    is_row, is_in = rows[:, None] < num_rows, ins[None, :] < num_in
    total = tl.zeros((BLOCK_M, BLOCK_K), SUM)
    for start in range(0, num_out, BLOCK_N):
        outs = start + tl.arange(0, BLOCK_N)
        grad_places = rows[:, None] * stride_grad_m + (first_out + outs)[None, :] * stride_grad_n
        grad = tl.load(grad_ptr + grad_places, mask=is_row & (outs[None, :] < num_out), other=0.0)
        w_places = outs[:, None] * num_in + ins[None, :]
        w = tl.load(weight + w_places, mask=is_in & (outs[:, None] < num_out), other=0.0)
        total = tl.dot(operand(grad), operand(w), total, PRECISION, out_dtype=SUM)
    out_places = rows[:, None] * stride_grad_x + first_in + ins[None, :]
    grad_x = narrow(total, grad_x_ptr.dtype.element_ty)
    tl.store(grad_x_ptr + out_places, grad_x, mask=is_row & is_in)


@triton.jit
def grouped_linear_wgrad_kernel(
    grad_ptr,
    x_ptr,
    weight_part_ptr,
    bias_part_ptr,
    places,
    tiles,
    num_rows,
    steps,
    stride_grad_m,
    stride_grad_n,
    stride_x_m,
    stride_x_k,
    num_weights,
    num_biases,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 3
    first_in, num_in, first_out, num_out, row = place_of(places, tl.load(tile), ALIGN)
    share = tl.program_id(1).to(tl.int64)
    outs = tl.load(tile + 1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ins = tl.load(tile + 2) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_out, is_in = outs[:, None] < num_out, ins[None, :] < num_in
    total = tl.zeros((BLOCK_N, BLOCK_K), SUM)
    total_bias = tl.zeros((BLOCK_N,), SUM)
    for step in range(steps):
        rows = (share * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        grad_places = rows[None, :] * stride_grad_m + (first_out + outs)[:, None] * stride_grad_n
        grad = tl.load(grad_ptr + grad_places, mask=is_out & (rows[None, :] < num_rows), other=0.0)
        x_places = rows[:, None] * stride_x_m + (first_in + ins)[None, :] * stride_x_k
        x = tl.load(x_ptr + x_places, mask=is_in & (rows[:, None] < num_rows), other=0.0)
        total = tl.dot(operand(grad), operand(x), total, PRECISION, out_dtype=SUM)
        total_bias += tl.sum(wide(grad), 1)
    first = share * num_weights + tl.load(row + 6)
    tl.store(
        weight_part_ptr + first + outs[:, None] * num_in + ins[None, :], total, mask=is_out & is_in
    )
    is_first = tl.load(tile + 2) == 0
    bias_places = share * num_biases + first_out + outs
    tl.store(bias_part_ptr + bias_places, total_bias, mask=(outs < num_out) & is_first)
