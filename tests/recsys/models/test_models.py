"""Every model: shapes for any schema, one graph for the dense arch, keys that do not change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from recsys.data import Batch, Schema, SparseFeature, fixed_hot_kjt
from recsys.models.base import RecModel
from recsys.models.dlrm import DLRM
from recsys.models.dlrm_dcnv2 import DLRMDCNv2
from recsys.models.heavy_ranker import HeavyRanker
from recsys.models.masknet import ParallelMaskNet, SerialMaskNet
from recsys.models.mmoe import MMoE
from recsys.models.per_feature_encoder import PerFeatureEncoder
from recsys.models.ple import PLE
from recsys.models.rankmixer import RankMixer, mix_tokens
from recsys.models.wukong import Wukong

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


# Small, but with at least two of everything that is repeated.
BUILDS: dict[str, Callable[[Schema], RecModel]] = {
    "dlrm": partial(DLRM, embedding_dim=8, bottom_layers=(6,), over_layers=(5, 4)),
    "dlrm_dcnv2": partial(
        DLRMDCNv2, embedding_dim=8, bottom_layers=(6,), cross_rank=3, over_layers=(5,)
    ),
    "heavy_ranker": partial(
        HeavyRanker,
        embedding_dim=8,
        num_blocks=2,
        aggregation_dim=6,
        block_dim=5,
        mlp_layers=(7,),
        tower_layers=(6, 4),
    ),
    "masknet": partial(SerialMaskNet, embedding_dim=8, block_layers=(6, 5), reduction_ratio=0.5),
    "masknet_parallel": partial(ParallelMaskNet, embedding_dim=8, block_dim=5, mlp_layers=(6, 5)),
    "mmoe": partial(MMoE, embedding_dim=8, encoder_dim=4, num_experts=3, expert_layers=(6, 5)),
    "mmoe_public": partial(
        MMoE, embedding_dim=8, encoder_dim=None, num_experts=2, expert_layers=(6, 5)
    ),
    "per_feature_encoder": partial(
        PerFeatureEncoder, embedding_dim=8, hidden_dim=6, encoder_dim=4, over_layers=(5,)
    ),
    "ple": partial(
        PLE,
        embedding_dim=8,
        expert_layers=((6, 5), (5, 4)),
        num_task_experts=(2, 1),
        num_shared_experts=(2, 2),
        tower_layers=(4,),
    ),
    "rankmixer": partial(RankMixer, embedding_dim=8, num_tokens=4, token_dim=8),
    "wukong": partial(
        Wukong,
        embedding_dim=8,
        bottom_layers=(6,),
        num_lcb=2,
        num_fmb=2,
        num_compressed=3,
        fmb_layers=(6,),
        over_layers=(5,),
    ),
}
MODELS = list(BUILDS)


def build(name: str, schema: Schema) -> RecModel:
    return BUILDS[name](schema)


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


def test_dense_arch_is_one_graph_and_keeps_its_keys(name: str) -> None:
    torch._dynamo.reset()
    model, batch = build(name, SCHEMAS["two_tasks"]), make_batch(SCHEMAS["two_tasks"])
    logits, keys = model(batch.dense, batch.sparse), list(model.state_dict())
    logits.square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    model.dense_arch.compile(backend="eager", fullgraph=True)
    compiled = model(batch.dense, batch.sparse)
    compiled.square().sum().backward()
    torch.testing.assert_close(compiled, logits)
    torch.testing.assert_close(gradients(model), expected)
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
    # Batch norms mix the samples of a batch in training, as they should.
    model, batch = build(name, schema).eval(), make_batch(schema)
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


def fields(num: int, num_tasks: int = 1) -> Schema:
    sparse = tuple(SparseFeature(f"s{i}", 2) for i in range(num))
    return Schema((), sparse, tuple("abcdefghij"[:num_tasks]))


def test_the_small_rankmixer_of_the_benchmark_has_its_published_sizes() -> None:
    dense_arch = RankMixer(fields(64), embedding_dim=64).dense_arch
    # 16 tokens: a projection and two layers of two linears, 2 norms a layer, last norm, head.
    assert len(list(dense_arch.parameters())) == 16 * 2 + 2 * (16 * 4 + 4) + 2 + 2 == 172


def test_the_ple_of_the_benchmark_has_81_expert_layers() -> None:
    dense_arch = PLE(fields(64, num_tasks=2)).dense_arch
    linears = [name for name, m in dense_arch.named_modules() if isinstance(m, nn.Linear)]
    assert sum("experts" in name for name in linears) == 81
    assert dense_arch.concatenated.out_features == 1024


def test_token_mixing_gathers_one_head_of_every_token() -> None:
    x = torch.arange(2 * 3 * 6.0).view(2, 3, 6)
    expected = x.view(2, 3, 3, 2).transpose(1, 2).reshape(2, 3, 6)
    assert torch.equal(mix_tokens(x), expected)


def test_the_binary_features_of_heavy_ranker_are_not_squashed() -> None:
    schema = Schema(("c", "b0", "b1"), (SparseFeature("a", 3),))
    norm = HeavyRanker(schema, embedding_dim=2, num_binary=2).dense_arch.dense_norm
    dense = torch.tensor([[9.0, 0.0, 1.0], [-9.0, 1.0, 1.0]])
    # Of two opposite samples the batch norm makes +-1.
    expected = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 1.0, 1.0]])
    expected = torch.nn.functional.layer_norm(expected, (3,))
    torch.testing.assert_close(norm(dense), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda s: DLRM(s, over_layers=()), "over_layers is empty"),
        (lambda s: DLRM(s, embedding_dim=0), "embedding_dim is 0"),
        (lambda s: DLRMDCNv2(s, cross_rank=0), "cross_rank must be at least 1"),
        (lambda s: MMoE(s, num_experts=0), "num_experts is 0"),
        (lambda s: MMoE(s, expert_layers=()), "expert_layers is empty"),
        (lambda s: MMoE(s, encoder_dim=0), "encoder_dim is 0"),
        (lambda s: HeavyRanker(s, num_binary=2), "num_binary is 2, must be from 0 to the 1 dense"),
        (lambda s: HeavyRanker(s, mlp_layers=()), "mlp_layers is empty"),
        (lambda s: SerialMaskNet(s, block_layers=(4, 0)), r"block_layers\[1\] is 0"),
        (lambda s: ParallelMaskNet(s, reduction_ratio=0.0), "reduction_ratio is 0.0"),
        (lambda s: PerFeatureEncoder(s, hidden_dim=-1), "hidden_dim is -1"),
        (lambda s: PLE(s, num_task_experts=(2, 3)), "one entry for each level, they have 3, 2 and"),
        (lambda s: PLE(s, expert_layers=((4,), ())), r"expert_layers\[1\] is empty"),
        (lambda s: RankMixer(s, token_dim=100), "must be a multiple of num_tokens, which is 16"),
        (lambda s: RankMixer(s, num_tokens=96, token_dim=96), "there are only 80 numbers"),
        (lambda s: Wukong(s, num_compressed=0), "num_compressed is 0"),
        (lambda s: DLRM(Schema(("d",), ())), "no sparse feature"),
    ],
)
def test_impossible_sizes_are_refused(wrong: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wrong(SCHEMAS["two_tasks"])  # pyright: ignore
