"""Backward of fused_mlp; shapes and constants as in triton.py.

1. It computes the network again (x is all that is saved), walks back in the same registers and
   writes what the weights' gradients need: hidden layers and the gradients before activations.
2. The weights' gradients are products over all rows and left to the BLAS library; the biases' are
   summed in two stages, the rows of a program first. No atomics, the same bits each time for the
   same tile shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fused_mlp.triton import (
    BACKWARD_TILES,
    choose_and_run,
    constants,
    first_chunk,
    four,
    grid_of,
    layer,
    load_rows,
    store_rows,
    two_layers,
    weight_tile,
)
from kernels.launch import launch
from kernels.tiles import activate, narrow, operand, slope, wide
from kernels.tuning import Tile


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    last: bool,
    needs_x: bool,
) -> list[Tensor]:
    """Gradients of x (empty without `needs_x`), of all weights and of all biases, in this order."""
    towers, batch, _ = x.shape

    def rows(width: int) -> Tensor:
        return torch.empty(towers, batch, width, dtype=x.dtype, device=x.device)

    hidden = [rows(w.shape[1]) for w in weights[:-1]]
    grads = [rows(w.shape[1]) for w in weights]
    grad_x = rows(x.shape[2]) if needs_x else x.new_empty(0)
    partial: list[Tensor] = []

    def run(choice: Tile) -> None:
        num_blocks = grid_of(x, choice)[0]
        wide_type = torch.float64 if x.dtype == torch.float64 else torch.float32
        partial[:] = [
            torch.empty(towers, num_blocks, b.shape[1], dtype=wide_type, device=x.device)
            for b in biases
        ]
        launch(
            fused_mlp_bwd_kernel,
            grid_of(x, choice),
            grad,
            x,
            *four(weights, x),
            *four(biases, x),
            *four(hidden, x),
            *four(grads, x),
            *four(partial, x),
            grad_x,
            batch,
            *grad.stride(),
            *x.stride(),
            NEEDS_X=needs_x,
            **constants(x, weights, biases, activation, last),
            **choice.options(),
        )

    choose_and_run("fused_mlp_bwd", x, weights, BACKWARD_TILES, run)
    pairs = zip(grads, [x, *hidden], strict=True)
    grad_weights = [torch.bmm(g.mT, h) for g, h in pairs]
    grad_biases = [p.sum(1).to(b.dtype) for p, b in zip(partial, biases, strict=True)]
    return [grad_x, *grad_weights, *grad_biases]


@triton.jit
def keep_gradient(
    grads_ptr,
    partial_ptr,
    grad,
    rows,
    columns,
    num_rows,
    tower,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write the gradient before an activation, and its sum over the program's rows."""
    store_rows(grads_ptr + tower * num_rows * SIZE, grad, rows, columns, num_rows, SIZE)
    if HAS_BIAS:
        block = tower * tl.num_programs(0) + tl.program_id(0)
        tl.store(partial_ptr + block * SIZE + columns, tl.sum(grad, 0), mask=columns < SIZE)


@triton.jit
def step_back(
    grad,
    z,
    weight_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    P_IN: tl.constexpr,
    P_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
):
    """The gradient before the activation of the layer in front; `z` is that layer's sum."""
    weight = weight_tile(weight_ptr, tl.arange(0, P_OUT), tl.arange(0, P_IN), OUT, IN, False)
    back = tl.dot(grad, weight, input_precision=PRECISION, out_dtype=SUM)
    return back * slope(z, ACTIVATION)


