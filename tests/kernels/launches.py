"""Launches of every kernel in the forms that the models need, for `tests.kernels.hopper`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.batched_norm import triton as batched_norm
from kernels.cross_layer import triton as cross_layer
from kernels.dot_interaction import triton as dot_interaction


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _dot_interaction(dtype: torch.dtype) -> None:
    dense, embedded = _empty(8, 128, dtype=dtype), _empty(8, 26, 128, dtype=dtype)
    out = dot_interaction.forward(dense, embedded, True)
    dot_interaction.backward(out, dense, embedded, False)


def _cross_layer(dtype: torch.dtype) -> None:
    x0, y, weight = (_empty(*s, dtype=dtype) for s in ((8, 3456), (8, 512), (3456, 512)))
    bias = _empty(3456, dtype=dtype)
    cross_layer.forward(x0, y, weight, bias, x0, x0)
    cross_layer.backward(x0, x0, y, weight, bias)


def _batched_norm(dtype: torch.dtype) -> None:
    for features, width in ((64, 32), (3, 200), (16, 768)):
        x = _empty(64, features, width, dtype=dtype)
        weight = _empty(features, width, dtype=dtype)
        how = (1e-5, True, "relu")
        batched_norm.backward(
            batched_norm.forward(x, weight, weight, *how), x, weight, weight, *how
        )


LAUNCHES: dict[str, Callable[[], None]] = {
    "dot_interaction bf16": lambda: _dot_interaction(torch.bfloat16),
    "dot_interaction fp32": lambda: _dot_interaction(torch.float32),
    "cross_layer bf16": lambda: _cross_layer(torch.bfloat16),
    "cross_layer fp32": lambda: _cross_layer(torch.float32),
    "batched_norm bf16": lambda: _batched_norm(torch.bfloat16),
    "batched_norm fp32": lambda: _batched_norm(torch.float32),
}
