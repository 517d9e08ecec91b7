"""Batch and Schema: sizes, metadata, movement, and no graph break under torch.compile."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsys.data import Batch, Schema, SparseFeature, fixed_hot_kjt, jagged_kjt

SCHEMA = Schema(("a", "b"), (SparseFeature("x", 10), SparseFeature("y", 7, hotness=2.0)))


def make_batch(size: int = 4) -> Batch:
    values = torch.cat([torch.arange(size) % 10, torch.arange(2 * size) % 7])
    sparse = fixed_hot_kjt(SCHEMA.keys, values, size, [1, 2])
    return Batch(torch.rand(size, 2), sparse, torch.ones(size, 1))


def test_fixed_hot_kjt_equals_torchrecs_own() -> None:
    batch = make_batch(3)
    lengths = torch.tensor([1, 1, 1, 2, 2, 2])
    theirs = KeyedJaggedTensor.from_lengths_sync(["x", "y"], batch.sparse.values(), lengths)
    assert batch.sparse.length_per_key() == theirs.length_per_key() == [3, 6]
    assert batch.sparse.offset_per_key() == theirs.offset_per_key() == [0, 3, 9]
    assert torch.equal(batch.sparse.offsets(), theirs.offsets())
    assert torch.equal(batch.sparse["y"].values(), theirs["y"].values())


def test_jagged_kjt_with_empty_bags() -> None:
    lengths = torch.tensor([[0, 2, 1], [0, 0, 0]])
    kjt = jagged_kjt(["x", "y"], torch.tensor([5, 6, 7]), lengths)
    assert kjt.length_per_key() == [3, 0]
    assert kjt.stride() == 3
    assert kjt["x"].to_dense()[1].tolist() == [5, 6]


@pytest.mark.parametrize("wrong", [5, 7])
def test_kjt_sizes_are_checked(wrong: int) -> None:
    values = torch.zeros(wrong, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{wrong} values"):
        fixed_hot_kjt(["x", "y"], values, 3)
    with pytest.raises(ValueError, match=f"{wrong} values"):
        jagged_kjt(["x", "y"], values, torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be"):
        jagged_kjt(["x"], values, torch.ones(2, 3, dtype=torch.int64))


def test_batch_is_pipelineable_and_moves() -> None:
    batch = make_batch()
    assert isinstance(batch, Pipelineable)
    assert batch.to("cpu") is batch
    moved = batch.to(torch.device("meta"))
    assert all(part.is_meta for part in (moved.dense, moved.labels, moved.sparse.values()))
    assert moved.sparse.length_per_key() == batch.sparse.length_per_key()


def test_batch_survives_pickling_with_its_metadata() -> None:
    copy = pickle.loads(pickle.dumps(make_batch()))
    assert copy.sparse.length_per_key() == [4, 8]
    SCHEMA.check(copy)


def test_schema_check_names_what_differs() -> None:
    SCHEMA.check(make_batch())
    bad = make_batch()
    bad.sparse.values()[0] = 10
    with pytest.raises(ValueError, match="x: ids run from 1 to 10, its table has 10 rows"):
        SCHEMA.check(bad)
    with pytest.raises(ValueError, match="dense shape"):
        SCHEMA.check(Batch(torch.rand(4, 3), bad.sparse, bad.labels))


def test_schema_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="repeated"):
        Schema((), (SparseFeature("x", 1), SparseFeature("x", 2)))
    with pytest.raises(ValueError, match="num_embeddings is 0"):
        SparseFeature("x", 0)
    with pytest.raises(ValueError, match="pooling is 'max'"):
        SparseFeature("x", 1, pooling="max")
    with pytest.raises(ValueError, match="task"):
        Schema((), (), tasks=())


def test_sparse_arch_compiles_without_a_graph_break() -> None:
    tables = [
        EmbeddingBagConfig(
            name=f.name, feature_names=[f.name], num_embeddings=f.num_embeddings, embedding_dim=4
        )
        for f in SCHEMA.sparse
    ]
    bags = EmbeddingBagCollection(tables=tables)

    def pooled(kjt: KeyedJaggedTensor) -> Tensor:
        return bags(kjt).values()

    kjt = make_batch(8).sparse
    compiled = torch.compile(pooled, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(kjt), pooled(kjt))
