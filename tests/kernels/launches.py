"""Launches of every kernel in the forms that the models need, for `tests.kernels.hopper`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from kernels.batched_norm import triton as batched_norm
from kernels.cross_layer import triton as cross_layer
from kernels.dot_interaction import triton as dot_interaction
from kernels.fused_mlp import triton as fused_mlp
from kernels.fused_mlp import triton_backward as fused_mlp_backward
from kernels.fused_mlp.sizes import fits
from kernels.gated_linear import triton as gated_linear
from kernels.grouped_linear import triton as grouped_linear
from kernels.linear_act import triton as linear_act


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _dot_interaction(dtype: torch.dtype) -> None:
    dense, embedded = _empty(8, 128, dtype=dtype), _empty(8, 26, 128, dtype=dtype)
    out = dot_interaction.forward(dense, embedded, True)
    dot_interaction.backward(out, dense, embedded, False)


def _cross_layer(dtype: torch.dtype, wide: torch.dtype | None = None) -> None:
    """`wide`: the type of what is not multiplied, as under autocast."""
    y, weight = (_empty(*s, dtype=dtype) for s in ((8, 512), (3456, 512)))
    x0, bias = (_empty(*s, dtype=wide or dtype) for s in ((8, 3456), (3456,)))
    cross_layer.forward(x0, y, weight, bias, x0, x0)
    cross_layer.backward(x0, x0, y, weight, bias)


def _in_tf32(launch: Callable[[torch.dtype], None]) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        launch(torch.float32)
    finally:
        torch.set_float32_matmul_precision(before)


def _batched_norm(dtype: torch.dtype) -> None:
    for features, width in ((64, 32), (3, 200), (16, 768)):
        x = _empty(64, features, width, dtype=dtype)
        weight = _empty(features, width, dtype=dtype)
        how = (1e-5, True, "relu")
        batched_norm.backward(
            batched_norm.forward(x, weight, weight, *how), x, weight, weight, *how
        )


def _fused_mlp(dtype: torch.dtype, *sizes: int) -> None:
    x = _empty(1, 16384, sizes[0], dtype=dtype)
    pairs = pairwise(sizes)
    weights = [_empty(1, b, a, dtype=dtype) for a, b in pairs]
    biases = [_empty(1, size, dtype=dtype) for size in sizes[1:]]
    assert fits(sizes, x.element_size())
    out, kept = fused_mlp.forward(x, weights, biases, "relu", True, True)
    fused_mlp_backward.backward(out, x, weights, kept, True, "relu", True, sizes[0] > 13)


def _grouped_linear(dtype: torch.dtype, *shapes: tuple[int, int]) -> None:
    x = _empty(64, sum(k for k, _ in shapes), dtype=dtype)
    room = _empty(sum(k * n for k, n in shapes), dtype=dtype)  # distances as in packed parameters
    parts = room.split([k * n for k, n in shapes])
    weights = [part.view(n, k) for (k, n), part in zip(shapes, parts, strict=True)]
    offsets = [sum(k for k, _ in shapes[:i]) for i in range(len(shapes))]
    out = grouped_linear.forward(
        x, weights, [w[:, 0].contiguous() for w in weights], offsets, "relu"
    )
    grouped_linear.grad_of_x(out, x, weights, offsets)
    grouped_linear.grads_of_parameters(out, x, weights, offsets)


def _gated_linear(dtype: torch.dtype) -> None:
    x, gate = _empty(64, 768, dtype=dtype), _empty(3072, 768, dtype=dtype)
    for save in (False, True):
        gated_linear.forward(x, gate, gate, None, gate[:, 0].contiguous(), "gelu_tanh", save)


def _linear_act(dtype: torch.dtype) -> None:
    shapes = ((479, "relu", False), (479, "gelu", True), (512, "relu", False), (512, "gelu", True))
    for depth, activation, save in shapes:  # of odd rows TMA cannot make a descriptor
        x, weight = _empty(64, depth, dtype=dtype), _empty(1024, depth, dtype=dtype)
        bias = weight[:, 0].contiguous()
        out, _ = linear_act.forward(x, weight, bias, activation, save)
        linear_act.backward(out, out, activation)


LAUNCHES: dict[str, Callable[[], None]] = {
    "dot_interaction bf16": lambda: _dot_interaction(torch.bfloat16),
    "dot_interaction fp32": lambda: _dot_interaction(torch.float32),
    "cross_layer bf16": lambda: _cross_layer(torch.bfloat16),
    "cross_layer bf16 in fp32": lambda: _cross_layer(torch.bfloat16, torch.float32),
    "cross_layer fp32": lambda: _cross_layer(torch.float32),
    "cross_layer tf32": lambda: _in_tf32(_cross_layer),
    "batched_norm bf16": lambda: _batched_norm(torch.bfloat16),
    "batched_norm fp32": lambda: _batched_norm(torch.float32),
    "fused_mlp bf16 13": lambda: _fused_mlp(torch.bfloat16, 13, 512, 256, 128),
    "fused_mlp bf16 tower": lambda: _fused_mlp(torch.bfloat16, 256, 128, 64, 1),
    "fused_mlp bf16 wide": lambda: _fused_mlp(torch.bfloat16, 512, 512, 256),
    "fused_mlp bf16 512 out": lambda: _fused_mlp(torch.bfloat16, 256, 512, 512, 64),
    "fused_mlp bf16 deep": lambda: _fused_mlp(torch.bfloat16, 512, 512, 256, 128, 256),
    "grouped_linear bf16 equal": lambda: _grouped_linear(torch.bfloat16, *[(64, 32)] * 4),
    "grouped_linear bf16 unequal": lambda: _grouped_linear(torch.bfloat16, (13, 7), (40, 64)),
    "gated_linear bf16": lambda: _gated_linear(torch.bfloat16),
    "linear_act bf16": lambda: _linear_act(torch.bfloat16),
    "fused_mlp fp32 tower": lambda: _fused_mlp(torch.float32, 256, 128, 64, 1),
    "fused_mlp fp32 13": lambda: _fused_mlp(torch.float32, 13, 512, 256, 64),
}
