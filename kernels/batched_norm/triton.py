"""Kernels of batched_norm.

Shapes: x, result (B, N, D); weight, bias (N, D).

1. A tile is (BLOCK_B, BLOCK_N, BLOCK_D): some rows of some neighbouring slices, so that reading is
   one run of memory a row however narrow the slices are. A program keeps its slices' affine
   parameters and walks down its share of the rows.
2. Nothing is saved for backward but x: mean and deviation are computed again from what has to be
   read anyway.
3. The affine gradients are summed in registers over a program's rows, then over the programs: two
   stages, no atomics. How rows are shared out depends on sizes alone, so the bits are the same each
   time for the same tile shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch, on_device
from kernels.tiles import activate, narrow, slope, sum_type, wide, wide_type
from kernels.tuning import Tile, choose, num_programs, tile

MAX_WIDTH = 4096
"""Slices wider than that do not fit the registers of one program."""

TILES = (
    tile(ELEMENTS=4096, num_warps=4),
    tile(ELEMENTS=2048, num_warps=4),
    tile(ELEMENTS=2048, num_warps=2),
    tile(ELEMENTS=8192, num_warps=8),
)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    activation: str,
) -> Tensor:
    """The result (B, N, D), fresh and contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def run(choice: Tile) -> None:
        blocks = _blocks(x, choice)
        grid, steps = _share(x, blocks, 1 << 16)
        launch(
            batched_norm_fwd_kernel,
            grid,
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            out,
            *x.shape,
            *x.stride(),
            steps,
            EPS=eps,
            **blocks,
            **_flags(weight, bias, centered, activation, x.dtype),
            num_warps=choice.num_warps,
        )

    with on_device(x):
        run(choose("batched_norm_fwd", x.shape, x.dtype, TILES, run))
    return out


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (contiguous), weight and bias (empty where there is none)."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty(0, dtype=wide_type(x.dtype), device=x.device)

    def run(choice: Tile) -> None:
        nonlocal partial
        blocks = _blocks(x, choice)
        grid, steps = _share(x, blocks, num_programs(1 << 10))
        partial = torch.empty(2, grid[0], *x.shape[1:], dtype=wide_type(x.dtype), device=x.device)
        launch(
            batched_norm_bwd_kernel,
            grid,
            grad,
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            grad_x,
            partial[0],
            partial[1],
            *x.shape,
            *grad.stride(),
            *x.stride(),
            steps,
            EPS=eps,
            **blocks,
            **_flags(weight, bias, centered, activation, x.dtype),
            num_warps=choice.num_warps,
        )

    with on_device(x):
        run(choose("batched_norm_bwd", x.shape, x.dtype, TILES, run))
    affine = [
        x.new_empty(0) if parameter is None else part.sum(0).to(parameter.dtype)
        for parameter, part in zip((weight, bias), partial, strict=True)
    ]
    return grad_x, affine[0], affine[1]


