"""MMoE (Ma et al., KDD 2018, https://doi.org/10.1145/3219819.3220007), plain or per feature.

Written as practitioners write it, one small module for each feature, expert, gate and tower and
a loop over them: hundreds of small kernels a step, which is what there is to gain from rewriting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recsys.data.schema import Schema
from recsys.models.base import RecModel, SparseArch
from recsys.models.layers import Concatenated, check_sizes, mlp


class MMoE(RecModel):
    """Feature encoders, experts shared by all tasks, a gate and a tower for each task.

    With 64 sparse features and 6 tasks the defaults are: 64 encoders Linear 64-32, LayerNorm,
    ReLU, one more for the dense features, 8 experts 2080-512-256, 6 gates, 6 towers
    256-256-128-1. With encoder_dim=None there are no encoders: the experts read dense features and
    embeddings side by side, as in the paper (equations 6 to 8).
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 64,
        encoder_dim: int | None = 32,
        num_experts: int = 8,
        expert_layers: Sequence[int] = (512, 256),
        tower_layers: Sequence[int] = (256, 128),
    ) -> None:
        check_sizes({"num_experts": num_experts, "expert_layers": expert_layers})
        if encoder_dim is not None:
            check_sizes({"encoder_dim": encoder_dim})
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
        encoder_dim: int | None,
        num_experts: int,
        expert_layers: Sequence[int],
        tower_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.inputs: nn.Module
        if encoder_dim is None:
            self.inputs = Concatenated(schema, embedding_dim)
        else:
            self.inputs = Encoders(schema, embedding_dim, encoder_dim)
        width: int = self.inputs.out_features
        self.experts = nn.ModuleList([mlp(width, expert_layers) for _ in range(num_experts)])
        self.gates = nn.ModuleList([nn.Linear(width, num_experts) for _ in schema.tasks])
        self.towers = nn.ModuleList([mlp(expert_layers[-1], tower_layers, 1) for _ in schema.tasks])

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        x = self.inputs(dense, embedded)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        logits: list[Tensor] = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = torch.softmax(gate(x), dim=1)
            mixed = (weights.unsqueeze(-1) * experts).sum(dim=1)
            logits.append(tower(mixed))
        return torch.cat(logits, dim=1)


class Encoders(nn.Module):
    """Linear, LayerNorm, ReLU for each embedding, and for the dense features together."""

    def __init__(self, schema: Schema, embedding_dim: int, encoder_dim: int) -> None:
        super().__init__()
        self.embedded = nn.ModuleList([_encoder(embedding_dim, encoder_dim) for _ in schema.sparse])
        self.dense: nn.Module | None = None
        if schema.num_dense:
            self.dense = _encoder(schema.num_dense, encoder_dim)
        self.out_features = (schema.num_sparse + (schema.num_dense > 0)) * encoder_dim

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """(B, out_features) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        encoded = [encoder(embedded[:, i]) for i, encoder in enumerate(self.embedded)]
        if self.dense is not None:
            encoded.append(self.dense(dense))
        return torch.cat(encoded, dim=1)


def _encoder(in_features: int, out_features: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(in_features, out_features), nn.LayerNorm(out_features), nn.ReLU()
    )
