"""Heavy Ranker: Twitter's recap model, a parallel MaskNet with one tower a task.

https://github.com/twitter/the-algorithm-ml/tree/main/projects/home/recap; the mask blocks are those
of Wang et al., https://arxiv.org/abs/2102.07619.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recsys.data.schema import Schema
from recsys.models.base import RecModel, SparseArch
from recsys.models.layers import check_sizes, mlp


class HeavyRanker(RecModel):
    """Mask blocks on all inputs side by side, an MLP, and a tower with batch norms for each task.

    The public model reads 2117 continuous and 59 binary features and three vectors of 200 that
    other models made. Here continuous and binary features are the schema's dense features, the
    last `num_binary` of them binary, and a vector is what a sparse feature's table holds for the
    id (of a user, an author): embedding_dim=200 and three sparse features are the public sizes.
    Continuous features are squashed (sign(x) log(1 + |x|)), normalised over the batch and clamped
    to 5, then normalised together with the binary ones; each vector has a LayerNorm of its own.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 200,
        num_binary: int = 0,
        num_blocks: int = 4,
        aggregation_dim: int = 1024,
        block_dim: int = 1024,
        mlp_layers: Sequence[int] = (2048,),
        tower_layers: Sequence[int] = (256, 128),
    ) -> None:
        check_sizes(
            {
                "num_blocks": num_blocks,
                "aggregation_dim": aggregation_dim,
                "block_dim": block_dim,
                "mlp_layers": mlp_layers,
                "tower_layers": tower_layers,
            }
        )
        if not 0 <= num_binary <= schema.num_dense:
            raise ValueError(
                f"num_binary is {num_binary}, must be from 0 to the {schema.num_dense} dense "
                "features of the schema"
            )
        super().__init__(
            SparseArch(schema, embedding_dim),
            HeavyRankerDenseArch(
                schema,
                embedding_dim=embedding_dim,
                num_binary=num_binary,
                num_blocks=num_blocks,
                aggregation_dim=aggregation_dim,
                block_dim=block_dim,
                mlp_layers=mlp_layers,
                tower_layers=tower_layers,
            ),
        )


class HeavyRankerDenseArch(nn.Module):
    """Everything of `HeavyRanker` after the embedding tables."""

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int,
        num_binary: int,
        num_blocks: int,
        aggregation_dim: int,
        block_dim: int,
        mlp_layers: Sequence[int],
        tower_layers: Sequence[int],
    ) -> None:
        super().__init__()
        width = schema.num_dense + schema.num_sparse * embedding_dim
        self.dense_norm = DoubleNormLog(schema.num_dense, num_binary) if schema.num_dense else None
        self.vector_norms = nn.ModuleList([nn.LayerNorm(embedding_dim) for _ in schema.sparse])
        self.mask_blocks = nn.ModuleList(
            [MaskBlock(width, aggregation_dim, block_dim) for _ in range(num_blocks)]
        )
        self.mlp = mlp(num_blocks * block_dim, mlp_layers)
        self.towers = nn.ModuleList([_tower(mlp_layers[-1], tower_layers) for _ in schema.tasks])

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        parts = [norm(embedded[:, i]) for i, norm in enumerate(self.vector_norms)]
        if self.dense_norm is not None:
            parts = [self.dense_norm(dense), *parts]
        net = torch.cat(parts, dim=1)
        hidden = torch.cat([block(net, net) for block in self.mask_blocks], dim=1)
        shared = self.mlp(hidden)
        return torch.cat([tower(shared) for tower in self.towers], dim=1)


class DoubleNormLog(nn.Module):
    """Continuous features squashed, batch-normalised and clamped; then a LayerNorm of all."""

    def __init__(self, num_dense: int, num_binary: int, clamp: float = 5.0) -> None:
        super().__init__()
        self.num_continuous = num_dense - num_binary
        self.clamp = clamp
        self.batch_norm = nn.BatchNorm1d(self.num_continuous, affine=False, momentum=0.1)
        self.layer_norm = nn.LayerNorm(num_dense)

    def forward(self, dense: Tensor) -> Tensor:
        """(B, num_dense) to (B, num_dense); the binary features come last."""
        continuous, binary = dense[:, : self.num_continuous], dense[:, self.num_continuous :]
        squashed = torch.sign(continuous) * torch.log1p(torch.abs(continuous))
        normed = torch.clamp(self.batch_norm(squashed), -self.clamp, self.clamp)
        return self.layer_norm(torch.cat([normed, binary], dim=1))


class MaskBlock(nn.Module):
    """LayerNorm(W (LayerNorm(net) * mask(mask_input))): MaskNet's equations 3, 4 and 6."""

    def __init__(self, width: int, aggregation_dim: int, out_features: int) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(width)
        self.mask = nn.Sequential(
            nn.Linear(width, aggregation_dim), nn.ReLU(), nn.Linear(aggregation_dim, width)
        )
        self.hidden = nn.Linear(width, out_features)
        self.norm = nn.LayerNorm(out_features)

    def forward(self, net: Tensor, mask_input: Tensor) -> Tensor:
        """(B, out_features) of `net` and `mask_input`, both (B, width)."""
        masked = self.input_norm(net) * self.mask(mask_input)
        return self.norm(self.hidden(masked))


def _tower(in_features: int, layers: Sequence[int]) -> nn.Sequential:
    modules: list[nn.Module] = []
    for size in layers:
        modules += [
            nn.Linear(in_features, size),
            nn.BatchNorm1d(size, affine=False, momentum=0.1),
            nn.ReLU(),
        ]
        in_features = size
    return nn.Sequential(*modules, nn.Linear(in_features, 1))
