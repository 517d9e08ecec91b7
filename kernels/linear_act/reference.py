"""A linear layer and its activation in plain PyTorch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ACTIVATIONS, slope_at


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
    of_sum = grad * slope_at(wide, activation)
    return of_sum.to(grad.dtype), of_sum.sum(0).to(grad.dtype)