def _blocks(x: Tensor, choice: Tile) -> dict[str, int]:
    """The tile's sides, about ELEMENTS in all: the width, then slices, then rows."""
    room = choice.sizes["ELEMENTS"]
    block_d = triton.next_power_of_2(x.shape[2])
    block_n = min(triton.next_power_of_2(x.shape[1]), max(1, room // (2 * block_d)))
    block_b = max(1, room // (block_d * block_n))
    return {"BLOCK_B": block_b, "BLOCK_N": block_n, "BLOCK_D": block_d}


def _share(x: Tensor, blocks: dict[str, int], most: int) -> tuple[tuple[int, int], int]:
    """Programs along rows and slices, at most `most` in all, and each one's number of tiles."""
    num_slices = triton.cdiv(x.shape[1], blocks["BLOCK_N"])
    tiles = triton.cdiv(x.shape[0], blocks["BLOCK_B"])
    steps = triton.cdiv(tiles, max(1, most // num_slices))
    return (triton.cdiv(tiles, steps), num_slices), steps


def _flags(
    weight: Tensor | None, bias: Tensor | None, centered: bool, activation: str, dtype: torch.dtype
) -> dict[str, object]:
    return {
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "CENTERED": centered,
        "ACTIVATION": activation,
        "SUM": sum_type(dtype),
    }


@triton.jit
def load_affine(
    weight_ptr, bias_ptr, places, is_column, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Weight and bias of the tile's slices, (1, BLOCK_N, BLOCK_D), 1 and 0 where there is none."""
    weight, bias = 1.0, 0.0
    if HAS_WEIGHT:
        weight = wide(tl.load(weight_ptr + places, mask=is_column, other=0.0))
    if HAS_BIAS:
        bias = wide(tl.load(bias_ptr + places, mask=is_column, other=0.0))
    return weight, bias


@triton.jit
def normalize(x, is_column, width, EPS: tl.constexpr, CENTERED: tl.constexpr):
    """norm(x) along the last dimension, zero outside the slices, and one over the deviation."""
    if CENTERED:
        x = tl.where(is_column, x - tl.sum(x, 2, keep_dims=True) / width, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 2, keep_dims=True) / width + EPS)
    return x * scale, scale


@triton.jit
def batched_norm_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    batch,
    num_slices,
    width,
    stride_b,
    stride_n,
    stride_d,
    steps,
    EPS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SUM: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)[None, None, :]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None].to(tl.int64)
    is_column = (n < num_slices) & (d < width)
    weight, bias = load_affine(weight_ptr, bias_ptr, n * width + d, is_column, HAS_WEIGHT, HAS_BIAS)
    start = tl.program_id(0).to(tl.int64) * steps * BLOCK_B
    rows = (start + tl.arange(0, BLOCK_B))[:, None, None]
    for step in range(steps):
        b = rows + step * BLOCK_B
        inside = (b < batch) & is_column
        x = tl.load(
            x_ptr + b * stride_b + n * stride_n + d.to(tl.int64) * stride_d, mask=inside, other=0.0
        )
        normal, _ = normalize(wide(x), is_column, width, EPS, CENTERED)
        out = activate(normal * weight + bias, ACTIVATION, out_ptr.dtype.element_ty)
        places = (b * num_slices + n) * width + d
        tl.store(out_ptr + places, narrow(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def batched_norm_bwd_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    grad_x_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    batch,
    num_slices,
    width,
    stride_grad_b,
    stride_grad_n,
    stride_grad_d,
    stride_b,
    stride_n,
    stride_d,
    steps,
    EPS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SUM: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)[None, None, :]
    n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None].to(tl.int64)
    is_column = (n < num_slices) & (d < width)
    weight, bias = load_affine(weight_ptr, bias_ptr, n * width + d, is_column, HAS_WEIGHT, HAS_BIAS)
    start = tl.program_id(0).to(tl.int64) * steps * BLOCK_B
    rows = (start + tl.arange(0, BLOCK_B))[:, None, None]
    sum_weight = tl.zeros((BLOCK_B, BLOCK_N, BLOCK_D), SUM)
    sum_bias = tl.zeros((BLOCK_B, BLOCK_N, BLOCK_D), SUM)
    for step in range(steps):
        b = rows + step * BLOCK_B
        inside = (b < batch) & is_column
        wide_d = d.to(tl.int64)
        x = tl.load(x_ptr + b * stride_b + n * stride_n + wide_d * stride_d, mask=inside, other=0.0)
        grad_places = b * stride_grad_b + n * stride_grad_n + wide_d * stride_grad_d
        grad = wide(tl.load(grad_ptr + grad_places, mask=inside, other=0.0))
        normal, scale = normalize(wide(x), is_column, width, EPS, CENTERED)
        normal = tl.where(inside, normal, 0.0)  # a row that is not there, with eps 0, has none
        grad_z = tl.where(inside, grad * slope(normal * weight + bias, ACTIVATION), 0.0)
        grad_normal = grad_z * weight
        inner = grad_normal - normal * (tl.sum(grad_normal * normal, 2, keep_dims=True) / width)
        if CENTERED:
            inner -= tl.sum(grad_normal, 2, keep_dims=True) / width
        places = (b * num_slices + n) * width + d
        grad_x = narrow(inner * scale, grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + places, grad_x, mask=inside)
        if HAS_WEIGHT:
            sum_weight += grad_z * normal
        if HAS_BIAS:
            sum_bias += grad_z
    places = (tl.program_id(0).to(tl.int64) * num_slices + n) * width + d
    if HAS_WEIGHT:
        total = tl.sum(sum_weight, 0, keep_dims=True)
        tl.store(partial_weight_ptr + places, total, mask=is_column)
    if HAS_BIAS:
        total = tl.sum(sum_bias, 0, keep_dims=True)
        tl.store(partial_bias_ptr + places, total, mask=is_column)
