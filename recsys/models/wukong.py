"""Wukong (Zhang et al., ICML 2024, https://arxiv.org/abs/2403.02545)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recsys.data.schema import Schema
from recsys.models.base import RecModel, SparseArch
from recsys.models.layers import check_sizes, mlp


class Wukong(RecModel):
    """Dense features as one more embedding; layers of a factorization machine block (fmb) beside
    a linear compression block (lcb); an MLP.

    The defaults but for embedding_dim=128 and bottom_layers=(512, 256) are TorchEasyRec's for
    Criteo.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 16,
        bottom_layers: Sequence[int] = (512, 256),
        num_layers: int = 2,
        num_lcb: int = 16,
        num_fmb: int = 16,
        num_compressed: int = 24,
        fmb_layers: Sequence[int] = (512,),
        over_layers: Sequence[int] = (512, 64),
    ) -> None:
        check_sizes(
            {
                "num_layers": num_layers,
                "num_lcb": num_lcb,
                "num_fmb": num_fmb,
                "num_compressed": num_compressed,
                "fmb_layers": fmb_layers,
                "over_layers": over_layers,
            }
        )
        super().__init__(
            SparseArch(schema, embedding_dim),
            WukongDenseArch(
                schema,
                embedding_dim=embedding_dim,
                bottom_layers=bottom_layers,
                num_layers=num_layers,
                num_lcb=num_lcb,
                num_fmb=num_fmb,
                num_compressed=num_compressed,
                fmb_layers=fmb_layers,
                over_layers=over_layers,
            ),
        )


class WukongDenseArch(nn.Module):
    """Everything of `Wukong` after the embedding tables."""

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int,
        bottom_layers: Sequence[int],
        num_layers: int,
        num_lcb: int,
        num_fmb: int,
        num_compressed: int,
        fmb_layers: Sequence[int],
        over_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.bottom: nn.Module | None = None
        num_features = schema.num_sparse
        if schema.num_dense:
            self.bottom = mlp(schema.num_dense, [*bottom_layers, embedding_dim])
            num_features += 1
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            self.layers.append(
                WukongLayer(
                    num_features,
                    embedding_dim,
                    num_lcb=num_lcb,
                    num_fmb=num_fmb,
                    num_compressed=num_compressed,
                    fmb_layers=fmb_layers,
                )
            )
            num_features = num_lcb + num_fmb
        self.over = mlp(num_features * embedding_dim, over_layers, schema.num_tasks)

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Logits (B, num_tasks) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        x = embedded
        if self.bottom is not None:
            x = torch.cat([self.bottom(dense).unsqueeze(1), x], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.over(x.flatten(1))


class WukongLayer(nn.Module):
    """LayerNorm(concat(fmb(x), lcb(x)) + x): equation 2; x is projected where the sizes differ."""

    def __init__(
        self,
        num_features: int,
        embedding_dim: int,
        *,
        num_lcb: int,
        num_fmb: int,
        num_compressed: int,
        fmb_layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.fmb = FactorizationMachineBlock(
            num_features, embedding_dim, num_fmb, num_compressed, fmb_layers
        )
        self.lcb = LinearCompressBlock(num_features, num_lcb)
        self.residual: nn.Module = nn.Identity()
        if num_features != num_lcb + num_fmb:
            self.residual = LinearCompressBlock(num_features, num_lcb + num_fmb)
        self.norm = nn.LayerNorm(embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_fmb + num_lcb, D) of `x` (B, num_features, D)."""
        return self.norm(torch.cat([self.fmb(x), self.lcb(x)], dim=1) + self.residual(x))


class FactorizationMachineBlock(nn.Module):
    """reshape(mlp(LayerNorm(flatten(x (x^T Y))))): section 3.4, with the optimised FM of 3.5."""

    def __init__(
        self,
        num_features: int,
        embedding_dim: int,
        num_fmb: int,
        num_compressed: int,
        layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.num_fmb, self.embedding_dim = num_fmb, embedding_dim
        std = num_features**-0.5
        self.weight = nn.Parameter(torch.empty(num_features, num_compressed).normal_(std=std))
        width = num_features * num_compressed
        self.norm = nn.LayerNorm(width)
        self.mlp = mlp(width, layers, num_fmb * embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_fmb, D) of `x` (B, num_features, D)."""
        compressed = torch.matmul(x.transpose(1, 2), self.weight)
        interactions = torch.bmm(x, compressed).flatten(1)
        return self.mlp(self.norm(interactions)).view(-1, self.num_fmb, self.embedding_dim)


class LinearCompressBlock(nn.Module):
    """W x: every feature of the result a weighted sum of all features (section 3.6)."""

    def __init__(self, num_features: int, num_out: int) -> None:
        super().__init__()
        std = num_features**-0.5
        self.weight = nn.Parameter(torch.empty(num_features, num_out).normal_(std=std))

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_out, D) of `x` (B, num_features, D)."""
        return torch.matmul(x.transpose(1, 2), self.weight).transpose(1, 2)
