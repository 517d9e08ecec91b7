"""Per-feature MMoE as an expert would write it: every group of equal layers is one batched GEMM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from recsys.models.mmoe import MMoEDenseArch


class BatchedLinear(nn.Module):
    """N linears of equal shape on N inputs (N, B, K) -> (N, B, M), weights taken from `layers`."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        linears = [cast(nn.Linear, layer) for layer in layers]
        self.weight = nn.Parameter(torch.stack([x.weight.detach().t() for x in linears]))
        self.bias = nn.Parameter(torch.stack([x.bias.detach() for x in linears]).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class WideLinear(nn.Module):
    """Linears on one input as one: weights of `layers` above one another."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        linears = [cast(nn.Linear, layer) for layer in layers]
        self.weight = nn.Parameter(torch.cat([x.weight.detach() for x in linears]))
        self.bias = nn.Parameter(torch.cat([x.bias.detach() for x in linears]))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class FusedMMoE(nn.Module):
    """`MMoEDenseArch` with its weights, in 9 GEMMs instead of one for each layer."""

    def __init__(self, naive: MMoEDenseArch) -> None:
        super().__init__()
        encoders = [cast(nn.Sequential, e) for e in naive.encoders]
        norms = [cast(nn.LayerNorm, e[1]) for e in encoders]
        self.encoder = BatchedLinear(e[0] for e in encoders)
        self.scale = nn.Parameter(torch.stack([n.weight.detach() for n in norms]))
        self.shift = nn.Parameter(torch.stack([n.bias.detach() for n in norms]))
        self.dense_encoder = naive.dense_encoder
        experts = [cast(nn.Sequential, e) for e in naive.experts]
        self.num_experts = len(experts)
        self.first = WideLinear(e[0] for e in experts)
        self.rest = nn.ModuleList(_batched(experts, range(2, len(experts[0]), 2)))
        self.gate = WideLinear(naive.gates)
        towers = [cast(nn.Sequential, t) for t in naive.towers]
        bodies = [cast(nn.Sequential, t[0]) for t in towers]
        self.num_tasks = len(towers)
        self.tower = nn.ModuleList(_batched(bodies, range(0, len(bodies[0]), 2)))
        self.head = BatchedLinear(t[1] for t in towers)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        batch = embedded.shape[0]
        encoded = self.encoder(embedded.transpose(0, 1)).transpose(0, 1)
        normed = nn.functional.layer_norm(encoded, encoded.shape[-1:])
        x = torch.relu(normed * self.scale + self.shift).flatten(1)
        if self.dense_encoder is not None:
            x = torch.cat([x, self.dense_encoder(dense)], dim=1)
        hidden = torch.relu(self.first(x)).view(batch, self.num_experts, -1).transpose(0, 1)
        for layer in self.rest:
            hidden = torch.relu(layer(hidden))
        gates = self.gate(x).view(batch, self.num_tasks, self.num_experts).softmax(-1)
        mixed = torch.bmm(gates, hidden.transpose(0, 1)).transpose(0, 1)
        for layer in self.tower:
            mixed = torch.relu(layer(mixed))
        return self.head(mixed).squeeze(-1).t()


def _batched(stacks: Sequence[nn.Sequential], positions: Iterable[int]) -> list[BatchedLinear]:
    return [BatchedLinear(stack[i] for stack in stacks) for i in positions]
