"""Kernels of cross_layer.

Shapes: x0, x, result (B, N), y (B, K), weight (N, K), bias (N,).

1. The product with x0, the bias and the residual are the GEMM's epilogue: the projection never
   leaves the registers, neither is it saved for backward.
2. Backward runs the GEMM again and in its epilogue writes the gradients of x0 and of the projection
   together, from one reading of `grad`. The two GEMMs that remain are the BLAS library's.
3. The bias's gradient is summed in two stages, tiles of rows first: no atomics, the same bits each
   time for the same tile shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, on_device
from kernels.matmul import (
    TILES,
    TMA_TILES,
    add_bias,
    argument,
    load_tile,
    menu,
    multiply,
    num_tiles,
    options,
    place_of,
    store_tile,
)
from kernels.tiles import wide, wide_type
from kernels.tuning import Tile, choose


def forward(
    x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor
) -> None:
    """Fill `out` (B, N) with the result."""

    def run(choice: Tile) -> None:
        launch(
            cross_layer_fwd_kernel,
            _grid(out, choice),
            argument(x0, choice, "BLOCK_M", "BLOCK_N"),
            argument(y, choice, "BLOCK_M", "BLOCK_K"),
            argument(weight, choice, "BLOCK_N", "BLOCK_K"),
            weight if bias is None else bias,
            argument(x, choice, "BLOCK_M", "BLOCK_N"),
            argument(out, choice, "BLOCK_M", "BLOCK_N"),
            *out.shape,
            y.shape[1],
            *x0.stride(),
            *y.stride(),
            *weight.stride(),
            *x.stride(),
            HAS_BIAS=bias is not None,
            **options(choice, y.dtype),
        )

    tiles = menu(TILES, TMA_TILES, y, weight, x0, x, out)
    with on_device(y):
        run(choose("cross_layer_fwd", (*out.shape, y.shape[1]), y.dtype, tiles, run))


def backward(
    grad: Tensor, x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x0, of the projection (in y's type) and of the bias (empty without one)."""
    grad_x0 = torch.empty(x0.shape, dtype=x0.dtype, device=x0.device)
    projected = torch.empty(x0.shape, dtype=y.dtype, device=x0.device)
    partial = grad.new_empty(0, dtype=wide_type(y.dtype))

    def run(choice: Tile) -> None:
        nonlocal partial
        if bias is not None:
            tiles_m = triton.cdiv(grad.shape[0], choice.sizes["BLOCK_M"])
            partial = torch.empty(
                tiles_m, grad.shape[1], dtype=wide_type(y.dtype), device=grad.device
            )
        launch(
            cross_layer_bwd_kernel,
            _grid(grad, choice),
            argument(grad, choice, "BLOCK_M", "BLOCK_N"),
            argument(x0, choice, "BLOCK_M", "BLOCK_N"),
            argument(y, choice, "BLOCK_M", "BLOCK_K"),
            argument(weight, choice, "BLOCK_N", "BLOCK_K"),
            weight if bias is None else bias,
            argument(grad_x0, choice, "BLOCK_M", "BLOCK_N"),
            argument(projected, choice, "BLOCK_M", "BLOCK_N"),
            partial,
            *grad.shape,
            y.shape[1],
            *grad.stride(),
            *x0.stride(),
            *y.stride(),
            *weight.stride(),
            HAS_BIAS=bias is not None,
            **options(choice, y.dtype),
        )

    tiles = menu(TILES, TMA_TILES, y, weight, grad, x0, grad_x0, projected)
    with on_device(y):
        run(choose("cross_layer_bwd", (*grad.shape, y.shape[1]), y.dtype, tiles, run))
    grad_bias = grad.new_empty(0) if bias is None else partial.sum(0).to(bias.dtype)
    return grad_x0, projected, grad_bias


def _grid(out: Tensor, choice: Tile) -> tuple[int]:
    return (num_tiles(out.shape[0], out.shape[1], choice),)


@triton.jit
def cross_layer_fwd_kernel(
    x0,
    y,
    weight,
    bias_ptr,
    x,
    out,
    num_rows,
    num_columns,
    depth,
    stride_x0_m,
    stride_x0_n,
    stride_y_m,
    stride_y_k,
    stride_weight_n,
    stride_weight_k,
    stride_x_m,
    stride_x_n,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, column = place_of(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N)
    z = multiply(
        y,
        weight,
        row,
        column,
        num_rows,
        num_columns,
        depth,
        stride_y_m,
        stride_y_k,
        stride_weight_n,
        stride_weight_k,
        PRECISION,
        SUM,
        TMA,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if HAS_BIAS:
        z = add_bias(z, bias_ptr, column + tl.arange(0, BLOCK_N), num_columns)
    x0_tile = load_tile(
        x0, row, column, num_rows, num_columns, stride_x0_m, stride_x0_n, TMA, BLOCK_M, BLOCK_N
    )
    x_tile = load_tile(
        x, row, column, num_rows, num_columns, stride_x_m, stride_x_n, TMA, BLOCK_M, BLOCK_N
    )
    value = wide(x0_tile) * z + wide(x_tile)
    store_tile(out, value, row, column, num_rows, num_columns, TMA, BLOCK_M, BLOCK_N)


@triton.jit
def cross_layer_bwd_kernel(
    grad,
    x0,
    y,
    weight,
    bias_ptr,
    grad_x0,
    projected,
    partial_ptr,
    num_rows,
    num_columns,
    depth,
    stride_grad_m,
    stride_grad_n,
    stride_x0_m,
    stride_x0_n,
    stride_y_m,
    stride_y_k,
    stride_weight_n,
    stride_weight_k,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, column = place_of(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N)
    z = multiply(
        y,
        weight,
        row,
        column,
        num_rows,
        num_columns,
        depth,
        stride_y_m,
        stride_y_k,
        stride_weight_n,
        stride_weight_k,
        PRECISION,
        SUM,
        TMA,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    columns = column + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        z = add_bias(z, bias_ptr, columns, num_columns)
    grad_tile = load_tile(
        grad,
        row,
        column,
        num_rows,
        num_columns,
        stride_grad_m,
        stride_grad_n,
        TMA,
        BLOCK_M,
        BLOCK_N,
    )
    of_x0 = wide(grad_tile) * z  # written before x0 is loaded: z's registers are free then
    store_tile(grad_x0, of_x0, row, column, num_rows, num_columns, TMA, BLOCK_M, BLOCK_N)
    x0_tile = load_tile(
        x0, row, column, num_rows, num_columns, stride_x0_m, stride_x0_n, TMA, BLOCK_M, BLOCK_N
    )
    of_z = wide(grad_tile) * wide(x0_tile)
    store_tile(projected, of_z, row, column, num_rows, num_columns, TMA, BLOCK_M, BLOCK_N)
    if HAS_BIAS:
        places = (row // BLOCK_M).to(tl.int64) * num_columns + columns
        tl.store(partial_ptr + places, tl.sum(of_z, 0), mask=columns < num_columns)
