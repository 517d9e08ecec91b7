"""What the hand-fused models are made of: many equal layers as one, with the weights of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys.models.layers import Fields


def stacked(tensors: Iterable[Tensor]) -> nn.Parameter:
    """Copies of equal tensors as one parameter with a dimension in front."""
    return nn.Parameter(torch.stack([t.detach() for t in tensors]))


def joined(tensors: Iterable[Tensor], dim: int = 0) -> nn.Parameter:
    """Copies of tensors side by side as one parameter."""
    return nn.Parameter(torch.cat([t.detach() for t in tensors], dim=dim))


class BatchedLinear(nn.Module):
    """N linears of equal shape on N inputs: (N, B, K) -> (N, B, M), weights taken from `layers`."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        linears = cast(list[nn.Linear], list(layers))
        self.weight = stacked(x.weight.t() for x in linears)
        self.bias: nn.Parameter | None = None
        if linears[0].bias is not None:
            self.bias = stacked(x.bias.unsqueeze(0) for x in linears)

    def forward(self, x: Tensor) -> Tensor:
        """(N, B, M) of `x` (N, B, K)."""
        if self.bias is None:
            return torch.bmm(x, self.weight)
        return torch.baddbmm(self.bias, x, self.weight)


class WideLinear(nn.Module):
    """Linears on one input as one: weights of `layers` above one another."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        linears = cast(list[nn.Linear], list(layers))
        self.weight = joined(x.weight for x in linears)
        self.bias = joined(x.bias for x in linears)

    def forward(self, x: Tensor) -> Tensor:
        """(B, sum of M) of `x` (B, K)."""
        return F.linear(x, self.weight, self.bias)


class BatchedLayerNorm(nn.Module):
    """N layer norms over the last dimension, on (B, N, D), or on (N, B, D) with batch_first=False.

    With `shared_input` they all norm the same (B, D), and the result is (N, B, D).
    """

    def __init__(
        self, norms: Iterable[nn.Module], batch_first: bool = True, shared_input: bool = False
    ) -> None:
        super().__init__()
        layers = cast(list[nn.LayerNorm], list(norms))
        self.shape, self.eps = layers[0].normalized_shape, layers[0].eps
        self.batch_dim = 0 if batch_first else 1
        self.shared_input = shared_input
        self.scale = stacked(x.weight for x in layers)
        self.shift = stacked(x.bias for x in layers)

    def forward(self, x: Tensor) -> Tensor:
        """The norms' results, in the shape of the inputs."""
        normed = F.layer_norm(x, self.shape, eps=self.eps)
        if self.shared_input:
            normed = normed.unsqueeze(0)
        scale, shift = self.scale.unsqueeze(self.batch_dim), self.shift.unsqueeze(self.batch_dim)
        return normed * scale + shift


class BatchedMLP(nn.Module):
    """N MLPs of linears and ReLUs of equal shape on N inputs: (N, B, K) -> (N, B, M).

    With `skip` the first of the linears, and the ReLU behind it, are left to the caller.
    """

    def __init__(self, stacks: Sequence[nn.Module], skip: int = 0) -> None:
        super().__init__()
        nets = cast(Sequence[nn.Sequential], stacks)
        positions = [i for i, m in enumerate(nets[0]) if isinstance(m, nn.Linear)][skip:]
        self.ends_in_relu = isinstance(nets[0][-1], nn.ReLU)
        self.layers = nn.ModuleList([BatchedLinear(net[i] for net in nets) for i in positions])

    def forward(self, x: Tensor) -> Tensor:
        """(N, B, M) of `x` (N, B, K)."""
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.ends_in_relu or i < len(self.layers) - 1:
                x = torch.relu(x)
        return x


class FusedFields(nn.Module):
    """`Fields` with one product for all dense features."""

    def __init__(self, naive: Fields) -> None:
        super().__init__()
        encoders: list[Any] = list(naive.encoders)
        self.has_dense = bool(encoders)
        if encoders:
            self.weight = stacked(x.weight.squeeze(1) for x in encoders)
            self.bias = stacked(x.bias for x in encoders)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Fields (B, num_dense + F, D) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        if not self.has_dense:
            return embedded
        return torch.cat([dense.unsqueeze(-1) * self.weight + self.bias, embedded], dim=1)
