"""Kernels of fused_mlp.

Shapes: x (T, B, S0), weights l = 1..L (T, Sl, Sl-1), biases (T, Sl), result (T, B, SL), L = 2..4.

1. A program takes BLOCK_M rows through the whole network: nothing between the layers leaves the SM.
2. The first hidden layer is made CHUNK columns at a time and multiplied into the second at once, so
   that the widest layer is never held as a whole. Layers from the second on are held in registers;
   their weights are read as one tile each, which bounds their sizes (sizes.py).
3. Widths are constants of the kernel and padded to powers of two: 13 inputs take a tile of 16, one
   output a tile of 16 of which one column is written.
4. Hidden layers are rounded to the storage type behind the activation, as PyTorch does it, but not
   between product, bias and activation.
5. Weights are the first factor of each product and lie in shared memory as hidden layers do. With
   hidden layers as the first, in registers, the assembler (12.8) gets addresses of some products
   of 64 rows wrong: reads beyond shared memory (compute-sanitizer), wrong results for some widths.
6. For training each layer with an activation is written as well, its result or the sum in front
   (kernels.activations.FROM_SUM), side by side (columns.py). To compute them again in backward
   took longer than all else there, since the tiles had to be smaller.
The backward kernels are in triton_backward.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activations import FROM_SUM
from kernels.fused_mlp.columns import active_widths, starts
from kernels.fused_mlp.sizes import block
from kernels.launch import launch, on_device
from kernels.matmul import number_types
from kernels.tiles import activate, narrow, operand, wide
from kernels.tuning import Tile, choose, tile

TILES = (  # the first fits a Hopper GPU for every network that sizes.py lets in
    tile(BLOCK_M=32, CHUNK=32, num_warps=4, num_stages=2),
    tile(BLOCK_M=64, CHUNK=64, num_warps=4, num_stages=2),
    tile(BLOCK_M=64, CHUNK=64, num_warps=4, num_stages=3),
    tile(BLOCK_M=64, CHUNK=128, num_warps=4, num_stages=2),
    tile(BLOCK_M=64, CHUNK=128, num_warps=8, num_stages=2),
    tile(BLOCK_M=128, CHUNK=128, num_warps=8, num_stages=2),
)


def forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    last: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """The result (T, B, SL), fresh and contiguous, and with `save` what backward needs (else
    empty). Weights and biases must be contiguous."""
    towers, batch, _ = x.shape
    widths = [w.shape[1] for w in weights]
    out = torch.empty(towers, batch, widths[-1], dtype=x.dtype, device=x.device)
    width = starts(active_widths(weights, last))[-1] if save else 0
    kept = x.new_empty(towers, batch, width) if save else x.new_empty(0)

    def run(choice: Tile) -> None:
        launch(
            fused_mlp_fwd_kernel,
            grid_of(x, choice),
            x,
            *four(weights, x),
            *four(biases, x),
            out,
            kept,
            batch,
            *x.stride(),
            HAS_BIAS=len(biases) > 0,
            SAVE=save,
            KEEP_SUM=activation in FROM_SUM,
            KEPT=width,
            **constants(x, weights, activation, last),
            **choice.options(),
        )

    choose_and_run("fused_mlp_fwd", x, weights, TILES, run)
    return out, kept


def grid_of(x: Tensor, choice: Tile) -> tuple[int, int]:
    """Blocks of rows, and towers."""
    return (triton.cdiv(x.shape[1], choice.sizes["BLOCK_M"]), x.shape[0])


def four(tensors: Sequence[Tensor], filler: Tensor) -> tuple[Tensor, ...]:
    """As many as a kernel takes; those that are not there are never read."""
    return (*tensors, *[filler] * (4 - len(tensors)))


def constants(x: Tensor, weights: Sequence[Tensor], activation: str, last: bool) -> dict[str, Any]:
    """Constants that the kernels share: widths S, padded widths P, first columns C of layers."""
    sizes = [x.shape[2], *(w.shape[1] for w in weights)]
    sizes += [1] * (5 - len(sizes))
    return {
        "LAYERS": len(weights),
        "ACTIVATION": activation,
        "HAS_LAST": last,
        "LAST": activation if last else "none",
        **{f"S{i}": size for i, size in enumerate(sizes)},
        **{f"P{i}": block(size) for i, size in enumerate(sizes)},
        **{f"C{i + 1}": start for i, start in enumerate(starts(sizes[1:])[:4])},
        **number_types(x.dtype),
    }


def choose_and_run(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    tiles: Sequence[Tile],
    run: Callable[[Tile], None],
) -> None:
    """Launch with the best of `tiles` for these sizes."""
    sizes = (*x.shape, *(w.shape[1] for w in weights))  # saving or not, the best tile is the same
    with on_device(x):
        run(choose(op, sizes, x.dtype, tiles, run))


@triton.jit
def weight_tile(
    weight_ptr, outs, ins, NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """A tile (outs, ins) of a contiguous weight (NUM_OUT, NUM_IN), or (ins, outs) if TRANSPOSED."""
    if TRANSPOSED:
        rows, columns = outs[None, :], ins[:, None]
    else:
        rows, columns = outs[:, None], ins[None, :]
    mask = (rows < NUM_OUT) & (columns < NUM_IN)
    return operand(tl.load(weight_ptr + rows * NUM_IN + columns, mask=mask, other=0.0))


@triton.jit
def add_bias(total, bias_ptr, columns, SIZE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """`total` with the bias of its columns."""
    if HAS_BIAS:
        total += wide(tl.load(bias_ptr + columns, mask=columns < SIZE, other=0.0))[None, :]
    return total


@triton.jit
def layer(
    h,
    weight_ptr,
    bias_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    P_IN: tl.constexpr,
    P_OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
):
    """A layer whose weight is one tile, up to its activation."""
    outs = tl.arange(0, P_OUT)
    weight = weight_tile(weight_ptr, outs, tl.arange(0, P_IN), OUT, IN, False)
    z = tl.dot(weight, h.T, input_precision=PRECISION, out_dtype=SUM)
    return add_bias(z.T, bias_ptr, outs, OUT, HAS_BIAS)


@triton.jit
def load_rows(ptr, rows, columns, num_rows, stride_m, stride_k, SIZE: tl.constexpr):
    """Some rows of a matrix of SIZE columns, zero outside."""
    mask = (rows[:, None] < num_rows) & (columns[None, :] < SIZE)
    places = ptr + rows[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def store_columns(
    ptr,
    value,
    rows,
    columns,
    num_rows,
    SIZE: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write a tile of the SIZE columns that begin at column START of (num_rows, WIDTH)."""
    mask = (rows[:, None] < num_rows) & (columns[None, :] < SIZE)
    places = ptr + rows[:, None] * WIDTH + (START + columns)[None, :]
    tl.store(places, narrow(value, ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish(
    z,
    kept_ptr,
    rows,
    columns,
    num_rows,
    SIZE: tl.constexpr,
    START: tl.constexpr,
    KEPT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SAVE: tl.constexpr,
    KEEP_SUM: tl.constexpr,
):
    """A layer from its sum, in the storage type; with SAVE what backward needs of it is written."""
    dtype: tl.constexpr = kept_ptr.dtype.element_ty
    h = narrow(activate(z, ACTIVATION, dtype), dtype)
    if SAVE:
        what = z if KEEP_SUM else wide(h)
        store_columns(kept_ptr, what, rows, columns, num_rows, SIZE, START, KEPT)
    return h


@triton.jit
def fused_mlp_fwd_kernel(
    x_ptr,
    weight_1,
    weight_2,
    weight_3,
    weight_4,
    bias_1,
    bias_2,
    bias_3,
    bias_4,
    out_ptr,
    kept_ptr,
    num_rows,
    stride_x_t,
    stride_x_m,
    stride_x_k,
    HAS_BIAS: tl.constexpr,
    SAVE: tl.constexpr,
    KEEP_SUM: tl.constexpr,
    KEPT: tl.constexpr,
    LAYERS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LAST: tl.constexpr,
    LAST: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    S3: tl.constexpr,
    S4: tl.constexpr,
    P0: tl.constexpr,
    P1: tl.constexpr,
    P2: tl.constexpr,
    P3: tl.constexpr,
    P4: tl.constexpr,
    C1: tl.constexpr,
    C2: tl.constexpr,
    C3: tl.constexpr,
    C4: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tower = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_tower, ins = x_ptr + tower * stride_x_t, tl.arange(0, P0)
    x = operand(load_rows(x_tower, rows, ins, num_rows, stride_x_m, stride_x_k, S0))
    kept = kept_ptr + tower * num_rows * KEPT
    w1, b1 = weight_1 + tower * S1 * S0, bias_1 + tower * S1
    w2, b2 = weight_2 + tower * S2 * S1, bias_2 + tower * S2

    KEEP_LAST: tl.constexpr = SAVE and HAS_LAST

    # The first two layers.
    outs = tl.arange(0, P2)
    total = tl.zeros((P2, BLOCK_M), SUM)
    for start in range(0, S1, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        weight = weight_tile(w1, chunk, ins, S1, S0, False)
        z = tl.dot(weight, x.T, input_precision=PRECISION, out_dtype=SUM)
        z = add_bias(z.T, b1, chunk, S1, HAS_BIAS)
        h = finish(z, kept, rows, chunk, num_rows, S1, C1, KEPT, ACTIVATION, SAVE, KEEP_SUM)
        weight = weight_tile(w2, outs, chunk, S2, S1, False)
        total = tl.dot(weight, operand(h).T, total, PRECISION, out_dtype=SUM)
    z = add_bias(total.T, b2, outs, S2, HAS_BIAS)

    if LAYERS == 2:
        h = finish(z, kept, rows, outs, num_rows, S2, C2, KEPT, LAST, KEEP_LAST, KEEP_SUM)
        out = out_ptr + tower * num_rows * S2
        store_columns(out, wide(h), rows, outs, num_rows, S2, 0, S2)
    else:
        h = finish(z, kept, rows, outs, num_rows, S2, C2, KEPT, ACTIVATION, SAVE, KEEP_SUM)
        w3, b3 = weight_3 + tower * S3 * S2, bias_3 + tower * S3
        z = layer(operand(h), w3, b3, S2, S3, P2, P3, HAS_BIAS, PRECISION, SUM)
        outs3 = tl.arange(0, P3)
        if LAYERS == 3:
            h = finish(
                z, kept, rows, outs3, num_rows, S3, C3, KEPT, LAST, SAVE and HAS_LAST, KEEP_SUM
            )
            store_columns(
                out_ptr + tower * num_rows * S3, wide(h), rows, outs3, num_rows, S3, 0, S3
            )
        else:
            h = finish(z, kept, rows, outs3, num_rows, S3, C3, KEPT, ACTIVATION, SAVE, KEEP_SUM)
            w4, b4 = weight_4 + tower * S4 * S3, bias_4 + tower * S4
            z = layer(operand(h), w4, b4, S3, S4, P3, P4, HAS_BIAS, PRECISION, SUM)
            outs4 = tl.arange(0, P4)
            h = finish(
                z, kept, rows, outs4, num_rows, S4, C4, KEPT, LAST, SAVE and HAS_LAST, KEEP_SUM
            )
            store_columns(
                out_ptr + tower * num_rows * S4, wide(h), rows, outs4, num_rows, S4, 0, S4
            )
