"""Wukong fused by hand: a layer's three projections of one input are one GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fused.layers import joined
from recsys.models.wukong import WukongDenseArch, WukongLayer


class FusedWukong(nn.Module):
    """`WukongDenseArch` with its weights."""

    def __init__(self, naive: WukongDenseArch) -> None:
        super().__init__()
        self.bottom = naive.bottom
        layers: list[Any] = list(naive.layers)
        self.layers = nn.ModuleList([FusedWukongLayer(layer) for layer in layers])
        self.over = naive.over

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        x = embedded
        if self.bottom is not None:
            x = torch.cat([self.bottom(dense).unsqueeze(1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.over(x.flatten(1))


class FusedWukongLayer(nn.Module):
    """`WukongLayer` with its weights: factors, compressed features and residual side by side."""

    def __init__(self, naive: WukongLayer) -> None:
        super().__init__()
        weights: list[Any] = [naive.fmb.weight, naive.lcb.weight]
        self.has_residual = not isinstance(naive.residual, nn.Identity)
        if self.has_residual:
            weights.append(naive.residual.weight)
        self.sizes = [weight.shape[1] for weight in weights]
        self.weight = joined(weights, dim=1)
        self.interaction_norm, self.mlp = naive.fmb.norm, naive.fmb.mlp
        self.num_fmb = naive.fmb.num_fmb
        self.norm = naive.norm

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_fmb + num_lcb, D) of `x` (B, num_features, D)."""
        projected = torch.matmul(x.transpose(1, 2), self.weight).split(self.sizes, dim=2)
        interactions = torch.bmm(x, projected[0]).flatten(1)
        fmb = self.mlp(self.interaction_norm(interactions)).unflatten(1, (self.num_fmb, -1))
        residual = projected[2].transpose(1, 2) if self.has_residual else x
        return self.norm(torch.cat([fmb, projected[1].transpose(1, 2)], dim=1) + residual)
