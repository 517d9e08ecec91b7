"""Per-feature encoders fused by hand: two batched GEMMs and one norm for all features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fused.layers import BatchedLayerNorm, BatchedLinear
from recsys.models.per_feature_encoder import PerFeatureEncoderDenseArch


class FusedPerFeatureEncoder(nn.Module):
    """`PerFeatureEncoderDenseArch` with its weights."""

    def __init__(self, naive: PerFeatureEncoderDenseArch) -> None:
        super().__init__()
        encoders: list[Any] = list(naive.encoders)
        self.up = BatchedLinear(encoder[0] for encoder in encoders)
        self.norm = BatchedLayerNorm((encoder[1] for encoder in encoders), batch_first=False)
        self.down = BatchedLinear(encoder[3] for encoder in encoders)
        self.dense_encoder, self.over = naive.dense_encoder, naive.over

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        hidden = torch.relu(self.norm(self.up(embedded.transpose(0, 1))))
        x = self.down(hidden).transpose(0, 1).flatten(1)
        if self.dense_encoder is not None:
            x = torch.cat([x, self.dense_encoder(dense)], dim=1)
        return self.over(x)
