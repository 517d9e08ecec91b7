"""Activations that kernels can apply to a result before they write it, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

FROM_SUM = ("gelu", "gelu_tanh", "silu")
"""Activations whose derivative takes the sum in front of them; that of others is known from their
result."""


def check_activation(name: str) -> None:
    """Raises ValueError naming the activations there are."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; there are {', '.join(ACTIVATIONS)}")


def slope(z: Tensor, name: str) -> Tensor:
    """The derivative of an activation at `z`, elementwise, of the same type."""
    if name == "none":
        return torch.ones_like(z)
    if name == "relu":
        return (~(z <= 0)).to(z.dtype)
    if name == "gelu":
        density = torch.exp(-0.5 * z * z) * 0.3989422804014327
        return 0.5 * (1 + torch.erf(z * 0.7071067811865476)) + z * density
    if name == "gelu_tanh":
        inner = 1.5957691216057308 * (z + 0.044715 * z**3)
        gate, rest = torch.sigmoid(inner), torch.sigmoid(-inner)  # 1 - gate would cancel
        return gate + z * gate * rest * 1.5957691216057308 * (1 + 0.134145 * z * z)
    if name == "tanh":
        return 1 - torch.tanh(z) ** 2
    gate = torch.sigmoid(z)
    return gate * (1 - gate) * (z if name == "silu" else 1) + (gate if name == "silu" else 0)


def slope_at(kept: Tensor, name: str) -> Tensor:
    """The derivative of an activation, where `kept` is the sum for FROM_SUM, else the result."""
    if name == "sigmoid":
        return kept * (1 - kept)
    return 1 - kept * kept if name == "tanh" else slope(kept, name)
