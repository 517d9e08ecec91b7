"""Gradients of the weights and biases of fused_mlp; shapes and constants as in triton.py.

1. One kernel for all layers: a program takes a tile of one weight's gradient, a product over a
   share of the rows. A library would take a launch or two for each.
2. One sums the shares, in their order: no atomics, the same bits each time for the same tile shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activations import FROM_SUM
from kernels.fused_mlp.triton import choose_and_run, load_rows
from kernels.launch import launch
from kernels.tiles import activate, narrow, operand, wide, wide_type
from kernels.tuning import Tile, num_programs, tile

TILES = (
    tile(BLOCK_M=64, BLOCK_O=64, BLOCK_I=64, num_warps=4, num_stages=2),
    tile(BLOCK_M=64, BLOCK_O=64, BLOCK_I=128, num_warps=4, num_stages=2),
    tile(BLOCK_M=64, BLOCK_O=64, BLOCK_I=128, num_warps=4, num_stages=3),
    tile(BLOCK_M=64, BLOCK_O=128, BLOCK_I=128, num_warps=4, num_stages=3),
)
NUM_PROGRAMS = 264  # of the weights' gradients, about: two for each processor of a large GPU
BLOCK = 256  # numbers that a program sums over the shares


def of_parameters(
    x: Tensor,
    kept: Tensor,
    before: Tensor,
    top: Tensor,
    weights: Sequence[Tensor],
    has_bias: bool,
    shared: dict[str, Any],
) -> list[Tensor]:
    """Gradients of all weights and of all biases."""
    grads = [torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in weights]
    grads += [torch.empty(w.shape[:2], dtype=w.dtype, device=w.device) for w in weights if has_bias]
    towers, batch, _ = x.shape
    numbers = [g[0].numel() for g in grads]
    partial = x.new_empty(0)

    def run(choice: Tile) -> None:
        nonlocal partial
        sizes = choice.sizes
        tiles = sum(
            triton.cdiv(w.shape[1], sizes["BLOCK_O"]) * triton.cdiv(w.shape[2], sizes["BLOCK_I"])
            for w in weights
        )
        blocks = triton.cdiv(batch, sizes["BLOCK_M"])
        steps = triton.cdiv(blocks, num_programs(NUM_PROGRAMS // (tiles * towers)))
        shares = triton.cdiv(blocks, steps)
        partial = torch.empty(
            shares, towers, sum(numbers), dtype=wide_type(x.dtype), device=x.device
        )
        launch(
            fused_mlp_weights_kernel,
            (tiles, shares, towers),
            x,
            kept,
            before,
            top,
            partial,
            batch,
            steps,
            *x.stride(),
            *top.stride(),
            HAS_BIAS=has_bias,
            FROM_SUM=shared["ACTIVATION"] in FROM_SUM,
            KEPT=kept.shape[2],
            BEFORE=before.shape[2],
            TOTAL=sum(numbers),
            **shared,
            **choice.options(),
        )

    choose_and_run("fused_mlp_weights", x, weights, TILES, run)
    sum_shares(partial, grads)
    return grads


def sum_shares(partial: Tensor, outs: Sequence[Tensor]) -> None:
    """Sum (shares, T, numbers) over the shares into tensors (T, ...), one behind the other."""
    shares, towers, total = partial.shape
    numbers = [out[0].numel() for out in outs]
    ends = [*accumulate(numbers)]
    ends += [total] * (8 - len(ends))
    outs = [*outs, *[partial] * (8 - len(outs))]
    launch(
        sum_shares_kernel,
        (triton.cdiv(total, BLOCK), towers),
        partial,
        *outs,
        shares,
        TOTAL=total,
        **{f"E{i + 1}": end for i, end in enumerate(ends)},
        BLOCK=BLOCK,
    )


@triton.jit
def fused_mlp_weights_kernel(
    x_ptr,
    kept_ptr,
    before_ptr,
    top_ptr,
    partial_ptr,
    num_rows,
    steps,
    stride_x_t,
    stride_x_m,
    stride_x_k,
    stride_top_t,
    stride_top_m,
    stride_top_k,
    HAS_BIAS: tl.constexpr,
    FROM_SUM: tl.constexpr,
    KEPT: tl.constexpr,
    BEFORE: tl.constexpr,
    TOTAL: tl.constexpr,
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
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    pid = tl.program_id(0)
    share, tower = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    x, kept = x_ptr + tower * stride_x_t, kept_ptr + tower * num_rows * KEPT
    before, top = before_ptr + tower * num_rows * BEFORE, top_ptr + tower * stride_top_t
    partial = partial_ptr + (share * tl.num_programs(2) + tower) * TOTAL
    recomputed: tl.constexpr = ACTIVATION if FROM_SUM else "none"

    # Where the weights and biases of each layer begin in `partial`, and its first tile.
    w2: tl.constexpr = S1 * S0
    w3: tl.constexpr = w2 + S2 * S1
    w4: tl.constexpr = w3 + (S3 * S2 if LAYERS > 2 else 0)
    b1: tl.constexpr = w4 + (S4 * S3 if LAYERS > 3 else 0)
    t2: tl.constexpr = num_tiles(S1, S0, BLOCK_O, BLOCK_I)
    t3: tl.constexpr = t2 + num_tiles(S2, S1, BLOCK_O, BLOCK_I)
    t4: tl.constexpr = t3 + num_tiles(S3, S2, BLOCK_O, BLOCK_I)
    # The gradients before the last activation are apart from the others.
    g2, m2, k2 = (top, stride_top_m, stride_top_k) if LAYERS == 2 else (before + C2, BEFORE, 1)
    g3, m3, k3 = (top, stride_top_m, stride_top_k) if LAYERS == 3 else (before + C3, BEFORE, 1)
    if pid < t2:
        weight_gradient(
            before,
            BEFORE,
            1,
            x,
            stride_x_m,
            stride_x_k,
            partial,
            partial + b1,
            pid,
            share,
            steps,
            num_rows,
            S0,
            S1,
            P0,
            P1,
            "none",
            HAS_BIAS,
            PRECISION,
            SUM,
            BLOCK_M,
            BLOCK_O,
            BLOCK_I,
        )
    elif pid < t3:
        weight_gradient(
            g2,
            m2,
            k2,
            kept,
            KEPT,
            1,
            partial + w2,
            partial + b1 + S1,
            pid - t2,
            share,
            steps,
            num_rows,
            S1,
            S2,
            P1,
            P2,
            recomputed,
            HAS_BIAS,
            PRECISION,
            SUM,
            BLOCK_M,
            BLOCK_O,
            BLOCK_I,
        )
    elif LAYERS > 2:
        if pid < t4:
            weight_gradient(
                g3,
                m3,
                k3,
                kept + C2,
                KEPT,
                1,
                partial + w3,
                partial + b1 + S1 + S2,
                pid - t3,
                share,
                steps,
                num_rows,
                S2,
                S3,
                P2,
                P3,
                recomputed,
                HAS_BIAS,
                PRECISION,
                SUM,
                BLOCK_M,
                BLOCK_O,
                BLOCK_I,
            )
        elif LAYERS > 3:
            weight_gradient(
                top,
                stride_top_m,
                stride_top_k,
                kept + C3,
                KEPT,
                1,
                partial + w4,
                partial + b1 + S1 + S2 + S3,
                pid - t4,
                share,
                steps,
                num_rows,
                S3,
                S4,
                P3,
                P4,
                recomputed,
                HAS_BIAS,
                PRECISION,
                SUM,
                BLOCK_M,
                BLOCK_O,
                BLOCK_I,
            )


@triton.constexpr_function
def num_tiles(outs, ins, BLOCK_O, BLOCK_I):
    """How many tiles cover a weight (outs, ins)."""
    return -(-outs // BLOCK_O) * -(-ins // BLOCK_I)


@triton.jit
def weight_gradient(
    before_ptr,
    stride_before_m,
    stride_before_k,
    h_ptr,
    stride_h_m,
    stride_h_k,
    weight_ptr,
    bias_ptr,
    tile,
    share,
    steps,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    P_IN: tl.constexpr,
    P_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """A tile of a layer's weight gradient over a share of the rows, and of its bias's."""
    tiles_in: tl.constexpr = num_tiles(1, IN, BLOCK_O, BLOCK_I)
    block_o: tl.constexpr = min(BLOCK_O, P_OUT)
    block_i: tl.constexpr = min(BLOCK_I, P_IN)
    outs = tile // tiles_in * BLOCK_O + tl.arange(0, block_o)
    ins = tile % tiles_in * BLOCK_I + tl.arange(0, block_i)
    total = tl.zeros((block_o, block_i), SUM)
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    # A sum over rows as a product with ones stays on the tensor cores.
    ones = narrow(tl.full((BLOCK_M, 16), 1.0, SUM), before_ptr.dtype.element_ty)
    bias = tl.zeros((block_o, 16), SUM)
    for step in range(steps):
        rows = (share * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        g = load_rows(before_ptr, rows, outs, num_rows, stride_before_m, stride_before_k, OUT)
        h = load_rows(h_ptr, rows, ins, num_rows, stride_h_m, stride_h_k, IN)
        if ACTIVATION != "none":
            h = narrow(activate(wide(h), ACTIVATION, dtype), dtype)
        g = operand(g).T
        total = tl.dot(g, operand(h), total, PRECISION, out_dtype=SUM)
        if HAS_BIAS:
            bias = tl.dot(g, operand(ones), bias, "ieee", out_dtype=SUM)
    mask = (outs[:, None] < OUT) & (ins[None, :] < IN)
    tl.store(weight_ptr + outs[:, None] * IN + ins[None, :], total, mask=mask)
    if HAS_BIAS:
        column = tl.arange(0, 16)[None, :]
        mask = (outs[:, None] < OUT) & (column == 0) & (tile % tiles_in == 0)
        tl.store(bias_ptr + outs[:, None] + column, bias, mask=mask)


@triton.jit
def sum_shares_kernel(
    partial_ptr,
    out_1,
    out_2,
    out_3,
    out_4,
    out_5,
    out_6,
    out_7,
    out_8,
    shares,
    TOTAL: tl.constexpr,
    E1: tl.constexpr,
    E2: tl.constexpr,
    E3: tl.constexpr,
    E4: tl.constexpr,
    E5: tl.constexpr,
    E6: tl.constexpr,
    E7: tl.constexpr,
    E8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tower = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), partial_ptr.dtype.element_ty)
    for start in range(0, shares, 8):
        share = (start + tl.arange(0, 8)).to(tl.int64)[:, None]
        places = partial_ptr + (share * tl.num_programs(1) + tower) * TOTAL + at[None, :]
        part = tl.load(places, mask=(share < shares) & (at < TOTAL)[None, :], other=0.0)
        total += tl.sum(part, 0)
    store_part(out_1, total, at, tower, 0, E1)
    store_part(out_2, total, at, tower, E1, E2)
    store_part(out_3, total, at, tower, E2, E3)
    store_part(out_4, total, at, tower, E3, E4)
    store_part(out_5, total, at, tower, E4, E5)
    store_part(out_6, total, at, tower, E5, E6)
    store_part(out_7, total, at, tower, E6, E7)
    store_part(out_8, total, at, tower, E7, E8)


@triton.jit
def store_part(out_ptr, total, at, tower, START: tl.constexpr, END: tl.constexpr):
    """Write those of the sums that belong to one result (T, END - START)."""
    if END > START:
        places = out_ptr + tower * (END - START) + at - START
        mask = (at >= START) & (at < END)
        tl.store(places, narrow(total, out_ptr.dtype.element_ty), mask=mask)
