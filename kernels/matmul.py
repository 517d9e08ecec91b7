"""The product of two matrices inside a kernel, for operators that do more with the result.

`a` (M, K) and `b` (N, K), as of a linear layer: a tile of a @ b.T is summed in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.launch import dot_precision
from kernels.tiles import operand, sum_type, wide
from kernels.tuning import Tile, tile

TILES = (
    tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3),
    tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=4),
    tile(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=4),
    tile(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4),
    tile(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4),
    tile(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=3),
)


def number_types(dtype: torch.dtype) -> dict[str, Any]:
    """The constants of a kernel that say how products over `dtype` are taken and summed."""
    return {"PRECISION": dot_precision(dtype), "SUM": sum_type(dtype)}


def num_tiles(rows: int, columns: int, choice: Tile) -> int:
    """How many tiles of `choice` cover a result (rows, columns), a program each."""
    sizes = choice.sizes
    return triton.cdiv(rows, sizes["BLOCK_M"]) * triton.cdiv(columns, sizes["BLOCK_N"])


@triton.jit
def place_of(pid, num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which tile a program takes: eight rows of tiles at a time, so that both factors stay in L2.

    Returns the indices of its rows (int64) and columns, and the number of its row of tiles.
    """
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    band = 8 * tiles_n
    first = pid // band * 8
    height = tl.minimum(tiles_m - first, 8)
    tile_m = first + pid % band % height
    tile_n = pid % band // height
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows, tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tile_m


@triton.jit
def multiply(
    a_ptr,
    b_ptr,
    rows,
    columns,
    num_rows,
    num_columns,
    depth,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile (rows, columns) of a @ b.T, zero outside the result."""
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    a_tile = a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak
    b_tile = b_ptr + columns.to(tl.int64)[None, :] * stride_bn + inner[:, None] * stride_bk
    is_row, is_column = rows[:, None] < num_rows, columns[None, :] < num_columns
    total = tl.zeros((rows.shape[0], columns.shape[0]), SUM)
    for start in range(0, depth, BLOCK_K):
        left = depth - start
        a = tl.load(a_tile, mask=is_row & (inner[None, :] < left), other=0.0)
        b = tl.load(b_tile, mask=is_column & (inner[:, None] < left), other=0.0)
        total = tl.dot(operand(a), operand(b), total, PRECISION, out_dtype=SUM)
        a_tile += BLOCK_K * stride_ak
        b_tile += BLOCK_K * stride_bk
    return total


@triton.jit
def add_bias(total, bias_ptr, columns, num_columns):
    """`total`, a tile of sums, with the bias (N,) of its columns, added before any rounding."""
    bias = tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0)
    return total + wide(bias)[None, :]
