"""MMoE over per-feature encoders (Ma et al., KDD 2018, https://doi.org/10.1145/3219819.3220007).

Written as practitioners write it, one small module for each feature, expert, gate and tower and
a loop over them: hundreds of small kernels a step, which is what there is to gain from rewriting.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from recsys.data.schema import Schema
from recsys.models.base import RecModel, SparseArch


class MMoE(RecModel):
    """Feature encoders, experts shared by all tasks, a gate and a tower for each task.

    With 64 sparse features and 6 tasks the defaults are: 64 encoders Linear 64-32, LayerNorm,
    ReLU, one more for the dense features, 8 experts 2080-512-256, 6 gates, 6 towers
    256-256-128-1.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 64,
        encoder_dim: int = 32,
        num_experts: int = 8,
        expert_layers: Sequence[int] = (512, 256),
        tower_layers: Sequence[int] = (256, 128),
    ) -> None:
        if num_experts < 1 or not expert_layers:
            raise ValueError(
                f"num_experts is {num_experts} and expert_layers is {list(expert_layers)}, "
                "the model needs at least one of each"
            )
        super().__init__(
            SparseArch(schema, embedding_dim),
            MMoEDenseArch(
                schema,
                embedding_dim=embedding_dim,
                encoder_dim=encoder_dim,
                num_experts=num_experts,
                expert_layers=expert_layers,
                tower_layers=tower_layers,
            ),
        )


class MMoEDenseArch(nn.Module):
    """Everything of `MMoE` after the embedding tables."""

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int,
        encoder_dim: int,
        num_experts: int,
        expert_layers: Sequence[int],
        tower_layers: Sequence[int],
    ) -> None:
        super().__init__()
        width = schema.num_sparse * encoder_dim
        self.dense_encoder: nn.Module | None = None
        if schema.num_dense:
            self.dense_encoder = _encoder(schema.num_dense, encoder_dim)
            width += encoder_dim
        self.encoders = nn.ModuleList([_encoder(embedding_dim, encoder_dim) for _ in schema.sparse])
        self.experts = nn.ModuleList([_mlp(width, expert_layers) for _ in range(num_experts)])
        self.gates = nn.ModuleList([nn.Linear(width, num_experts) for _ in schema.tasks])
        self.towers = nn.ModuleList([_tower(expert_layers[-1], tower_layers) for _ in schema.tasks])

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        encoded = [encoder(embedded[:, i]) for i, encoder in enumerate(self.encoders)]
        if self.dense_encoder is not None:
            encoded.append(self.dense_encoder(dense))
        x = torch.cat(encoded, dim=1)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        logits: list[Tensor] = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = torch.softmax(gate(x), dim=1)
            mixed = (weights.unsqueeze(-1) * experts).sum(dim=1)
            logits.append(tower(mixed))
        return torch.cat(logits, dim=1)


def _encoder(in_features: int, out_features: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(in_features, out_features), nn.LayerNorm(out_features), nn.ReLU()
    )


def _mlp(in_features: int, layers: Sequence[int]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for size_in, size_out in pairwise([in_features, *layers]):
        modules += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*modules)


def _tower(in_features: int, layers: Sequence[int]) -> nn.Sequential:
    last = layers[-1] if layers else in_features
    return nn.Sequential(_mlp(in_features, layers), nn.Linear(last, 1))
