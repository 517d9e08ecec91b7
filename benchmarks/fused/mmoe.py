"""MMoE as an expert would write it: every group of equal layers is one GEMM."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks.fused.layers import BatchedLayerNorm, BatchedLinear, BatchedMLP, WideLinear
from recsys.models.mmoe import Encoders, MMoEDenseArch


class FusedMMoE(nn.Module):
    """`MMoEDenseArch` with its weights, in a GEMM for each kind of layer instead of each layer."""

    def __init__(self, naive: MMoEDenseArch) -> None:
        super().__init__()
        self.inputs = naive.inputs
        if isinstance(naive.inputs, Encoders):
            self.inputs = FusedEncoders(naive.inputs)
        experts = cast(list[nn.Sequential], list(naive.experts))
        self.num_experts, self.num_tasks = len(experts), len(naive.towers)
        self.first = WideLinear(e[0] for e in experts)
        self.rest = BatchedMLP(experts, skip=1)
        self.gate = WideLinear(naive.gates)
        self.tower = BatchedMLP(list(naive.towers))

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        x = self.inputs(dense, embedded)
        batch = x.shape[0]
        hidden = torch.relu(self.first(x)).view(batch, self.num_experts, -1).transpose(0, 1)
        hidden = self.rest(hidden)
        gates = self.gate(x).view(batch, self.num_tasks, self.num_experts).softmax(-1)
        mixed = torch.bmm(gates, hidden.transpose(0, 1)).transpose(0, 1)
        return self.tower(mixed).squeeze(-1).t()


class FusedEncoders(nn.Module):
    """`Encoders` with one batched GEMM and one norm."""

    def __init__(self, naive: Encoders) -> None:
        super().__init__()
        encoders: list[Any] = list(naive.embedded)
        self.linear = BatchedLinear(e[0] for e in encoders)
        self.norm = BatchedLayerNorm(e[1] for e in encoders)
        self.dense = naive.dense

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """(B, out_features) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        encoded = self.linear(embedded.transpose(0, 1)).transpose(0, 1)
        x = torch.relu(self.norm(encoded)).flatten(1)
        return x if self.dense is None else torch.cat([x, self.dense(dense)], dim=1)
