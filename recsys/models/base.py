"""What every model has in common: a sparse arch that looks ids up and a dense arch for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.data.schema import Schema
from recsys.fused import FusedTables
from recsys.optim import OptimizerConfig

_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


class SparseArch(nn.Module):
    """One embedding table for each sparse feature of `schema`, all of one `embedding_dim` D.

    Looked up one by one, until `fuse` makes it one lookup for all.
    Raises ValueError when the schema has no sparse feature or D is below 1.
    """

    def __init__(self, schema: Schema, embedding_dim: int) -> None:
        super().__init__()
        if not schema.sparse:
            raise ValueError("the schema has no sparse feature, the model needs at least one")
        if embedding_dim < 1:
            raise ValueError(f"embedding_dim is {embedding_dim}, must be at least 1")
        self.num_features = schema.num_sparse
        self.embedding_dim = embedding_dim
        self._poolings = [feature.pooling for feature in schema.sparse]
        self._fused: FusedTables | None = None
        self.embedding_bag_collection = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    # Table names become keys of a ModuleDict, where a feature called "keys" or
                    # "type" alone would clash with the dict's own attributes.
                    name=f"t_{feature.name}",
                    embedding_dim=embedding_dim,
                    num_embeddings=feature.num_embeddings,
                    feature_names=[feature.name],
                    pooling=_POOLING[feature.pooling],
                )
                for feature in schema.sparse
            ]
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Pooled embeddings (B, F, D) float32, features in the schema's order."""
        if self._fused is not None:
            return self._fused(features)
        pooled = self.embedding_bag_collection(features)
        return pooled.values().view(-1, self.num_features, self.embedding_dim)

    def use_sparse_gradients(self, from_numel: float) -> list[str]:
        """Give tables of at least `from_numel` numbers sparse gradients, all others dense ones.

        Backward then makes the rows that were looked up, not a tensor as large as the table.
        Returns the tables' names. (The bags have the option, TorchRec's collection does not.)
        """
        bags = self.embedding_bag_collection.embedding_bags
        for bag in bags.values():
            bag.sparse = bag.weight.numel() >= from_numel  # pyright: ignore
        return [name for name, bag in bags.items() if bag.sparse]

    def fuse(self, config: OptimizerConfig) -> Optimizer:
        """Look all tables up together from now on, and let backward update them as `config` says.

        Returns the optimizer that stands for these updates: see `recsys.fused.FusedTables`, also
        for the errors. To be called when the tables are on the device where they will be trained;
        moving them ends it.
        """
        self._fused = FusedTables(list(self.parameters()), self._poolings, config)
        return self._fused.optimizer

    def unfuse(self) -> None:
        """Look the tables up one by one again; their values stay."""
        if self._fused is not None:
            for weight in self.parameters():
                weight.data = weight.data.clone()
        self._fused = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        # Moved, or changed in type: the parameters leave the memory that is looked up.
        self._fused = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has tables of its own and looks them up one by one."""
        return self.__dict__ | {"_fused": None}


class RecModel(nn.Module):
    """logits = dense_arch(dense, sparse_arch(sparse)).

    `dense_arch` is what is compiled, in training with the loss (`RecModule.loss_and_logits`, which
    calls it itself): a plain module with tensors in and one tensor out, which Dynamo captures as
    one graph.
    """

    def __init__(self, sparse_arch: SparseArch, dense_arch: nn.Module) -> None:
        super().__init__()
        self.sparse_arch = sparse_arch
        self.dense_arch = dense_arch

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits (B, num_tasks) of dense features (B, num_dense) and sparse features."""
        return self.dense_arch(dense, self.sparse_arch(sparse))


class LearnedInput(nn.Module):
    """One learned vector for every sample: the bottom arch of data without dense features.

    It is what a bottom MLP makes of a constant; its dot products with the embeddings are the
    model's first-order terms.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(size).normal_(std=size**-0.5))

    def forward(self, dense: Tensor) -> Tensor:
        """(B, size) for `dense` (B, 0)."""
        return self.vector.expand(dense.shape[0], -1)
