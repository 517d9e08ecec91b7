"""A narrow MLP in plain PyTorch: the definition, and what runs where no kernel can."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.activations import ACTIVATIONS, FROM_SUM, slope_at
from kernels.fused_mlp.columns import columns


def fused_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str, last: bool
) -> tuple[Tensor, Tensor]:
    """The result (T, B, N): a linear a weight, the activation behind each but the last, there if
    `last`. And what backward needs of each layer with an activation, side by side (columns.py):
    the sum in front of it for FROM_SUM, else the result."""
    kept: list[Tensor] = []
    for i in range(len(weights)):
        z = _linear(x, weights[i], biases[i] if biases else None)
        is_active = last or i + 1 < len(weights)
        x = ACTIVATIONS[activation](z) if is_active else z
        if is_active:
            kept.append(z if activation in FROM_SUM else x)
    return x, torch.cat(kept, 2) if kept else x.new_empty(0)


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    kept: Tensor,
    has_bias: bool,
    activation: str,
    last: bool,
) -> list[Tensor]:
    """Gradients of x, of all weights, and of all biases if there are any, in this order."""
    widths = [w.shape[1] for w in weights]
    grad_weights: list[Tensor] = []
    grad_biases: list[Tensor] = []
    for i in reversed(range(len(weights))):
        if last or i + 1 < len(weights):
            grad = grad * slope_at(columns(kept, widths, i), activation)
        if i:
            before = columns(kept, widths, i - 1)
            before = ACTIVATIONS[activation](before) if activation in FROM_SUM else before
        else:
            before = x
        grad_weights.insert(0, grad.mT @ before)
        grad_biases.insert(0, grad.sum(1))
        grad = grad @ weights[i]
    return [grad, *grad_weights, *(grad_biases if has_bias else [])]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
