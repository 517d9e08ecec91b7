"""RankMixer fused by hand: the layers of all tokens are batched GEMMs, mixing is a transpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fused.layers import BatchedLinear, FusedFields
from recsys.models.rankmixer import RankMixerBlock, RankMixerDenseArch


class FusedRankMixer(nn.Module):
    """`RankMixerDenseArch` with its weights. Raises ValueError for tokens of unequal size."""

    def __init__(self, naive: RankMixerDenseArch) -> None:
        super().__init__()
        if len(set(naive.token_sizes)) > 1:
            raise ValueError(f"the hand-fused RankMixer needs equal tokens: {naive.token_sizes}")
        self.fields = FusedFields(naive.fields)
        self.num_tokens = len(naive.token_sizes)
        self.projection = BatchedLinear(naive.projections)
        blocks: list[Any] = list(naive.blocks)
        self.blocks = nn.ModuleList([FusedBlock(block) for block in blocks])
        self.norm, self.head = naive.norm, naive.head

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        flat = self.fields(dense, embedded).flatten(1)
        tokens = flat.view(flat.shape[0], self.num_tokens, -1).transpose(0, 1)
        x = self.projection(tokens).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(dim=1)))


class FusedBlock(nn.Module):
    """`RankMixerBlock` with its weights."""

    def __init__(self, naive: RankMixerBlock) -> None:
        super().__init__()
        ffns: list[Any] = list(naive.ffns)
        self.mix_norm, self.ffn_norm = naive.mix_norm, naive.ffn_norm
        self.up = BatchedLinear(ffn[0] for ffn in ffns)
        self.down = BatchedLinear(ffn[2] for ffn in ffns)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to the same."""
        batch, num_tokens, _ = x.shape
        mixed = x.reshape(batch, num_tokens, num_tokens, -1).transpose(1, 2).reshape(x.shape)
        s = self.mix_norm(mixed + x)
        hidden = torch.nn.functional.gelu(self.up(s.transpose(0, 1)))
        return self.ffn_norm(self.down(hidden).transpose(0, 1) + s)
