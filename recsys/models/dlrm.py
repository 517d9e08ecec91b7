"""DLRM (Naumov et al., https://arxiv.org/abs/1906.00091) from TorchRec's dense parts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

from recsys.data.schema import Schema
from recsys.models.base import LearnedInput, RecModel, SparseArch


class DLRM(RecModel):
    """Bottom MLP, dot products of all pairs of features, over MLP.

    `bottom_layers` and `over_layers` are the hidden sizes; the bottom MLP ends in `embedding_dim`,
    the over MLP in one logit a task. MLPerf's 13-512-256-128 and 1024-1024-512-256-1 are
    embedding_dim=128, bottom_layers=(512, 256), over_layers=(1024, 1024, 512, 256).
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 16,
        bottom_layers: Sequence[int] = (512, 256),
        over_layers: Sequence[int] = (512, 256),
    ) -> None:
        num_pairs = (schema.num_sparse + 1) * schema.num_sparse // 2
        super().__init__(
            SparseArch(schema, embedding_dim),
            InteractingDenseArch(
                bottom_arch(schema.num_dense, bottom_layers, embedding_dim),
                InteractionArch(schema.num_sparse),
                over_arch(embedding_dim + num_pairs, over_layers, schema.num_tasks),
            ),
        )


class InteractingDenseArch(nn.Module):
    """over(interaction(bottom(dense), embedded)): everything in a DLRM that is not a lookup."""

    def __init__(self, bottom: nn.Module, interaction: nn.Module, over: nn.Module) -> None:
        super().__init__()
        self.bottom_arch = bottom
        self.inter_arch = interaction
        self.over_arch = over

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        return self.over_arch(self.inter_arch(self.bottom_arch(dense), embedded))


def bottom_arch(num_dense: int, hidden: Sequence[int], embedding_dim: int) -> nn.Module:
    """MLP from the dense features to the size of an embedding; a learned vector without any."""
    if num_dense == 0:
        return LearnedInput(embedding_dim)
    return DenseArch(num_dense, [*hidden, embedding_dim])


def over_arch(in_features: int, hidden: Sequence[int], num_tasks: int) -> OverArch:
    """MLP down to one logit a task. Raises ValueError without a hidden layer."""
    if not hidden:
        raise ValueError("over_layers is empty, the over arch needs at least one hidden layer")
    return OverArch(in_features, [*hidden, num_tasks])
