"""Every model: shapes for any schema, one graph for the dense arch, keys that do not change."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from recsys.data import Batch, Schema, SparseFeature, fixed_hot_kjt
from recsys.models.base import RecModel
from recsys.models.dlrm import DLRM
from recsys.models.dlrm_dcnv2 import DLRMDCNv2
from recsys.models.mmoe import MMoE

SCHEMAS = {
    "dense_and_sparse": Schema(
        ("d0", "d1", "d2"), (SparseFeature("a", 11), SparseFeature("keys", 7, "mean", 2.0))
    ),
    "no_dense": Schema((), (SparseFeature("a", 5),)),
    "two_tasks": Schema(("d0",), tuple(SparseFeature(n, 9) for n in "abcd"), ("click", "buy")),
}
HOTNESS = {"a": 1, "b": 1, "c": 1, "d": 1, "keys": 2}


def make_batch(schema: Schema, size: int = 6) -> Batch:
    hotness = [HOTNESS[key] for key in schema.keys]
    values = torch.cat(
        [torch.randint(f.num_embeddings, (size * HOTNESS[f.name],)) for f in schema.sparse]
    )
    return Batch(
        torch.randn(size, schema.num_dense),
        fixed_hot_kjt(schema.keys, values, size, hotness),
        torch.randint(2, (size, schema.num_tasks)).float(),
    )


def build(name: str, schema: Schema) -> RecModel:
    if name == "dlrm":
        return DLRM(schema, embedding_dim=8, bottom_layers=(6,), over_layers=(5, 4))
    if name == "dlrm_dcnv2":
        return DLRMDCNv2(
            schema, embedding_dim=8, bottom_layers=(6,), cross_rank=3, over_layers=(5,)
        )
    return MMoE(schema, embedding_dim=8, encoder_dim=4, num_experts=3, expert_layers=(6, 5))


MODELS = ["dlrm", "dlrm_dcnv2", "mmoe"]


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=list(SCHEMAS))
def schema(request: pytest.FixtureRequest) -> Schema:
    torch.manual_seed(0)
    return SCHEMAS[request.param]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def test_logits_and_gradients_for_every_parameter(name: str, schema: Schema) -> None:
    model, batch = build(name, schema), make_batch(schema)
    logits = model(batch.dense, batch.sparse)
    assert logits.shape == batch.labels.shape
    logits.sum().backward()
    assert gradients(model).keys() == dict(model.named_parameters()).keys()


def test_dense_arch_is_one_graph(name: str, schema: Schema) -> None:
    model, batch = build(name, schema), make_batch(schema)
    embedded = model.sparse_arch(batch.sparse)
    compiled = torch.compile(model.dense_arch, backend="aot_eager", fullgraph=True)
    model.dense_arch(batch.dense, embedded).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    compiled(batch.dense, model.sparse_arch(batch.sparse)).square().sum().backward()
    torch.testing.assert_close(gradients(model), expected)


def test_compiling_in_place_keeps_the_keys(name: str) -> None:
    model, batch = build(name, SCHEMAS["two_tasks"]), make_batch(SCHEMAS["two_tasks"])
    expected, keys = model(batch.dense, batch.sparse), list(model.state_dict())
    model.dense_arch.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(batch.dense, batch.sparse), expected)
    assert list(model.state_dict()) == keys
    assert all("_orig_mod" not in key for key in keys)


def test_copies_and_pickles_compute_the_same(name: str, schema: Schema) -> None:
    model, batch = build(name, schema), make_batch(schema)
    expected = model(batch.dense, batch.sparse)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(batch.dense, batch.sparse), expected)


def test_a_checkpoint_loads_into_a_fresh_model(name: str, schema: Schema) -> None:
    model, batch = build(name, schema), make_batch(schema)
    twin = build(name, schema)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(batch.dense, batch.sparse), model(batch.dense, batch.sparse))


def test_samples_do_not_mix(name: str, schema: Schema) -> None:
    model, batch = build(name, schema), make_batch(schema)
    embedded = model.sparse_arch(batch.sparse)
    together = model.dense_arch(batch.dense, embedded)
    alone = torch.cat(
        [model.dense_arch(batch.dense[i : i + 1], embedded[i : i + 1]) for i in (0, 1)]
    )
    torch.testing.assert_close(together[:2], alone)


def test_sparse_arch_pools_feature_by_feature() -> None:
    schema = SCHEMAS["dense_and_sparse"]
    model, batch = build("dlrm", schema), make_batch(schema)
    tables = [
        bag.weight for bag in model.sparse_arch.embedding_bag_collection.embedding_bags.values()
    ]
    one_hot = tables[0][batch.sparse["a"].values()]
    two_hot = tables[1][batch.sparse["keys"].values()].view(-1, 2, 8).mean(1)
    expected = torch.stack([one_hot, two_hot], dim=1)
    torch.testing.assert_close(model.sparse_arch(batch.sparse), expected)


def test_the_mmoe_of_the_benchmark_has_its_published_sizes() -> None:
    sparse = tuple(SparseFeature(f"s{i}", 2) for i in range(64))
    schema = Schema(tuple(f"d{i}" for i in range(13)), sparse, tuple("abcdef"))
    dense_arch = MMoE(schema).dense_arch
    # 65 encoders of 4 tensors, 8 experts of 4, 6 gates of 2, 6 towers of 6.
    assert len(list(dense_arch.parameters())) == 340
    shapes = [tuple(p.shape) for p in dense_arch.experts[0].parameters()]  # pyright: ignore
    assert shapes == [(512, 2080), (512,), (256, 512), (256,)]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda s: DLRM(s, over_layers=()), "over_layers is empty"),
        (lambda s: DLRM(s, embedding_dim=0), "embedding_dim is 0"),
        (lambda s: DLRMDCNv2(s, cross_rank=0), "cross_rank must be at least 1"),
        (lambda s: MMoE(s, num_experts=0), "num_experts is 0"),
        (lambda s: DLRM(Schema(("d",), ())), "no sparse feature"),
    ],
)
def test_impossible_sizes_are_refused(wrong: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wrong(SCHEMAS["two_tasks"])  # pyright: ignore
