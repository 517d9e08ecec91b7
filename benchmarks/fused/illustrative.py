"""The illustrative graph fused by hand: two batched GEMMs and two norms for all branches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fused.layers import BatchedLinear
from benchmarks.illustrative import IllustrativeGraph


class FusedIllustrativeGraph(nn.Module):
    """`IllustrativeGraph` with its weights."""

    def __init__(self, naive: IllustrativeGraph) -> None:
        super().__init__()
        self.num_branches = len(naive.first)
        self.first = BatchedLinear(naive.first)
        self.second = BatchedLinear(naive.second)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1) of `x` (B, num_branches * D)."""
        pieces = x.unflatten(1, (self.num_branches, -1))
        normed = F.layer_norm(pieces, pieces.shape[-1:]).transpose(0, 1)
        hidden = self.first(normed)
        hidden = torch.tanh(F.layer_norm(hidden, hidden.shape[-1:]))
        return torch.tanh(self.second(hidden)).mean(dim=(0, 2)).unsqueeze(1)
