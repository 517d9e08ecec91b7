"""Kernels of linear_act.

Shapes: x (B, K), weight (N, K), bias (N,), result (B, N).

1. Bias and activation are the product's epilogue. ReLU, sigmoid and tanh keep nothing but their
   result for backward, the others write the sum in front of the activation too.
2. Backward reads gradient and result once, and writes the gradient of the sum and the bias's: one
   pass where PyTorch takes two. Columns are summed over shares of the rows, then over the shares;
   no atomics, the same bits each time for the same tile shape. Its products are the BLAS library's.
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
    menu,
    multiply,
    num_tiles,
    options,
    place_of,
    store_tile,
)
from kernels.tiles import activate, narrow, slope_at, sum_type, wide, wide_type
from kernels.tuning import Tile, choose, num_programs, tile

BACKWARD_TILES = (
    tile(BLOCK_M=32, BLOCK_N=128, num_warps=4),
    tile(BLOCK_M=16, BLOCK_N=256, num_warps=4),
    tile(BLOCK_M=64, BLOCK_N=64, num_warps=4),
    tile(BLOCK_M=64, BLOCK_N=128, num_warps=8),
)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
) -> tuple[Tensor, Tensor]:
    """The result (B, N), and with `save` the sum (else empty). The bias must be contiguous."""
    rows, columns = x.shape[0], weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    z = torch.empty_like(out) if save else x.new_empty(0)

    def run(choice: Tile) -> None:
        launch(
            linear_act_fwd_kernel,
            (num_tiles(rows, columns, choice),),
            argument(x, choice, "BLOCK_M", "BLOCK_K"),
            argument(weight, choice, "BLOCK_N", "BLOCK_K"),
            x if bias is None else bias,
            argument(out, choice, "BLOCK_M", "BLOCK_N"),
            argument(z, choice, "BLOCK_M", "BLOCK_N") if save else z,
            rows,
            columns,
            x.shape[1],
            *x.stride(),
            *weight.stride(),
            HAS_BIAS=bias is not None,
            ACTIVATION=activation,
            SAVE=save,
            **options(choice, x.dtype),
        )

    with on_device(x):
        tiles = menu(TILES, TMA_TILES, x, weight, out)
        run(choose("linear_act_fwd", (*x.shape, columns, int(save)), x.dtype, tiles, run))
    return out, z


def backward(grad: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradient of the sum, and that summed over the rows; `saved` as in reference.backward."""
    rows, columns = grad.shape
    of_sum = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    partial = torch.empty(0, dtype=wide_type(grad.dtype), device=grad.device)

    def run(choice: Tile) -> None:
        nonlocal partial
        across = triton.cdiv(columns, choice.sizes["BLOCK_N"])
        blocks = triton.cdiv(rows, choice.sizes["BLOCK_M"])
        steps = triton.cdiv(blocks, num_programs(1024 // across))
        shares = triton.cdiv(blocks, steps)
        partial = torch.empty(shares, columns, dtype=wide_type(grad.dtype), device=grad.device)
        launch(
            linear_act_bwd_kernel,
            (across, shares),
            grad,
            saved,
            of_sum,
            partial,
            rows,
            columns,
            steps,
            *grad.stride(),
            *saved.stride(),
            ACTIVATION=activation,
            SUM=sum_type(grad.dtype),
            **choice.options(),
        )

    with on_device(grad):
        run(choose("linear_act_bwd", grad.shape, grad.dtype, BACKWARD_TILES, run))
    return of_sum, partial.sum(0).to(grad.dtype)


@triton.jit
def linear_act_fwd_kernel(
    x,
    weight,
    bias_ptr,
    out,
    z_out,
    num_rows,
    num_columns,
    depth,
    stride_x_m,
    stride_x_k,
    stride_weight_n,
    stride_weight_k,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SAVE: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, column = place_of(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N)
    z = multiply(
        x,
        weight,
        row,
        column,
        num_rows,
        num_columns,
        depth,
        stride_x_m,
        stride_x_k,
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
    y = activate(z, ACTIVATION, out.dtype if TMA else out.dtype.element_ty)
    store_tile(out, y, row, column, num_rows, num_columns, TMA, BLOCK_M, BLOCK_N)
    if SAVE:
        store_tile(z_out, z, row, column, num_rows, num_columns, TMA, BLOCK_M, BLOCK_N)


@triton.jit
def linear_act_bwd_kernel(
    grad_ptr,
    saved_ptr,
    of_sum_ptr,
    partial_ptr,
    num_rows,
    num_columns,
    steps,
    stride_grad_m,
    stride_grad_n,
    stride_saved_m,
    stride_saved_n,
    ACTIVATION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    share = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for step in range(steps):
        rows = ((share * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        inside = (rows < num_rows) & (columns[None, :] < num_columns)
        grad_places = rows * stride_grad_m + columns[None, :] * stride_grad_n
        saved_places = rows * stride_saved_m + columns[None, :] * stride_saved_n
        grad = wide(tl.load(grad_ptr + grad_places, mask=inside, other=0.0))
        saved = wide(tl.load(saved_ptr + saved_places, mask=inside, other=0.0))
        of_sum = grad * slope_at(saved, ACTIVATION)
        places = rows * num_columns + columns[None, :]
        tl.store(of_sum_ptr + places, narrow(of_sum, of_sum_ptr.dtype.element_ty), mask=inside)
        total += of_sum
    places = partial_ptr + share * num_columns + columns
    tl.store(places, tl.sum(total, 0), mask=columns < num_columns)
