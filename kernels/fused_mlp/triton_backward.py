"""Backward of fused_mlp; shapes and constants as in triton.py.

1. One kernel walks back through the layers in registers, from what forward kept, and writes the
   gradients before each activation, side by side (columns.py), and that of x.
2. The gradients of weights and biases are taken from these (triton_weights.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fused_mlp.columns import active_widths, columns, starts
from kernels.fused_mlp.triton import (
    choose_and_run,
    constants,
    four,
    grid_of,
    load_rows,
    store_columns,
    weight_tile,
)
from kernels.fused_mlp.triton_weights import of_parameters
from kernels.launch import launch
from kernels.tiles import narrow, operand, slope_at, wide
from kernels.tuning import Tile, tile

TILES = (  # the first fits a Hopper GPU for every network that sizes.py lets in
    tile(BLOCK_M=32, CHUNK=32, num_warps=4, num_stages=2),
    tile(BLOCK_M=64, CHUNK=64, num_warps=4, num_stages=3),
    tile(BLOCK_M=64, CHUNK=64, num_warps=8, num_stages=2),
    tile(BLOCK_M=64, CHUNK=128, num_warps=8, num_stages=2),
    tile(BLOCK_M=128, CHUNK=64, num_warps=8, num_stages=3),
)


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    kept: Tensor,
    has_bias: bool,
    activation: str,
    last: bool,
    needs_x: bool,
) -> list[Tensor]:
    """Gradients of x (empty without `needs_x`), of all weights and of all biases, in this order."""
    towers, batch, _ = x.shape
    widths = [w.shape[1] for w in weights]
    before = x.new_empty(towers, batch, starts(active_widths(weights, last))[-1])
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs_x else x.new_empty(0)
    shared = constants(x, weights, activation, last)

    def run(choice: Tile) -> None:
        launch(
            fused_mlp_bwd_kernel,
            grid_of(x, choice),
            grad,
            kept,
            *four(weights, x),
            before,
            grad_x,
            batch,
            *grad.stride(),
            NEEDS_X=needs_x,
            KEPT=kept.shape[2],
            BEFORE=before.shape[2],
            **shared,
            **choice.options(),
        )

    choose_and_run("fused_mlp_bwd", x, weights, TILES, run)
    top = columns(before, widths, len(widths) - 1) if last else grad
    return [grad_x, *of_parameters(x, kept, before, top, weights, has_bias, shared)]


@triton.jit
def fused_mlp_bwd_kernel(
    grad_ptr,
    kept_ptr,
    weight_1,
    weight_2,
    weight_3,
    weight_4,
    before_ptr,
    grad_x_ptr,
    num_rows,
    stride_grad_t,
    stride_grad_m,
    stride_grad_k,
    NEEDS_X: tl.constexpr,
    KEPT: tl.constexpr,
    BEFORE: tl.constexpr,
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
    kept, before = kept_ptr + tower * num_rows * KEPT, before_ptr + tower * num_rows * BEFORE
    w1, w2 = weight_1 + tower * S1 * S0, weight_2 + tower * S2 * S1
    w3, w4 = weight_3 + tower * S3 * S2, weight_4 + tower * S4 * S3
    outs = tl.arange(0, P2)

    # From the result back to the second layer.
    top: tl.constexpr = S2 if LAYERS == 2 else (S3 if LAYERS == 3 else S4)
    top_block: tl.constexpr = P2 if LAYERS == 2 else (P3 if LAYERS == 3 else P4)
    top_start: tl.constexpr = C2 if LAYERS == 2 else (C3 if LAYERS == 3 else C4)
    at = tl.arange(0, top_block)
    grad_tower = grad_ptr + tower * stride_grad_t
    back = wide(load_rows(grad_tower, rows, at, num_rows, stride_grad_m, stride_grad_k, top))
    if HAS_LAST:
        back *= slope_of(kept, rows, at, num_rows, top, top_start, KEPT, LAST)
        store_columns(before, back, rows, at, num_rows, top, top_start, BEFORE)
    dtype: tl.constexpr = before_ptr.dtype.element_ty
    g = operand(narrow(back, dtype))
    if LAYERS == 4:
        at = tl.arange(0, P3)
        back = step_back(
            g,
            w4,
            tl.arange(0, P4),
            S4,
            kept,
            before,
            rows,
            at,
            num_rows,
            S3,
            C3,
            KEPT,
            BEFORE,
            ACTIVATION,
            PRECISION,
            SUM,
        )
        g = operand(narrow(back, dtype))
    if LAYERS >= 3:
        back = step_back(
            g,
            w3,
            tl.arange(0, P3),
            S3,
            kept,
            before,
            rows,
            outs,
            num_rows,
            S2,
            C2,
            KEPT,
            BEFORE,
            ACTIVATION,
            PRECISION,
            SUM,
        )
        g = operand(narrow(back, dtype))

    # The first layer by chunks, each multiplied on to x at once.
    ins = tl.arange(0, P0)
    grad_x = tl.zeros((P0, BLOCK_M), SUM)
    for start in range(0, S1, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        of_chunk = step_back(
            g,
            w2,
            outs,
            S2,
            kept,
            before,
            rows,
            chunk,
            num_rows,
            S1,
            C1,
            KEPT,
            BEFORE,
            ACTIVATION,
            PRECISION,
            SUM,
        )
        if NEEDS_X:
            weight = weight_tile(w1, chunk, ins, S1, S0, True)
            of_chunk = operand(narrow(of_chunk, dtype)).T
            grad_x = tl.dot(weight, of_chunk, grad_x, PRECISION, out_dtype=SUM)
    if NEEDS_X:
        grad_x_tower = grad_x_ptr + tower * num_rows * S0
        store_columns(grad_x_tower, grad_x.T, rows, ins, num_rows, S0, 0, S0)


@triton.jit
def step_back(
    g,
    weight_ptr,
    outs,
    OUT: tl.constexpr,
    kept_ptr,
    before_ptr,
    rows,
    columns,
    num_rows,
    SIZE: tl.constexpr,
    START: tl.constexpr,
    KEPT: tl.constexpr,
    BEFORE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
):
    """From the gradient `g` behind a weight to that before the activation in front, written too."""
    weight = weight_tile(weight_ptr, outs, columns, OUT, SIZE, True)
    back = tl.dot(weight, g.T, input_precision=PRECISION, out_dtype=SUM).T
    back *= slope_of(kept_ptr, rows, columns, num_rows, SIZE, START, KEPT, ACTIVATION)
    store_columns(before_ptr, back, rows, columns, num_rows, SIZE, START, BEFORE)
    return back


@triton.jit
def slope_of(
    kept_ptr,
    rows,
    columns,
    num_rows,
    SIZE: tl.constexpr,
    START: tl.constexpr,
    KEPT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """The derivative of a layer's activation, from what forward kept of the layer."""
    kept = load_rows(kept_ptr + START, rows, columns, num_rows, KEPT, 1, SIZE)
    return slope_at(wide(kept), ACTIVATION)