@triton.jit
def first_layer_back(
    grad2,
    x,
    w1,
    b1,
    w2,
    grads_ptr,
    partial_ptr,
    rows,
    num_rows,
    tower,
    NEEDS_X: tl.constexpr,
    S0: tl.constexpr,
    S1: tl.constexpr,
    S2: tl.constexpr,
    P0: tl.constexpr,
    P2: tl.constexpr,
    DTYPE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    SUM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first layer's gradient, written by chunks, and that of x (zero without NEEDS_X)."""
    ins, outs = tl.arange(0, P0), tl.arange(0, P2)
    grad_x = tl.zeros((x.shape[0], P0), SUM)
    for start in range(0, S1, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        z = first_chunk(x, w1, b1, columns, S0, S1, P0, HAS_BIAS, PRECISION, SUM)
        weight = weight_tile(w2, outs, columns, S2, S1, False)
        back = tl.dot(grad2, weight, input_precision=PRECISION, out_dtype=SUM)
        grad = back * slope(z, ACTIVATION)
        keep_gradient(grads_ptr, partial_ptr, grad, rows, columns, num_rows, tower, S1, HAS_BIAS)
        if NEEDS_X:
            weight = weight_tile(w1, columns, ins, S1, S0, False)
            grad = operand(narrow(grad, DTYPE))
            grad_x = tl.dot(grad, weight, grad_x, PRECISION, out_dtype=SUM)
    return grad_x


@triton.jit
def fused_mlp_bwd_kernel(
    grad_ptr,
    x_ptr,
    weight_1,
    weight_2,
    weight_3,
    weight_4,
    bias_1,
    bias_2,
    bias_3,
    bias_4,
    hidden_1,
    hidden_2,
    hidden_3,
    hidden_4,
    grad_of_1,
    grad_of_2,
    grad_of_3,
    grad_of_4,
    partial_1,
    partial_2,
    partial_3,
    partial_4,
    grad_x_ptr,
    num_rows,
    stride_grad_t,
    stride_grad_m,
    stride_grad_k,
    stride_x_t,
    stride_x_m,
    stride_x_k,
    NEEDS_X: tl.constexpr,
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
    ins, outs = tl.arange(0, P0), tl.arange(0, P2)
    x_tower, grad_tower = x_ptr + tower * stride_x_t, grad_ptr + tower * stride_grad_t
    x = operand(load_rows(x_tower, rows, ins, num_rows, stride_x_m, stride_x_k, S0))
    w1, b1 = weight_1 + tower * S1 * S0, bias_1 + tower * S1
    w2, b2 = weight_2 + tower * S2 * S1, bias_2 + tower * S2
    z2 = two_layers(
        x,
        w1,
        b1,
        w2,
        b2,
        hidden_1 + tower * num_rows * S1,
        rows,
        num_rows,
        S0,
        S1,
        S2,
        P0,
        P2,
        True,
        dtype,
        ACTIVATION,
        HAS_BIAS,
        PRECISION,
        SUM,
        CHUNK,
    )

    # Back to the second layer.
    if LAYERS == 2:
        grad = wide(load_rows(grad_tower, rows, outs, num_rows, stride_grad_m, stride_grad_k, S2))
        grad2 = grad * slope(z2, LAST)
    else:
        outs3, outs4 = tl.arange(0, P3), tl.arange(0, P4)
        h2 = activate(z2, ACTIVATION)
        store_rows(hidden_2 + tower * num_rows * S2, h2, rows, outs, num_rows, S2)
        w3, b3 = weight_3 + tower * S3 * S2, bias_3 + tower * S3
        h2 = operand(narrow(h2, dtype))
        z3 = layer(h2, w3, b3, S2, S3, P2, P3, HAS_BIAS, PRECISION, SUM)
        if LAYERS == 3:
            grad = load_rows(grad_tower, rows, outs3, num_rows, stride_grad_m, stride_grad_k, S3)
            grad3 = wide(grad) * slope(z3, LAST)
        else:
            h3 = activate(z3, ACTIVATION)
            store_rows(hidden_3 + tower * num_rows * S3, h3, rows, outs3, num_rows, S3)
            w4, b4 = weight_4 + tower * S4 * S3, bias_4 + tower * S4
            h3 = operand(narrow(h3, dtype))
            z4 = layer(h3, w4, b4, S3, S4, P3, P4, HAS_BIAS, PRECISION, SUM)
            grad = load_rows(grad_tower, rows, outs4, num_rows, stride_grad_m, stride_grad_k, S4)
            grad4 = wide(grad) * slope(z4, LAST)
            keep_gradient(grad_of_4, partial_4, grad4, rows, outs4, num_rows, tower, S4, HAS_BIAS)
            grad4 = operand(narrow(grad4, dtype))
            grad3 = step_back(grad4, z3, w4, S3, S4, P3, P4, ACTIVATION, PRECISION, SUM)
        keep_gradient(grad_of_3, partial_3, grad3, rows, outs3, num_rows, tower, S3, HAS_BIAS)
        grad3 = operand(narrow(grad3, dtype))
        grad2 = step_back(grad3, z2, w3, S2, S3, P2, P3, ACTIVATION, PRECISION, SUM)
    keep_gradient(grad_of_2, partial_2, grad2, rows, outs, num_rows, tower, S2, HAS_BIAS)

    grad_x = first_layer_back(
        operand(narrow(grad2, dtype)),
        x,
        w1,
        b1,
        w2,
        grad_of_1,
        partial_1,
        rows,
        num_rows,
        tower,
        NEEDS_X,
        S0,
        S1,
        S2,
        P0,
        P2,
        dtype,
        ACTIVATION,
        HAS_BIAS,
        PRECISION,
        SUM,
        CHUNK,
    )
    if NEEDS_X:
        store_rows(grad_x_ptr + tower * num_rows * S0, grad_x, rows, ins, num_rows, S0)
