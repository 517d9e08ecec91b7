"""N norms of a tensor's N slices in plain PyTorch: the definition, and what runs without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activations import ACTIVATIONS, slope


def batched_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    activation: str,
) -> Tensor:
    """activation(norm(x) * weight + bias) over the last dimension of x (B, N, D)."""
    z, _, _ = _normalize(_wide(x), weight, bias, eps, centered)
    return ACTIVATIONS[activation](z).to(x.dtype)


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias (empty where there is none)."""
    z, normal, scale = _normalize(_wide(x), weight, bias, eps, centered)
    grad_z = _wide(grad) * slope(z, activation)
    grad_normal = grad_z if weight is None else grad_z * _wide(weight)
    inner = grad_normal - normal * (grad_normal * normal).mean(-1, keepdim=True)
    if centered:
        inner = inner - grad_normal.mean(-1, keepdim=True)
    grad_x = (inner * scale).to(x.dtype).contiguous()
    grad_weight, grad_bias = x.new_empty(0), x.new_empty(0)
    if weight is not None:
        grad_weight = (grad_z * normal).sum(0).to(weight.dtype)
    if bias is not None:
        grad_bias = grad_z.sum(0).to(bias.dtype)
    return grad_x, grad_weight, grad_bias


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """norm(x) * weight + bias, norm(x), and one over the deviation."""
    if centered:
        x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    normal = x * scale
    z = normal if weight is None else normal * _wide(weight)
    return z if bias is None else z + _wide(bias), normal, scale


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
