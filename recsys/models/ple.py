"""PLE (Tang et al., RecSys 2020, https://doi.org/10.1145/3383313.3412236)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from recsys.data.schema import Schema
from recsys.models.base import RecModel, SparseArch
from recsys.models.layers import Concatenated, check_sizes, mlp


class PLE(RecModel):
    """Levels of experts, some of a task and some shared by all, mixed by gates; a tower a task.

    `expert_layers`, `num_task_experts` (for each task) and `num_shared_experts` have one entry for
    each level. The defaults are TorchEasyRec's ple_taobao.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 16,
        expert_layers: Sequence[Sequence[int]] = ((1024, 512, 256), (256, 128, 64), (128, 64, 32)),
        num_task_experts: Sequence[int] = (2, 3, 4),
        num_shared_experts: Sequence[int] = (2, 3, 4),
        tower_layers: Sequence[int] = (256, 128, 64),
    ) -> None:
        check_sizes(
            {
                "expert_layers": expert_layers,
                "num_task_experts": num_task_experts,
                "num_shared_experts": num_shared_experts,
            }
        )
        counts = [len(x) for x in (expert_layers, num_task_experts, num_shared_experts)]
        if len(set(counts)) > 1:
            raise ValueError(
                "expert_layers, num_task_experts and num_shared_experts need one entry for each "
                f"level, they have {counts[0]}, {counts[1]} and {counts[2]}"
            )
        super().__init__(
            SparseArch(schema, embedding_dim),
            PLEDenseArch(
                schema,
                embedding_dim=embedding_dim,
                expert_layers=expert_layers,
                num_task_experts=num_task_experts,
                num_shared_experts=num_shared_experts,
                tower_layers=tower_layers,
            ),
        )


class PLEDenseArch(nn.Module):
    """Everything of `PLE` after the embedding tables."""

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int,
        expert_layers: Sequence[Sequence[int]],
        num_task_experts: Sequence[int],
        num_shared_experts: Sequence[int],
        tower_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.concatenated = Concatenated(schema, embedding_dim)
        self.levels = nn.ModuleList()
        width, last = self.concatenated.out_features, len(expert_layers) - 1
        for i, layers in enumerate(expert_layers):
            self.levels.append(
                Extraction(
                    width,
                    layers,
                    num_tasks=schema.num_tasks,
                    num_task_experts=num_task_experts[i],
                    num_shared_experts=num_shared_experts[i],
                    is_last=i == last,
                )
            )
            width = layers[-1]
        self.towers = nn.ModuleList([mlp(width, tower_layers, 1) for _ in schema.tasks])

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        x = self.concatenated(dense, embedded)
        tasks, shared = [x for _ in self.towers], x
        for level in self.levels:
            tasks, shared = level(tasks, shared)
        logits = [tower(task) for tower, task in zip(self.towers, tasks, strict=True)]
        return torch.cat(logits, dim=1)


class Extraction(nn.Module):
    """One level: a task's gate mixes its own experts and the shared ones (equations 2 to 4), the
    shared gate all experts; the last level has no shared gate."""

    def __init__(
        self,
        width: int,
        layers: Sequence[int],
        *,
        num_tasks: int,
        num_task_experts: int,
        num_shared_experts: int,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.task_experts = nn.ModuleList(
            [
                nn.ModuleList([mlp(width, layers) for _ in range(num_task_experts)])
                for _ in range(num_tasks)
            ]
        )
        self.shared_experts = nn.ModuleList([mlp(width, layers) for _ in range(num_shared_experts)])
        mixed = num_task_experts + num_shared_experts
        self.task_gates = nn.ModuleList([nn.Linear(width, mixed) for _ in range(num_tasks)])
        self.shared_gate: nn.Module | None = None
        if not is_last:
            everything = num_tasks * num_task_experts + num_shared_experts
            self.shared_gate = nn.Linear(width, everything)

    def forward(self, tasks: list[Tensor], shared: Tensor) -> tuple[list[Tensor], Tensor]:
        """One (B, out) for each task and one shared, of inputs (B, width)."""
        common = [expert(shared) for expert in self.shared_experts]
        everything: list[Tensor] = []
        outputs: list[Tensor] = []
        for x, experts, gate in zip(tasks, self.task_experts, self.task_gates, strict=True):
            own = [expert(x) for expert in cast(nn.ModuleList, experts)]
            outputs.append(_mix(gate(x), own + common))
            everything += own
        if self.shared_gate is None:
            return outputs, shared
        return outputs, _mix(self.shared_gate(shared), everything + common)


def _mix(scores: Tensor, experts: list[Tensor]) -> Tensor:
    """Experts (B, out) weighted by the softmax of `scores` (B, number of experts)."""
    weights = torch.softmax(scores, dim=1)
    return torch.matmul(weights.unsqueeze(1), torch.stack(experts, dim=1)).squeeze(1)
