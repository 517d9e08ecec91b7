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

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, on_device
from kernels.matmul import TILES, add_bias, multiply, num_tiles, number_types, place_of
from kernels.tiles import narrow, wide
from kernels.tuning import Tile, choose


def forward(
    x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor
) -> None:
    """Fill `out` (B, N) with the result."""

    def run(choice: Tile) -> None:
        launch(
            cross_layer_fwd_kernel,
            _grid(out, choice),
            x0,
            y,
            weight,
            weight if bias is None else bias,
            x,
            out,
            *out.shape,
            y.shape[1],
            *x0.stride(),
            *y.stride(),
            *weight.stride(),
            *x.stride(),
            HAS_BIAS=bias is not None,
            **number_types(y.dtype),
            **choice.options(),
        )

    _choose_and_run("cross_layer_fwd", out, y, run)


def backward(
    grad: Tensor, x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x0, of the projection (in y's type) and of the bias (empty without one)."""
    grad_x0 = torch.empty(x0.shape, dtype=x0.dtype, device=x0.device)
    projected = torch.empty(x0.shape, dtype=y.dtype, device=x0.device)
    wide_type = torch.float64 if y.dtype == torch.float64 else torch.float32
    partial = grad.new_empty(0, dtype=wide_type)

    def run(choice: Tile) -> None:
        nonlocal partial
        if bias is not None:
            tiles_m = triton.cdiv(grad.shape[0], choice.sizes["BLOCK_M"])
            partial = torch.empty(tiles_m, grad.shape[1], dtype=wide_type, device=grad.device)
        launch(
            cross_layer_bwd_kernel,
            _grid(grad, choice),
            grad,
            x0,
            y,
            weight,
            weight if bias is None else bias,
            grad_x0,
            projected,
            partial,
            *grad.shape,
            y.shape[1],
            *grad.stride(),
            *x0.stride(),
            *y.stride(),
            *weight.stride(),
            HAS_BIAS=bias is not None,
            **number_types(y.dtype),
            **choice.options(),
        )

    _choose_and_run("cross_layer_bwd", grad, y, run)
    grad_bias = grad.new_empty(0) if bias is None else partial.sum(0).to(bias.dtype)
    return grad_x0, projected, grad_bias


def _grid(out: Tensor, choice: Tile) -> tuple[int]:
    return (num_tiles(out.shape[0], out.shape[1], choice),)


def _choose_and_run(op: str, out: Tensor, y: Tensor, run: Callable[[Tile], None]) -> None:
    with on_device(y):
        run(choose(op, (*out.shape, y.shape[1]), y.dtype, TILES, run))


@triton.jit
def cross_layer_fwd_kernel(
    x0_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    x_ptr,
    out_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows, columns, _ = place_of(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N)
    z = multiply(
        y_ptr,
        weight_ptr,
        rows,
        columns,
        num_rows,
        num_columns,
        depth,
        stride_y_m,
        stride_y_k,
        stride_weight_n,
        stride_weight_k,
        PRECISION,
        SUM,
        BLOCK_K,
    )
    if HAS_BIAS:
        z = add_bias(z, bias_ptr, columns, num_columns)
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    wide_columns = columns.to(tl.int64)[None, :]
    x0 = tl.load(x0_ptr + rows[:, None] * stride_x0_m + wide_columns * stride_x0_n, mask=inside)
    x = tl.load(x_ptr + rows[:, None] * stride_x_m + wide_columns * stride_x_n, mask=inside)
    out = narrow(wide(x0) * z + wide(x), out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * num_columns + wide_columns, out, mask=inside)


@triton.jit
def cross_layer_bwd_kernel(
    grad_ptr,
    x0_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    grad_x0_ptr,
    projected_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows, columns, tile_m = place_of(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N)
    z = multiply(
        y_ptr,
        weight_ptr,
        rows,
        columns,
        num_rows,
        num_columns,
        depth,
        stride_y_m,
        stride_y_k,
        stride_weight_n,
        stride_weight_k,
        PRECISION,
        SUM,
        BLOCK_K,
    )
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    wide_columns = columns.to(tl.int64)[None, :]
    grad = tl.load(
        grad_ptr + rows[:, None] * stride_grad_m + wide_columns * stride_grad_n,
        mask=inside,
        other=0.0,
    )
    x0 = tl.load(
        x0_ptr + rows[:, None] * stride_x0_m + wide_columns * stride_x0_n, mask=inside, other=0.0
    )
    projected = wide(grad) * wide(x0)
    if HAS_BIAS:
        z = add_bias(z, bias_ptr, columns, num_columns)
        tl.store(
            partial_ptr + tile_m.to(tl.int64) * num_columns + columns,
            tl.sum(projected, 0),
            mask=columns < num_columns,
        )
    places = rows[:, None] * num_columns + wide_columns
    grad_x0 = narrow(wide(grad) * z, grad_x0_ptr.dtype.element_ty)
    tl.store(grad_x0_ptr + places, grad_x0, mask=inside)
    tl.store(projected_ptr + places, narrow(projected, projected_ptr.dtype.element_ty), mask=inside)
