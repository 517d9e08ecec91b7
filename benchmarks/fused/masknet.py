"""MaskNet fused by hand: one norm for all fields, the masks' first layers as one wide GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fused.layers import BatchedLayerNorm, BatchedLinear, FusedFields, WideLinear
from recsys.models.masknet import NormedFields, ParallelMaskNetDenseArch, SerialMaskNetDenseArch


class FusedSerialMaskNet(nn.Module):
    """`SerialMaskNetDenseArch` with its weights; second layers of masks that are equal in shape
    are one batched GEMM."""

    def __init__(self, naive: SerialMaskNetDenseArch) -> None:
        super().__init__()
        self.normed_fields = FusedNormedFields(naive.normed_fields)
        blocks: list[Any] = list(naive.mask_blocks)
        self.sizes = [block.mask[0].out_features for block in blocks]
        self.mask_in = WideLinear(block.mask[0] for block in blocks)
        self.runs = _equal_runs([block.mask[2] for block in blocks])
        outs = [[blocks[i].mask[2] for i in run] for run in self.runs]
        self.mask_out = nn.ModuleList([BatchedLinear(group) for group in outs])
        self.hidden = nn.ModuleList([block.hidden for block in blocks])
        self.head = naive.head

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        fields, x = self.normed_fields(dense, embedded)
        for layer, mask in zip(self.hidden, self._masks(fields), strict=True):
            x = layer(mask * x)
        return self.head(x)

    def _masks(self, fields: Tensor) -> list[Tensor]:
        """The mask of each block."""
        pieces = torch.relu(self.mask_in(fields)).split(self.sizes, dim=1)
        masks: list[Tensor] = []
        for run, layer in zip(self.runs, self.mask_out, strict=True):
            masks += layer(torch.stack(pieces[run.start : run.stop])).unbind()
        return masks


class FusedParallelMaskNet(nn.Module):
    """`ParallelMaskNetDenseArch` with its weights."""

    def __init__(self, naive: ParallelMaskNetDenseArch) -> None:
        super().__init__()
        self.normed_fields = FusedNormedFields(naive.normed_fields)
        blocks: list[Any] = list(naive.mask_blocks)
        self.num_blocks = len(blocks)
        self.mask_in = WideLinear(block.mask[0] for block in blocks)
        self.mask_out = BatchedLinear(block.mask[2] for block in blocks)
        self.hidden = BatchedLinear(block.hidden[0] for block in blocks)
        self.norm = BatchedLayerNorm(block.hidden[1] for block in blocks)
        self.mlp = naive.mlp

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        fields, x = self.normed_fields(dense, embedded)
        masks = torch.relu(self.mask_in(fields)).view(x.shape[0], self.num_blocks, -1)
        hidden = self.hidden(self.mask_out(masks.transpose(0, 1)) * x).transpose(0, 1)
        return self.mlp(torch.relu(self.norm(hidden)).flatten(1))


class FusedNormedFields(nn.Module):
    """`NormedFields` with one norm."""

    def __init__(self, naive: NormedFields) -> None:
        super().__init__()
        self.fields = FusedFields(naive.fields)
        self.norm = BatchedLayerNorm(naive.norms)

    def forward(self, dense: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Fields and normed fields, both (B, number of fields * D)."""
        fields = self.fields(dense, embedded)
        return fields.flatten(1), self.norm(fields).flatten(1)


def _equal_runs(linears: list[nn.Linear]) -> list[range]:
    """Consecutive linears of equal shape."""
    shapes = [linear.weight.shape for linear in linears]
    starts = [i for i in range(len(shapes)) if i == 0 or shapes[i] != shapes[i - 1]]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(shapes)], strict=True)]
