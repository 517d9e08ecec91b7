"""DLRM-DCNv2 (MLPerf training v3; Wang et al., https://arxiv.org/abs/2008.13535)."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.models.dlrm import InteractionDCNArch
from torchrec.modules.crossnet import LowRankCrossNet

from recsys.data.schema import Schema
from recsys.models.base import RecModel, SparseArch
from recsys.models.dlrm import InteractingDenseArch, bottom_arch, over_arch


class DLRMDCNv2(RecModel):
    """DLRM in which low-rank cross layers take the place of the dot products.

    MLPerf's model is embedding_dim=128, bottom_layers=(512, 256), 3 cross layers of rank 512,
    over_layers=(1024, 1024, 512, 256).
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 16,
        bottom_layers: Sequence[int] = (512, 256),
        num_cross_layers: int = 3,
        cross_rank: int = 64,
        over_layers: Sequence[int] = (512, 256),
    ) -> None:
        if num_cross_layers < 1 or cross_rank < 1:
            raise ValueError(
                f"num_cross_layers and cross_rank must be at least 1, "
                f"are {num_cross_layers} and {cross_rank}"
            )
        width = (schema.num_sparse + 1) * embedding_dim
        super().__init__(
            SparseArch(schema, embedding_dim),
            InteractingDenseArch(
                bottom_arch(schema.num_dense, bottom_layers, embedding_dim),
                InteractionDCNArch(
                    schema.num_sparse, LowRankCrossNet(width, num_cross_layers, cross_rank)
                ),
                over_arch(width, over_layers, schema.num_tasks),
            ),
        )
