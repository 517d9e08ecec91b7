"""DCN-V2's cross layer in plain PyTorch: the definition, and what runs where no kernel can."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_layer(x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """x0 * (y @ weight.T + bias) + x."""
    return x0 * project(y, weight, bias) + x


def project(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What x0 is multiplied with."""
    product = F.linear(y, weight)
    return product if bias is None else product + bias


def backward(
    grad: Tensor, x0: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x0, of the projection (in y's type) and of the bias (empty without one)."""
    projected = grad * x0
    grad_bias = grad.new_empty(0) if bias is None else projected.sum(0).to(bias.dtype)
    grad_x0 = (grad * project(y, weight, bias)).to(x0.dtype)
    return grad_x0, projected.to(y.dtype), grad_bias
