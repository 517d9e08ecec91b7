"""Per-feature encoders: a small net for each feature before the over arch.

What large ranking models do to bring features of different kinds to one space, or to compress
them (linear compression of embeddings); the purest case of many equal branches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recsys.data.schema import Schema
from recsys.models.base import RecModel, SparseArch
from recsys.models.layers import check_sizes, mlp


class PerFeatureEncoder(RecModel):
    """Linear, LayerNorm, ReLU, Linear for each feature, then an MLP over all results.

    The dense features together have an encoder of their own.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 64,
        hidden_dim: int = 64,
        encoder_dim: int = 32,
        over_layers: Sequence[int] = (512, 256),
    ) -> None:
        check_sizes(
            {"hidden_dim": hidden_dim, "encoder_dim": encoder_dim, "over_layers": over_layers}
        )
        super().__init__(
            SparseArch(schema, embedding_dim),
            PerFeatureEncoderDenseArch(
                schema,
                embedding_dim=embedding_dim,
                hidden_dim=hidden_dim,
                encoder_dim=encoder_dim,
                over_layers=over_layers,
            ),
        )


class PerFeatureEncoderDenseArch(nn.Module):
    """Everything of `PerFeatureEncoder` after the embedding tables."""

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int,
        hidden_dim: int,
        encoder_dim: int,
        over_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(
            [_encoder(embedding_dim, hidden_dim, encoder_dim) for _ in schema.sparse]
        )
        num_encoders = schema.num_sparse
        self.dense_encoder: nn.Module | None = None
        if schema.num_dense:
            self.dense_encoder = _encoder(schema.num_dense, hidden_dim, encoder_dim)
            num_encoders += 1
        self.over = mlp(num_encoders * encoder_dim, over_layers, schema.num_tasks)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        features = torch.unbind(embedded, dim=1)
        encoded = [encode(x) for encode, x in zip(self.encoders, features, strict=True)]
        if self.dense_encoder is not None:
            encoded.append(self.dense_encoder(dense))
        return self.over(torch.cat(encoded, dim=1))


def _encoder(in_features: int, hidden_dim: int, out_features: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(in_features, hidden_dim),
        nn.LayerNorm(hidden_dim),
        nn.ReLU(),
        nn.Linear(hidden_dim, out_features),
    )
