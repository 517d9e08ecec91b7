"""Small modules that several models are made of, and the check of their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from recsys.data.schema import Schema

Size = int | float | Sequence["Size"]


def check_sizes(sizes: Mapping[str, Size]) -> None:
    """Raise ValueError, naming it, for a size that is not positive or a list that is empty."""
    for name, size in sizes.items():
        if isinstance(size, int | float):
            if size <= 0:
                raise ValueError(f"{name} is {size}, must be above 0")
        elif not size:
            raise ValueError(f"{name} is empty, the model needs at least one entry")
        else:
            check_sizes({f"{name}[{i}]": entry for i, entry in enumerate(size)})


def mlp(in_features: int, layers: Sequence[int], out_features: int | None = None) -> nn.Sequential:
    """Linear and ReLU for each of `layers`, then a linear to `out_features` if given."""
    modules: list[nn.Module] = []
    for size_in, size_out in pairwise([in_features, *layers]):
        modules += [nn.Linear(size_in, size_out), nn.ReLU()]
    if out_features is not None:
        modules.append(nn.Linear(layers[-1] if layers else in_features, out_features))
    return nn.Sequential(*modules)


class Concatenated(nn.Module):
    """Dense features and all embeddings side by side: (B, num_dense + F * D)."""

    def __init__(self, schema: Schema, embedding_dim: int) -> None:
        super().__init__()
        self.num_dense = schema.num_dense
        self.out_features = schema.num_dense + schema.num_sparse * embedding_dim

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """One vector for each sample, of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        flat = embedded.flatten(1)
        return torch.cat([dense, flat], dim=1) if self.num_dense else flat


class Fields(nn.Module):
    """Every feature as a vector of size D: (B, num_dense + F, D), dense features first.

    A dense feature becomes its value times a learned vector, plus one (AutoInt,
    https://arxiv.org/abs/1810.11921, equation 4, and a bias). Public results on Criteo bucket
    these features instead; a schema that has them as sparse features does the same here.
    """

    def __init__(self, schema: Schema, embedding_dim: int) -> None:
        super().__init__()
        self.num_fields = schema.num_dense + schema.num_sparse
        self.encoders = nn.ModuleList([nn.Linear(1, embedding_dim) for _ in schema.dense])

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        """Fields (B, num_dense + F, D) of `dense` (B, num_dense) and `embedded` (B, F, D)."""
        if not self.encoders:
            return embedded
        encoded = [encode(dense[:, i : i + 1]) for i, encode in enumerate(self.encoders)]
        return torch.cat([torch.stack(encoded, dim=1), embedded], dim=1)
