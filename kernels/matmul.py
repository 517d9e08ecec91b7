"""The product of two matrices inside a kernel, for operators that do more with the result.

`a` (M, K) and `b` (N, K), as of a linear layer: a tile of a @ b.T is summed in registers.

There are two forms, told apart by the constant TMA of a tile shape. With TMA=1 kernels take
descriptors and copy whole blocks; with TMA=0, for any strides and any GPU, pointers and masks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.descriptors import Blocks
from kernels.launch import can_describe, dot_precision
from kernels.tiles import narrow, operand, sum_type, wide
from kernels.tuning import Tile, tile

TILES = (
    tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3),
    tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=4),
    tile(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=4),
    tile(BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4),
    tile(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4),
    tile(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=3),
)
TMA_TILES = (
    tile(TMA=1, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=3),
    tile(TMA=1, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3),
    tile(TMA=1, BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
    tile(TMA=1, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
)


def number_types(dtype: torch.dtype) -> dict[str, Any]:
    """The constants of a kernel that say how products over `dtype` are taken and summed."""
    return {"PRECISION": dot_precision(dtype), "SUM": sum_type(dtype)}


def options(choice: Tile, dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments of a launch in tiles of `choice`, with products over `dtype`."""
    return {"TMA": 0, **number_types(dtype), **choice.options()}


def menu(
    pointers: tuple[Tile, ...], blocks: tuple[Tile, ...], a: Tensor, b: Tensor, *others: Tensor
) -> tuple[Tile, ...]:
    """Tile shapes for a @ b.T to choose from: `blocks`, which have TMA=1, where the product runs on
    tensor cores and all matrices can be described."""
    exact = a.dtype == torch.float32 and dot_precision(a.dtype) == "ieee"
    return pointers if exact or not can_describe(a, b, *others) else (*blocks, *pointers)


def argument(matrix: Tensor, choice: Tile, rows: str, columns: str) -> Tensor | Blocks:
    """A matrix as a kernel takes it that copies it in blocks of `rows` by `columns`, two constants
    of the tile shape, where that has TMA=1."""
    sizes = choice.sizes
    return Blocks(matrix, (sizes[rows], sizes[columns])) if sizes.get("TMA") else matrix


def num_tiles(rows: int, columns: int, choice: Tile) -> int:
    """How many tiles of `choice` cover a result (rows, columns), a program each."""
    sizes = choice.sizes
    return triton.cdiv(rows, sizes["BLOCK_M"]) * triton.cdiv(columns, sizes["BLOCK_N"])


@triton.jit
def place_of(pid, num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which tile a program takes: eight rows of tiles at a time, so that both factors stay in L2.

    Returns its first row and its first column.
    """
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    band = 8 * tiles_n
    first = pid // band * 8
    height = tl.minimum(tiles_m - first, 8)
    return (first + pid % band % height) * BLOCK_M, pid % band // height * BLOCK_N


@triton.jit
def multiply(
    a,
    b,
    row,
    column,
    num_rows,
    num_columns,
    depth,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile at (row, column) of a @ b.T, zero outside the result."""
    total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    if TMA:
        for start in range(0, depth, BLOCK_K):
            a_tile = operand(a.load([row, start]))
            b_tile = operand(b.load([column, start]))
            total = tl.dot(a_tile, b_tile.T, total, PRECISION, out_dtype=SUM)
    else:
        inner = tl.arange(0, BLOCK_K).to(tl.int64)
        rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)
        a_places = a + rows[:, None] * stride_am + inner[None, :] * stride_ak
        b_places = b + columns.to(tl.int64)[None, :] * stride_bn + inner[:, None] * stride_bk
        is_row, is_column = rows[:, None] < num_rows, columns[None, :] < num_columns
        for start in range(0, depth, BLOCK_K):
            left = depth - start
            a_tile = tl.load(a_places, mask=is_row & (inner[None, :] < left), other=0.0)
            b_tile = tl.load(b_places, mask=is_column & (inner[:, None] < left), other=0.0)
            total = tl.dot(operand(a_tile), operand(b_tile), total, PRECISION, out_dtype=SUM)
            a_places += BLOCK_K * stride_ak
            b_places += BLOCK_K * stride_bk
    return total


@triton.jit
def load_tile(
    a,
    row,
    column,
    num_rows,
    num_columns,
    stride_m,
    stride_n,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The tile at (row, column) of a matrix, zero outside it."""
    if TMA:
        return a.load([row, column])
    else:
        rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
        columns = column.to(tl.int64) + tl.arange(0, BLOCK_N)[None, :]
        inside = (rows < num_rows) & (columns < num_columns)
        return tl.load(a + rows * stride_m + columns * stride_n, mask=inside, other=0.0)


@triton.jit
def store_tile(
    out,
    value,
    row,
    column,
    num_rows,
    num_columns,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the tile at (row, column) of a contiguous result."""
    if TMA:
        out.store([row, column], narrow(value, out.dtype))
    else:
        rows = row.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
        columns = column.to(tl.int64) + tl.arange(0, BLOCK_N)[None, :]
        inside = (rows < num_rows) & (columns < num_columns)
        dtype: tl.constexpr = out.dtype.element_ty
        tl.store(out + rows * num_columns + columns, narrow(value, dtype), mask=inside)


@triton.jit
def add_bias(total, bias_ptr, columns, num_columns):
    """`total`, a tile of sums, with the bias (N,) of its columns, added before any rounding."""
    bias = tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0)
    return total + wide(bias)[None, :]
