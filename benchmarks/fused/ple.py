"""PLE fused by hand: a level's experts are one wide or batched GEMM a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fused.layers import BatchedLinear, BatchedMLP, WideLinear, joined
from recsys.models.ple import Extraction, PLEDenseArch


class FusedPLE(nn.Module):
    """`PLEDenseArch` with its weights.

    Raises ValueError where tasks have another number of experts than there are shared ones: then
    the first layers of a level are no single batched GEMM.
    """

    def __init__(self, naive: PLEDenseArch) -> None:
        super().__init__()
        self.concatenated = naive.concatenated
        levels: list[Any] = list(naive.levels)
        self.levels = nn.ModuleList(
            [FusedExtraction(level, shared_input=i == 0) for i, level in enumerate(levels)]
        )
        self.tower = BatchedMLP(list(naive.towers))

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        x = self.concatenated(dense, embedded)
        for level in self.levels:
            x = level(x)
        return self.tower(x).squeeze(-1).t()


class FusedExtraction(nn.Module):
    """One level. Takes (T + 1, B, K), the shared input last, or the one (B, K) that all share;
    makes (T + 1, B, M), or (T, B, M) if it is the last level."""

    def __init__(self, naive: Extraction, shared_input: bool) -> None:
        super().__init__()
        groups: list[list[Any]] = [list(group) for group in naive.task_experts]  # type: ignore[arg-type]
        groups.append(list(naive.shared_experts))
        self.num_tasks, self.num_own = len(naive.task_gates), len(groups[0])
        if len(groups[-1]) != self.num_own:
            raise ValueError(
                f"{self.num_own} experts a task and {len(groups[-1])} shared ones: "
                "the hand-fused PLE needs equal numbers"
            )
        experts = [expert for group in groups for expert in group]
        self.shared_input = shared_input
        self.first: nn.Module
        if shared_input:
            self.first = WideLinear(expert[0] for expert in experts)
        else:
            self.first = BatchedLinear(_side_by_side([e[0] for e in group]) for group in groups)
        self.rest = BatchedMLP(experts, skip=1)
        self.shared_gate = naive.shared_gate
        if shared_input:
            self.task_gates: nn.Module = WideLinear(naive.task_gates)
        else:
            self.task_gates = BatchedLinear(naive.task_gates)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        experts = self.rest(self._first(x))
        own, common = experts[: -self.num_own], experts[-self.num_own :]
        weights = torch.softmax(self._scores(x), dim=-1).permute(0, 2, 1).unsqueeze(-1)
        own = own.unflatten(0, (self.num_tasks, self.num_own))
        outputs = (weights[:, : self.num_own] * own).sum(1)
        outputs = outputs + (weights[:, self.num_own :] * common).sum(1)
        if self.shared_gate is None:
            return outputs
        scores = self.shared_gate(x if self.shared_input else x[-1])
        mixed = (torch.softmax(scores, dim=-1).t().unsqueeze(-1) * experts).sum(0)
        return torch.cat([outputs, mixed.unsqueeze(0)])

    def _first(self, x: Tensor) -> Tensor:
        """The first layers of all experts: (number of experts, B, H)."""
        hidden = torch.relu(self.first(x))
        if self.shared_input:
            hidden = hidden.unsqueeze(0)
        split = hidden.unflatten(-1, (-1, hidden.shape[-1] // self._experts_in(hidden)))
        return split.permute(0, 2, 1, 3).flatten(0, 1)

    def _experts_in(self, hidden: Tensor) -> int:
        """Experts side by side in the last dimension of `hidden`."""
        return (self.num_tasks + 1) * self.num_own // hidden.shape[0]

    def _scores(self, x: Tensor) -> Tensor:
        """The tasks' gates (T, B, own and shared experts)."""
        if not self.shared_input:
            return self.task_gates(x[: self.num_tasks])
        return self.task_gates(x).unflatten(-1, (self.num_tasks, -1)).transpose(0, 1)


def _side_by_side(linears: list[nn.Linear]) -> nn.Linear:
    """Linears on one input as one."""
    wide = nn.Linear(1, 1)
    wide.weight = joined(x.weight for x in linears)
    wide.bias = joined(x.bias for x in linears)
    return wide
