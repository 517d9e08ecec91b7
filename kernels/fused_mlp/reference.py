"""A narrow MLP in plain PyTorch: the definition, and what runs where no kernel can."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.activations import ACTIVATIONS, slope


def fused_mlp(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str, last: bool
) -> Tensor:
    """(T, B, N): a linear a weight, the activation behind each but the last, there if `last`."""
    for i in range(len(weights)):
        z = _linear(x, weights[i], biases[i] if biases else None)
        x = ACTIVATIONS[activation](z) if last or i + 1 < len(weights) else z
    return x


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    last: bool,
) -> list[Tensor]:
    """Gradients of x, of all weights, and of all biases, in this order."""
    inputs, sums = [x], list[Tensor]()
    for i in range(len(weights)):
        sums.append(_linear(inputs[-1], weights[i], biases[i] if biases else None))
        inputs.append(ACTIVATIONS[activation](sums[-1]))
    grad_weights: list[Tensor] = []
    grad_biases: list[Tensor] = []
    for i in reversed(range(len(weights))):
        if last or i + 1 < len(weights):
            grad = grad * slope(sums[i], activation)
        grad_weights.insert(0, grad.mT @ inputs[i])
        grad_biases.insert(0, grad.sum(1))
        grad = grad @ weights[i]
    return [grad, *grad_weights, *(grad_biases if biases else [])]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
