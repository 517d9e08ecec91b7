"""MaskNet (Wang et al., DLP-KDD 2021, https://arxiv.org/abs/2102.07619), serial and parallel.

Both end with one logit for each task; the public results are for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from recsys.data.schema import Schema
from recsys.models.base import RecModel, SparseArch
from recsys.models.layers import Fields, check_sizes, mlp


class SerialMaskNet(RecModel):
    """Mask blocks one behind another, all masked by the fields' embeddings (section 4.4).

    The defaults are those of BARS for Criteo (x1): 39 fields of 10, 3 blocks of 400.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 10,
        block_layers: Sequence[int] = (400, 400, 400),
        reduction_ratio: float = 0.2,
    ) -> None:
        check_sizes({"block_layers": block_layers, "reduction_ratio": reduction_ratio})
        super().__init__(
            SparseArch(schema, embedding_dim),
            SerialMaskNetDenseArch(
                schema,
                embedding_dim=embedding_dim,
                block_layers=block_layers,
                reduction_ratio=reduction_ratio,
            ),
        )


class ParallelMaskNet(RecModel):
    """Mask blocks side by side on the fields' embeddings, then an MLP (section 4.5).

    The defaults are those of BARS for Criteo (x4): 39 fields of 16, 2 blocks of 500, 5 x 1000.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 16,
        num_blocks: int = 2,
        block_dim: int = 500,
        reduction_ratio: float = 0.2,
        mlp_layers: Sequence[int] = (1000, 1000, 1000, 1000, 1000),
    ) -> None:
        check_sizes(
            {
                "num_blocks": num_blocks,
                "block_dim": block_dim,
                "reduction_ratio": reduction_ratio,
                "mlp_layers": mlp_layers,
            }
        )
        super().__init__(
            SparseArch(schema, embedding_dim),
            ParallelMaskNetDenseArch(
                schema,
                embedding_dim=embedding_dim,
                num_blocks=num_blocks,
                block_dim=block_dim,
                reduction_ratio=reduction_ratio,
                mlp_layers=mlp_layers,
            ),
        )


class SerialMaskNetDenseArch(nn.Module):
    """Everything of `SerialMaskNet` after the embedding tables."""

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int,
        block_layers: Sequence[int],
        reduction_ratio: float,
    ) -> None:
        super().__init__()
        self.normed_fields = NormedFields(schema, embedding_dim)
        width = self.normed_fields.out_features
        self.mask_blocks = nn.ModuleList(
            [MaskBlock(width, a, b, reduction_ratio) for a, b in pairwise([width, *block_layers])]
        )
        self.head = nn.Linear(block_layers[-1], schema.num_tasks)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        fields, hidden = self.normed_fields(dense, embedded)
        for block in self.mask_blocks:
            hidden = block(fields, hidden)
        return self.head(hidden)


class ParallelMaskNetDenseArch(nn.Module):
    """Everything of `ParallelMaskNet` after the embedding tables."""

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int,
        num_blocks: int,
        block_dim: int,
        reduction_ratio: float,
        mlp_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.normed_fields = NormedFields(schema, embedding_dim)
        width = self.normed_fields.out_features
        self.mask_blocks = nn.ModuleList(
            [MaskBlock(width, width, block_dim, reduction_ratio) for _ in range(num_blocks)]
        )
        self.mlp = mlp(num_blocks * block_dim, mlp_layers, schema.num_tasks)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        fields, normed = self.normed_fields(dense, embedded)
        blocks = [block(fields, normed) for block in self.mask_blocks]
        return self.mlp(torch.cat(blocks, dim=1))


class NormedFields(nn.Module):
    """The fields' embeddings (equation 2), and each with a LayerNorm of its own (equation 5)."""

    def __init__(self, schema: Schema, embedding_dim: int) -> None:
        super().__init__()
        self.fields = Fields(schema, embedding_dim)
        num_fields = self.fields.num_fields
        self.norms = nn.ModuleList([nn.LayerNorm(embedding_dim) for _ in range(num_fields)])
        self.out_features = num_fields * embedding_dim

    def forward(self, dense: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Fields and normed fields, both (B, number of fields * D)."""
        fields = self.fields(dense, embedded)
        chunks = torch.chunk(fields, len(self.norms), dim=1)
        normed = [norm(chunk) for norm, chunk in zip(self.norms, chunks, strict=True)]
        return fields.flatten(1), torch.cat(normed, dim=1).flatten(1)


class MaskBlock(nn.Module):
    """ReLU(LayerNorm(W (mask(fields) * hidden))): equations 3, 4, 8 and 9."""

    def __init__(
        self, field_width: int, in_features: int, out_features: int, reduction_ratio: float
    ) -> None:
        super().__init__()
        aggregation_dim = max(1, int(in_features * reduction_ratio))
        self.mask = nn.Sequential(
            nn.Linear(field_width, aggregation_dim),
            nn.ReLU(),
            nn.Linear(aggregation_dim, in_features),
        )
        self.hidden = nn.Sequential(
            nn.Linear(in_features, out_features, bias=False), nn.LayerNorm(out_features), nn.ReLU()
        )

    def forward(self, fields: Tensor, hidden: Tensor) -> Tensor:
        """(B, out_features) of `fields` (B, field_width) and `hidden` (B, in_features)."""
        return self.hidden(self.mask(fields) * hidden)
