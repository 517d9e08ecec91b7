"""A gated linear unit in plain PyTorch: the definition, and the gradients before the products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ACTIVATIONS, slope


def gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias), and the two sums."""
    opened, value = F.linear(x, gate, gate_bias), F.linear(x, up, up_bias)
    return ACTIVATIONS[activation](opened) * value, opened, value


def backward(grad: Tensor, opened: Tensor, value: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients of the two sums."""
    wide = opened if opened.dtype == torch.float64 else opened.float()
    of_value = (grad * ACTIVATIONS[activation](wide)).to(grad.dtype)
    return (grad * value * slope(wide, activation)).to(grad.dtype), of_value
