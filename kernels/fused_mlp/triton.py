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
The backward kernel is in triton_backward.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fused_mlp.sizes import block
from kernels.launch import launch, on_device
from kernels.matmul import number_types
from kernels.tiles import activate, narrow, operand, wide
from kernels.tuning import Tile, choose, tile

# The first of each fits a Hopper GPU for every network that sizes.py lets in. As Triton 3.6 builds
# them, kernels of 64 rows read beyond their shared memory (compute-sanitizer): forward with chunks
# of 32, backward with any; some of these gave wrong gradients instead. Backward is left with 32
# rows, for which the compiler uses other instructions.
FORWARD_TILES = (
    tile(BLOCK_M=32, CHUNK=32, num_warps=4, num_stages=2),
    tile(BLOCK_M=64, CHUNK=64, num_warps=4, num_stages=2),
    tile(BLOCK_M=128, CHUNK=64, num_warps=8, num_stages=2),
    tile(BLOCK_M=128, CHUNK=32, num_warps=8, num_stages=3),
)
BACKWARD_TILES = (
    tile(BLOCK_M=32, CHUNK=32, num_warps=4, num_stages=1),
    tile(BLOCK_M=32, CHUNK=64, num_warps=8, num_stages=2),
)


def forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str, last: bool
) -> Tensor:
    """The result (T, B, SL), fresh and contiguous. Weights and biases must be contiguous."""
    towers, batch, _ = x.shape
    out = torch.empty(towers, batch, weights[-1].shape[1], dtype=x.dtype, device=x.device)

    def run(choice: Tile) -> None:
        launch(
            fused_mlp_fwd_kernel,
            grid_of(x, choice),
            x,
            *four(weights, x),
            *four(biases, x),
            out,
            batch,
            *x.stride(),
            **constants(x, weights, biases, activation, last),
            **choice.options(),
        )

    choose_and_run("fused_mlp_fwd", x, weights, FORWARD_TILES, run)
    return out


def grid_of(x: Tensor, choice: Tile) -> tuple[int, int]:
    """Blocks of rows, and towers."""
    return (triton.cdiv(x.shape[1], choice.sizes["BLOCK_M"]), x.shape[0])


def four(tensors: Sequence[Tensor], filler: Tensor) -> tuple[Tensor, ...]:
    """As many as a kernel takes; those that are not there are never read."""
    return (*tensors, *[filler] * (4 - len(tensors)))


def constants(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str, last: bool
) -> dict[str, Any]:
    """Constants that both kernels have."""
    sizes = [x.shape[2], *(w.shape[1] for w in weights)]
    sizes += [1] * (5 - len(sizes))
    return {
        "LAYERS": len(weights),
        "HAS_BIAS": len(biases) > 0,
        "ACTIVATION": activation,
        "LAST": activation if last else "none",
        **{f"S{i}": size for i, size in enumerate(sizes)},
        **{f"P{i}": block(size) for i, size in enumerate(sizes)},
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
    sizes = (*x.shape, *(w.shape[1] for w in weights))
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
    weight = weight_tile(weight_ptr, outs, tl.arange(0, P_IN), OUT, IN, True)
    z = tl.dot(h, weight, input_precision=PRECISION, out_dtype=SUM)
    return add_bias(z, bias_ptr, outs, OUT, HAS_BIAS)


@triton.jit
def first_chunk(
    x,
    weight_ptr,
    bias_ptr,
    columns,
    S0: tl.constexpr,
    S1: tl.constexpr,
    P0: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
):
    """Some columns of the first layer, up to its activation."""
    weight = weight_tile(weight_ptr, columns, tl.arange(0, P0), S1, S0, True)
    z = tl.dot(x, weight, input_precision=PRECISION, out_dtype=SUM)
    return add_bias(z, bias_ptr, columns, S1, HAS_BIAS)


@triton.jit
def store_rows(ptr, value, rows, columns, num_rows, SIZE: tl.constexpr):
    """Write a tile of a contiguous (num_rows, SIZE)."""
    mask = (rows[:, None] < num_rows) & (columns[None, :] < SIZE)
    places = ptr + rows[:, None] * SIZE + columns[None, :]
    tl.store(places, narrow(value, ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(ptr, rows, columns, num_rows, stride_m, stride_k, SIZE: tl.constexpr):
    """Some rows of a matrix of SIZE columns, zero outside."""
    mask = (rows[:, None] < num_rows) & (columns[None, :] < SIZE)
    places = ptr + rows[:, None] * stride_m + columns.to(tl.int64)[None, :] * stride_k
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def two_layers(
    x,
    w1,
    b1,
    w2,
    b2,
    hidden_ptr,
    rows,
    num_rows,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    P0: tl.constexpr,
    P2: tl.constexpr,
    KEEP: tl.constexpr,
    DTYPE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first two layers up to the second's activation; KEEP: the first is written to memory."""
    outs = tl.arange(0, P2)
    z = tl.zeros((x.shape[0], P2), SUM)
    for start in range(0, S1, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        h = first_chunk(x, w1, b1, columns, S0, S1, P0, HAS_BIAS, PRECISION, SUM)
        h = narrow(activate(h, ACTIVATION), DTYPE)
        if KEEP:
            store_rows(hidden_ptr, wide(h), rows, columns, num_rows, S1)
        weight = weight_tile(w2, outs, columns, S2, S1, True)
        z = tl.dot(operand(h), weight, z, PRECISION, out_dtype=SUM)
    return add_bias(z, b2, outs, S2, HAS_BIAS)


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
    num_rows,
    stride_x_t,
    stride_x_m,
    stride_x_k,
    LAYERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tower = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_tower, ins = x_ptr + tower * stride_x_t, tl.arange(0, P0)
    x = operand(load_rows(x_tower, rows, ins, num_rows, stride_x_m, stride_x_k, S0))
    w1, b1 = weight_1 + tower * S1 * S0, bias_1 + tower * S1
    w2, b2 = weight_2 + tower * S2 * S1, bias_2 + tower * S2
    z = two_layers(
        x,
        w1,
        b1,
        w2,
        b2,
        out_ptr,
        rows,
        num_rows,
        S0,
        S1,
        S2,
        P0,
        P2,
        False,
        dtype,
        ACTIVATION,
        HAS_BIAS,
        PRECISION,
        SUM,
        CHUNK,
    )
    if LAYERS == 2:
        out = out_ptr + tower * num_rows * S2
        store_rows(out, activate(z, LAST), rows, tl.arange(0, P2), num_rows, S2)
    else:
        h2 = operand(narrow(activate(z, ACTIVATION), dtype))
        w3, b3 = weight_3 + tower * S3 * S2, bias_3 + tower * S3
        z3 = layer(h2, w3, b3, S2, S3, P2, P3, HAS_BIAS, PRECISION, SUM)
        if LAYERS == 3:
            out = out_ptr + tower * num_rows * S3
            store_rows(out, activate(z3, LAST), rows, tl.arange(0, P3), num_rows, S3)
        else:
            h3 = operand(narrow(activate(z3, ACTIVATION), dtype))
            w4, b4 = weight_4 + tower * S4 * S3, bias_4 + tower * S4
            z4 = layer(h3, w4, b4, S3, S4, P3, P4, HAS_BIAS, PRECISION, SUM)
            out = out_ptr + tower * num_rows * S4
            store_rows(out, activate(z4, LAST), rows, tl.arange(0, P4), num_rows, S4)
