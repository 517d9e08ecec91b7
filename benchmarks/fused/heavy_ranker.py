"""Heavy Ranker fused by hand: four mask blocks as one, ten towers as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fused.layers import BatchedLayerNorm, BatchedLinear, WideLinear
from recsys.models.heavy_ranker import HeavyRankerDenseArch


class FusedHeavyRanker(nn.Module):
    """`HeavyRankerDenseArch` with its weights."""

    def __init__(self, naive: HeavyRankerDenseArch) -> None:
        super().__init__()
        self.dense_norm = naive.dense_norm
        self.vector_norm = BatchedLayerNorm(naive.vector_norms)
        blocks: list[Any] = list(naive.mask_blocks)
        self.num_blocks = len(blocks)
        self.input_norm = BatchedLayerNorm(
            (b.input_norm for b in blocks), batch_first=False, shared_input=True
        )
        self.mask_in = WideLinear(b.mask[0] for b in blocks)
        self.mask_out = BatchedLinear(b.mask[2] for b in blocks)
        self.hidden = BatchedLinear(b.hidden for b in blocks)
        self.block_norm = BatchedLayerNorm(b.norm for b in blocks)
        self.mlp = naive.mlp
        self.towers = FusedTowers(list(naive.towers))

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        net = self.vector_norm(embedded).flatten(1)
        if self.dense_norm is not None:
            net = torch.cat([self.dense_norm(dense), net], dim=1)
        masks = torch.relu(self.mask_in(net)).view(net.shape[0], self.num_blocks, -1)
        masked = self.input_norm(net) * self.mask_out(masks.transpose(0, 1))
        hidden = self.block_norm(self.hidden(masked).transpose(0, 1))
        return self.towers(self.mlp(hidden.flatten(1)))


class FusedTowers(nn.Module):
    """All towers at once: batch norms without weights are one over all their channels."""

    def __init__(self, towers: list[Any]) -> None:
        super().__init__()
        self.num_tasks = len(towers)
        self.first = WideLinear(t[0] for t in towers)
        positions = range(3, len(towers[0]), 3)
        self.rest = nn.ModuleList([BatchedLinear(t[i] for t in towers) for i in positions])
        norms = [[t[i] for t in towers] for i in range(1, len(towers[0]), 3)]
        self.norms = nn.ModuleList([_joined_batch_norms(group) for group in norms])

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `x` (B, width)."""
        x = self.first(x)
        for norm, layer in zip(self.norms, self.rest, strict=True):
            x = torch.relu(norm(x)).view(x.shape[0], self.num_tasks, -1)
            x = layer(x.transpose(0, 1)).transpose(0, 1).flatten(1)
        return x


def _joined_batch_norms(norms: list[nn.BatchNorm1d]) -> nn.BatchNorm1d:
    """One batch norm over the channels of all, with their statistics so far."""
    channels = sum(norm.num_features for norm in norms)
    first = norms[0]
    whole = nn.BatchNorm1d(channels, eps=first.eps, momentum=first.momentum, affine=False)
    whole.running_mean = torch.cat([_tensor(norm.running_mean) for norm in norms])
    whole.running_var = torch.cat([_tensor(norm.running_var) for norm in norms])
    whole.num_batches_tracked = _tensor(first.num_batches_tracked).clone()
    whole.train(first.training)
    return whole


def _tensor(buffer: Tensor | None) -> Tensor:
    assert buffer is not None, "a batch norm that keeps no statistics"
    return buffer
