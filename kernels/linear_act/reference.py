"""A linear layer and its activation in plain PyTorch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ACTIVATIONS, slope

FROM_SUM = ("gelu", "gelu_tanh", "silu")
"""Activations whose derivative takes the sum; that of others is known from the result."""


def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """activation(x @ weight.T + bias), and the sum in front of the activation."""
    z = F.linear(x, weight, bias)
    return ACTIVATIONS[activation](z), z


def backward(grad: Tensor, saved: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradient of the sum, and that summed over the rows. `saved`: the sum for FROM_SUM, else the
    result."""
    wide = saved if saved.dtype == torch.float64 else saved.float()
    if activation in FROM_SUM:
        slopes = slope(wide, activation)
    elif activation == "relu":
        slopes = (~(wide <= 0)).to(wide.dtype)
    else:
        slopes = wide * (1 - wide) if activation == "sigmoid" else 1 - wide * wide
    of_sum = grad * slopes
    return of_sum.to(grad.dtype), of_sum.sum(0).to(grad.dtype)
