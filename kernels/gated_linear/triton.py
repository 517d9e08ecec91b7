"""Kernel of gated_linear.

Shapes: x (B, K), gate and up (N, K), their biases (N,), result (B, N).

1. Both products are summed side by side from one reading of x; the gate is their epilogue.
2. For training the two sums are written as well, in the result's type: to compute them again in
   backward would cost a third of all its products. Without it nothing but the result is written.
3. With TMA both factors are loaded by it. The result is stored by pointers all the same, which was
   faster on an H200, and lets N be odd.
4. What backward does between the products is pointwise, and left to the compiler to fuse.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, on_device
from kernels.matmul import add_bias, argument, menu, num_tiles, options, place_of, store_tile
from kernels.tiles import activate, operand
from kernels.tuning import Tile, choose, tile

TILES = (
    tile(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=8, num_stages=3),
    tile(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
    tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3),
    tile(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4),
    tile(BLOCK_M=64, BLOCK_N=32, BLOCK_K=64, num_warps=4, num_stages=3),
)
TMA_TILES = (
    tile(TMA=1, BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2),
    tile(TMA=1, BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
    tile(TMA=1, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3),
    tile(TMA=1, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
)


def forward(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result (B, N), and the two sums (empty without `save`). Biases must be contiguous."""
    rows, columns = x.shape[0], gate.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    opened, value = (torch.empty_like(out) if save else x.new_empty(0) for _ in range(2))

    def run(choice: Tile) -> None:
        launch(
            gated_linear_fwd_kernel,
            (num_tiles(rows, columns, choice),),
            argument(x, choice, "BLOCK_M", "BLOCK_K"),
            argument(gate, choice, "BLOCK_N", "BLOCK_K"),
            argument(up, choice, "BLOCK_N", "BLOCK_K"),
            x if gate_bias is None else gate_bias,
            x if up_bias is None else up_bias,
            out,
            opened,
            value,
            rows,
            columns,
            x.shape[1],
            *x.stride(),
            *gate.stride(),
            *up.stride(),
            HAS_GATE_BIAS=gate_bias is not None,
            HAS_UP_BIAS=up_bias is not None,
            ACTIVATION=activation,
            SAVE=save,
            **options(choice, x.dtype),
        )

    with on_device(x):
        tiles = menu(TILES, TMA_TILES, x, gate, up)
        run(choose("gated_linear", (*x.shape, columns, int(save)), x.dtype, tiles, run))
    return out, opened, value


@triton.jit
def gated_linear_fwd_kernel(
    x,
    gate,
    up,
    gate_bias_ptr,
    up_bias_ptr,
    out_ptr,
    opened_ptr,
    value_ptr,
    num_rows,
    num_columns,
    depth,
    stride_x_m,
    stride_x_k,
    stride_gate_n,
    stride_gate_k,
    stride_up_n,
    stride_up_k,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
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
    opened = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    value = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    if TMA:
        for start in range(0, depth, BLOCK_K):
            x_tile = operand(x.load([row, start]))
            gate_tile = operand(gate.load([column, start]))
            opened = tl.dot(x_tile, gate_tile.T, opened, PRECISION, out_dtype=SUM)
            up_tile = operand(up.load([column, start]))
            value = tl.dot(x_tile, up_tile.T, value, PRECISION, out_dtype=SUM)
    else:
        rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
        columns = column.to(tl.int64) + tl.arange(0, BLOCK_N)[None, :]
        inner = tl.arange(0, BLOCK_K).to(tl.int64)
        x_places = x + rows * stride_x_m + inner[None, :] * stride_x_k
        gate_places = gate + columns * stride_gate_n + inner[:, None] * stride_gate_k
        up_places = up + columns * stride_up_n + inner[:, None] * stride_up_k
        is_row, is_column = rows < num_rows, columns < num_columns
        for start in range(0, depth, BLOCK_K):
            left = depth - start
            x_tile = operand(tl.load(x_places, mask=is_row & (inner[None, :] < left), other=0.0))
            mask = is_column & (inner[:, None] < left)
            gate_tile = operand(tl.load(gate_places, mask=mask, other=0.0))
            opened = tl.dot(x_tile, gate_tile, opened, PRECISION, out_dtype=SUM)
            up_tile = operand(tl.load(up_places, mask=mask, other=0.0))
            value = tl.dot(x_tile, up_tile, value, PRECISION, out_dtype=SUM)
            x_places += BLOCK_K * stride_x_k
            gate_places += BLOCK_K * stride_gate_k
            up_places += BLOCK_K * stride_up_k
    places = column + tl.arange(0, BLOCK_N)
    if HAS_GATE_BIAS:
        opened = add_bias(opened, gate_bias_ptr, places, num_columns)
    if HAS_UP_BIAS:
        value = add_bias(value, up_bias_ptr, places, num_columns)
    if SAVE:
        store_tile(opened_ptr, opened, row, column, num_rows, num_columns, 0, BLOCK_M, BLOCK_N)
        store_tile(value_ptr, value, row, column, num_rows, num_columns, 0, BLOCK_M, BLOCK_N)
    out = activate(opened, ACTIVATION, out_ptr.dtype.element_ty) * value
    store_tile(out_ptr, out, row, column, num_rows, num_columns, 0, BLOCK_M, BLOCK_N)
