"""What is measured: models written naively, the same models fused by hand, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from benchmarks.fused.mmoe import FusedMMoE
from recsys.data.schema import Schema, SparseFeature
from recsys.models.dlrm import DLRM
from recsys.models.dlrm_dcnv2 import DLRMDCNv2
from recsys.models.mmoe import MMoE, MMoEDenseArch

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class BenchmarkModel:
    """A dense arch on (dense (B, num_dense), embedded (B, F, D)) with logits (B, num_tasks).

    `fused` makes the hand-fused twin of a naive module, with its weights; None for the controls,
    which have no repeated branches. `small` builds it at a size for a CPU.
    """

    name: str
    build: Callable[[], nn.Module]
    small: Callable[[], nn.Module]
    num_dense: int
    num_sparse: int
    dim: int
    small_dim: int
    num_tasks: int = 1
    fused: Callable[[nn.Module], nn.Module] | None = None

    def inputs(self, batch: int, device: torch.device, small: bool) -> Inputs:
        """Random inputs; the embeddings take gradients, as those of tables do."""
        dim = self.small_dim if small else self.dim
        dense = torch.randn(batch, self.num_dense, device=device)
        embedded = torch.randn(batch, self.num_sparse, dim, device=device, requires_grad=True)
        return dense, embedded


def schema(num_dense: int, num_sparse: int, num_tasks: int) -> Schema:
    """Tables of two rows: the benchmark feeds their results and never looks anything up."""
    return Schema(
        dense=tuple(f"d{i}" for i in range(num_dense)),
        sparse=tuple(SparseFeature(f"s{i}", 2) for i in range(num_sparse)),
        tasks=tuple(f"t{i}" for i in range(num_tasks)),
    )


_MMOE = schema(13, 64, 6)
_CRITEO = schema(13, 26, 1)


def _mmoe(dim: int, **sizes: object) -> nn.Module:
    return MMoE(_MMOE, embedding_dim=dim, **sizes).dense_arch  # type: ignore[arg-type]


def _dlrm(dim: int) -> nn.Module:
    bottom, over = ((512, 256), (1024, 1024, 512, 256)) if dim == 128 else ((32,), (32,))
    model = DLRM(_CRITEO, embedding_dim=dim, bottom_layers=bottom, over_layers=over)
    return model.dense_arch


def _dcnv2(dim: int) -> nn.Module:
    bottom, over = ((512, 256), (1024, 1024, 512, 256)) if dim == 128 else ((32,), (32,))
    model = DLRMDCNv2(
        _CRITEO,
        embedding_dim=dim,
        bottom_layers=bottom,
        over_layers=over,
        cross_rank=512 if dim == 128 else 8,
    )
    return model.dense_arch


MODELS = {
    model.name: model
    for model in (
        BenchmarkModel(
            "mmoe",
            lambda: _mmoe(64),
            lambda: _mmoe(8, encoder_dim=4, expert_layers=(16, 8), tower_layers=(8, 4)),
            num_dense=13,
            num_sparse=64,
            dim=64,
            small_dim=8,
            num_tasks=6,
            fused=lambda naive: FusedMMoE(cast(MMoEDenseArch, naive)),
        ),
        BenchmarkModel("dlrm", lambda: _dlrm(128), lambda: _dlrm(16), 13, 26, 128, 16),
        BenchmarkModel("dlrm_dcnv2", lambda: _dcnv2(128), lambda: _dcnv2(16), 13, 26, 128, 16),
    )
}
