"""N linears on N column slices of one tensor in plain PyTorch: the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ACTIVATIONS, slope


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    offsets: Sequence[int],
    activation: str,
) -> Tensor:
    """(B, sum of Ng): activation(x[:, og : og + Kg] @ weights[g].T + biases[g]), side by side."""
    parts = [
        F.linear(x.narrow(1, offset, weight.shape[1]), weight, biases[g] if biases else None)
        for g, (offset, weight) in enumerate(zip(offsets, weights, strict=True))
    ]
    return ACTIVATIONS[activation](torch.cat(parts, 1))


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    offsets: Sequence[int],
    activation: str,
) -> list[Tensor]:
    """Gradients of x, of all weights as one vector, and of all biases as one (empty without)."""
    if activation != "none":
        grad = grad * slope(grouped_linear(x, weights, biases, offsets, "none"), activation)
    grad_x = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    grad_weights = []
    parts = grad.split([weight.shape[0] for weight in weights], 1)
    for part, weight, offset in zip(parts, weights, offsets, strict=True):
        grad_x.narrow(1, offset, weight.shape[1]).copy_(part @ weight)
        grad_weights.append((part.mT @ x.narrow(1, offset, weight.shape[1])).flatten())
    return [grad_x, torch.cat(grad_weights), grad.sum(0) if biases else x.new_empty(0)]
