"""What is measured: models written naively, the same models fused by hand, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.fused.heavy_ranker import FusedHeavyRanker
from benchmarks.fused.illustrative import FusedIllustrativeGraph
from benchmarks.fused.masknet import FusedParallelMaskNet, FusedSerialMaskNet
from benchmarks.fused.mmoe import FusedMMoE
from benchmarks.fused.per_feature_encoder import FusedPerFeatureEncoder
from benchmarks.fused.ple import FusedPLE
from benchmarks.fused.rankmixer import FusedRankMixer
from benchmarks.fused.wukong import FusedWukong
from benchmarks.illustrative import IllustrativeGraph
from recsys.data.schema import Schema, SparseFeature
from recsys.models.base import RecModel
from recsys.models.dlrm import DLRM
from recsys.models.dlrm_dcnv2 import DLRMDCNv2
from recsys.models.heavy_ranker import HeavyRanker
from recsys.models.masknet import ParallelMaskNet, SerialMaskNet
from recsys.models.mmoe import MMoE
from recsys.models.per_feature_encoder import PerFeatureEncoder
from recsys.models.ple import PLE
from recsys.models.rankmixer import RankMixer
from recsys.models.wukong import Wukong

Inputs = tuple[torch.Tensor, ...]
SizeName = Literal["full", "small"]


@dataclass(frozen=True)
class Size:
    """Features and layers of a model: `num_dense`, `num_sparse` embeddings of `dim`, its options.

    Criteo's 13 dense features are bucketed where the public model does that: 39 sparse ones then.
    """

    num_dense: int
    num_sparse: int
    dim: int
    num_tasks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def schema(self) -> Schema:
        """Tables of two rows: the benchmark feeds their results and never looks anything up."""
        return Schema(
            dense=tuple(f"d{i}" for i in range(self.num_dense)),
            sparse=tuple(SparseFeature(f"s{i}", 2) for i in range(self.num_sparse)),
            tasks=tuple(f"t{i}" for i in range(self.num_tasks)),
        )


@dataclass(frozen=True)
class BenchmarkModel:
    """A model's dense arch, at its public size and at a `small` one for a CPU.

    `fused` makes the hand-fused twin of a naive module, with its weights; None for the controls,
    which have no repeated branches. `amp`: whether it trains in bf16 autocast on a GPU.
    """

    name: str
    model: Callable[..., RecModel] | None
    full: Size
    small: Size
    fused: Callable[[Any], nn.Module] | None = None
    amp: bool = True

    def size(self, name: SizeName) -> Size:
        """The size called `name`."""
        return self.full if name == "full" else self.small

    def build(self, name: SizeName) -> nn.Module:
        """The naive module: (dense (B, num_dense), embedded (B, F, D)) -> logits (B, tasks)."""
        size = self.size(name)
        assert self.model is not None
        return self.model(size.schema(), embedding_dim=size.dim, **size.options).dense_arch

    def inputs(self, batch: int, device: torch.device, name: SizeName) -> Inputs:
        """Random inputs; the embeddings take gradients, as those of tables do."""
        size = self.size(name)
        dense = torch.randn(batch, size.num_dense, device=device)
        shape = batch, size.num_sparse, size.dim
        return dense, torch.randn(shape, device=device, requires_grad=True)


class Illustrative(BenchmarkModel):
    """The graph of `benchmarks.illustrative`: `num_sparse` branches on pieces of `dim` numbers."""

    def build(self, name: SizeName) -> nn.Module:
        """(B, num_sparse * dim) -> (B, 1)."""
        size = self.size(name)
        return IllustrativeGraph(size.num_sparse, size.dim)

    def inputs(self, batch: int, device: torch.device, name: SizeName) -> Inputs:
        """Random data; data take no gradient."""
        size = self.size(name)
        return (torch.randn(batch, size.num_sparse * size.dim, device=device),)


_PUBLIC_MMOE = {
    "encoder_dim": None,
    "expert_layers": (512, 256, 128),
    "tower_layers": (256, 128, 64),
}
_SMALL_MMOE = {"expert_layers": (16, 8), "tower_layers": (8, 4)}
_SMALL_OVER = {"bottom_layers": (8,), "over_layers": (8,)}
_MLPERF = {"bottom_layers": (512, 256), "over_layers": (1024, 1024, 512, 256)}
_SMALL_RANKMIXER = Size(0, 8, 8, options={"num_tokens": 4, "token_dim": 8})


def _public_mmoe(num_experts: int) -> BenchmarkModel:
    return BenchmarkModel(
        f"mmoe_{num_experts}_experts",
        MMoE,
        Size(0, 64, 16, 2, {**_PUBLIC_MMOE, "num_experts": num_experts}),
        Size(0, 4, 4, 2, {**_SMALL_MMOE, "encoder_dim": None, "num_experts": num_experts}),
        FusedMMoE,
    )


_MODELS = (
    BenchmarkModel(
        "mmoe",
        MMoE,
        Size(13, 64, 64, 6),
        Size(3, 6, 8, 3, {**_SMALL_MMOE, "encoder_dim": 4, "num_experts": 4}),
        FusedMMoE,
    ),
    _public_mmoe(3),
    _public_mmoe(8),
    BenchmarkModel(
        "ple",
        PLE,
        Size(0, 64, 16, 2),
        Size(
            0,
            4,
            4,
            2,
            {
                "expert_layers": ((12, 8), (8, 6), (6, 4)),
                "num_task_experts": (2, 3, 2),
                "num_shared_experts": (2, 3, 2),
                "tower_layers": (6, 4),
            },
        ),
        FusedPLE,
    ),
    BenchmarkModel(
        "heavy_ranker",
        HeavyRanker,
        Size(2117 + 59, 3, 200, 10, {"num_binary": 59}),
        Size(
            9,
            3,
            4,
            4,
            {
                "num_binary": 2,
                "aggregation_dim": 8,
                "block_dim": 6,
                "mlp_layers": (10,),
                "tower_layers": (8, 4),
            },
        ),
        FusedHeavyRanker,
    ),
    BenchmarkModel("rankmixer", RankMixer, Size(0, 64, 64), _SMALL_RANKMIXER, FusedRankMixer),
    BenchmarkModel(
        "rankmixer_100m",
        RankMixer,
        Size(0, 39, 16, options={"token_dim": 768, "ffn_ratio": 4}),
        _SMALL_RANKMIXER,
        FusedRankMixer,
    ),
    BenchmarkModel(
        "masknet",
        SerialMaskNet,
        Size(0, 39, 10),
        Size(2, 4, 4, options={"block_layers": (8, 8, 8)}),
        FusedSerialMaskNet,
    ),
    BenchmarkModel(
        "masknet_parallel",
        ParallelMaskNet,
        Size(0, 39, 16),
        Size(2, 4, 4, options={"block_dim": 6, "mlp_layers": (8, 8)}),
        FusedParallelMaskNet,
    ),
    BenchmarkModel(
        "wukong",
        Wukong,
        Size(13, 26, 128),
        Size(
            3,
            5,
            4,
            options={
                **_SMALL_OVER,
                "num_lcb": 3,
                "num_fmb": 3,
                "num_compressed": 2,
                "fmb_layers": (8,),
            },
        ),
        FusedWukong,
    ),
    BenchmarkModel(
        "per_feature_encoder",
        PerFeatureEncoder,
        Size(0, 64, 64),
        Size(3, 6, 8, options={"hidden_dim": 6, "encoder_dim": 4, "over_layers": (8,)}),
        FusedPerFeatureEncoder,
    ),
    Illustrative(
        "illustrative",
        None,
        Size(0, 1052, 16),
        Size(0, 8, 4),
        FusedIllustrativeGraph,
        amp=False,
    ),
    BenchmarkModel(
        "dlrm", DLRM, Size(13, 26, 128, options=_MLPERF), Size(3, 5, 8, options=_SMALL_OVER)
    ),
    BenchmarkModel(
        "dlrm_dcnv2",
        DLRMDCNv2,
        Size(13, 26, 128, options={**_MLPERF, "cross_rank": 512}),
        Size(3, 5, 8, options={**_SMALL_OVER, "cross_rank": 4}),
    ),
)
MODELS = {model.name: model for model in _MODELS}
