"""What running a node does besides returning a value, in every spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optimus.effects import Effects, effects_of, is_random, turns_in_place
from tests.optimus.capture import Captured

X = torch.rand(4, 4) / 2


def all_effects(function: Callable[..., Any], *inputs: Tensor) -> list[Effects]:
    """Effects of the calls in `function`'s graph that are not pure."""
    graph = Captured(function, inputs or (X,)).module.graph
    return [found for node in graph.nodes if not (found := effects_of(node)).pure]


PURE: list[Callable[[Tensor], Any]] = [
    lambda x: torch.relu(x) + x.tanh() - F.gelu(x),
    lambda x: F.relu(x, inplace=False),
    lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)),
    lambda x: F.layer_norm(x, (4,)),
    lambda x: torch.softmax(x, -1) @ x,
    lambda x: x.view(2, 8)[:, 1:].reshape(-1).unsqueeze(0).expand(3, -1),
    lambda x: torch.cat(torch.split(x, 2, 1), 0),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: x.shape[0] * x.size(1) * x,
    lambda x: x.to(torch.float64).type_as(x),
    lambda x: torch.nn.functional.one_hot(x.argmax(-1), 4),
    lambda x: torch.zeros(3) + torch.full((3,), 2.0) + torch.arange(3),
    lambda x: x.detach() + x.clone() + x.contiguous(),
]


@pytest.mark.parametrize("function", PURE)
def test_pure(function: Callable[[Tensor], Any]) -> None:
    assert all_effects(function) == []


WRITES: list[Callable[[Tensor], Any]] = [
    lambda x: x.add_(1),
    torch.relu_,
    lambda x: F.relu(x, inplace=True),
    lambda x: F.relu(x, True),
    lambda x: F.hardtanh(x, -1.0, 1.0, True),
    lambda x: F.leaky_relu(x, 0.1, inplace=True),
    lambda x: x.__setitem__((0, 0), 1.0),
    lambda x: x[0].copy_(x[1]),
    lambda x: x.t().mul_(2),
    lambda x: x.data.mul_(2),
    lambda x: x.detach().zero_(),
    lambda x: torch.add(x, 1, out=x),
    lambda x: torch._foreach_add_([x], 1.0),
    lambda x: F.threshold_(x, 0.1, 0.0),
    lambda x: torch.Tensor.mul_(x, 2),
    lambda x: torch.ops.aten.add_.Tensor(x, x),
    lambda x: x.index_fill_(0, torch.tensor([1]), 2.0),
    lambda x: x.masked_fill_(x > 0.2, 0.0),
    lambda x: x.fill_(2),
    lambda x: F.normalize(x, out=x),
]


def iadd(x: Tensor) -> Tensor:
    x += 1
    return x


def imul_view(x: Tensor) -> Tensor:
    v = x[:, 1:]
    v *= 2
    return x


def ipow(x: Tensor) -> Tensor:
    x **= 2
    return x


@pytest.mark.parametrize("function", [*WRITES, iadd, imul_view, ipow])
def test_writes_to_the_input(function: Callable[[Tensor], Any]) -> None:
    module = Captured(function, (X.clone(),)).module
    source = next(n for n in module.graph.nodes if n.op == "placeholder")
    memory = source.meta["example_value"].untyped_storage()._cdata
    written = {
        n.meta["example_value"].untyped_storage()._cdata
        for node in module.graph.nodes
        for n in effects_of(node).writes
    }
    assert memory in written or any(effects_of(node).barrier for node in module.graph.nodes)


def test_batch_norm_writes_its_statistics() -> None:
    def train(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True)

    found = all_effects(train, X, torch.zeros(4), torch.ones(4))
    assert [len(effects.writes) for effects in found] == [2]


def test_embedding_with_max_norm_writes_its_table() -> None:
    def renormed(index: Tensor, table: Tensor) -> Tensor:
        return F.embedding(index, table, max_norm=1.0)

    found = all_effects(renormed, torch.tensor([1, 2]), X.clone())
    assert found and all(effects.writes or effects.barrier for effects in found)


RANDOM: list[Callable[[Tensor], Any]] = [
    lambda x: F.dropout(x, 0.5, True),
    lambda x: torch.dropout(x, 0.5, True),
    lambda x: F.alpha_dropout(x, 0.5, True),
    lambda x: F.feature_alpha_dropout(x[None], 0.5, True),
    lambda x: F.dropout1d(x, 0.5, True),
    lambda x: torch.rand(3) + torch.randn(3),
    torch.rand_like,
    torch.bernoulli,
    torch.Tensor.bernoulli,
    lambda x: torch.multinomial(x, 1),
    lambda x: torch.normal(x, x),
    lambda x: torch.randint(0, 3, (3,)),
    lambda x: torch.randperm(4),
    torch.poisson,
    lambda x: F.rrelu(x, training=True),
    F.gumbel_softmax,
    lambda x: x.clone().normal_(),
    lambda x: x.clone().uniform_(),
    lambda x: x.clone().exponential_(),
    lambda x: torch.empty_like(x).bernoulli_(0.5),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0],
    lambda x: F.multi_head_attention_forward(
        x[:, None], x[:, None], x[:, None], 4, 2, torch.rand(12, 4), None, None, None, False,
        0.5, torch.rand(4, 4), None,
    )[0],
]  # fmt: skip


@pytest.mark.parametrize("function", RANDOM)
def test_random(function: Callable[[Tensor], Any]) -> None:
    assert any(effects.random for effects in all_effects(function))


def with_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def with_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x


def with_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


def checkpointed(x: Tensor) -> Tensor:
    result: Tensor = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)
    return result


def checked(x: Tensor) -> Tensor:
    torch._assert_async(x.sum() > 0)
    return x * 2


def checked_aten(x: Tensor) -> Tensor:
    torch.ops.aten._assert_async.msg(x.sum() > 0, "negative")
    return x * 2


def mapped(x: Tensor) -> Tensor:
    return torch.vmap(torch.sin)(x)


@pytest.mark.parametrize(
    "function",
    [with_no_grad, with_autocast, checkpointed, checked, checked_aten, mapped, with_inference_mode],
)
def test_barrier(function: Callable[[Tensor], Any]) -> None:
    assert any(effects.barrier for effects in all_effects(function))


@torch.library.custom_op("optimus_tests::increment", mutates_args={"x"})
def increment(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def test_custom_operator_writes_what_its_schema_says() -> None:
    found = all_effects(increment, X.clone(), X)
    assert [len(effects.writes) for effects in found] == [1]


def test_what_is_not_known_touches_everything() -> None:
    @torch._dynamo.allow_in_graph
    def opaque(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def program(x: Tensor, y: Tensor) -> Tensor:
        return opaque(x, y) * 2

    (found,) = all_effects(program, X, X.clone())
    assert found.barrier and found.random and len(found.writes) == 2


def test_methods_of_every_object_draw_nothing() -> None:
    assert not any(is_random(name) for name in ("__eq__", "__lt__", "__invert__", "__class__"))


TURNING: list[Callable[[Tensor], Any]] = [
    lambda x: (x + 1).t_(),
    lambda x: x.exp().unsqueeze_(0),
    lambda x: torch.ops.aten.squeeze_.default(x * 2),
    lambda x: torch.Tensor.transpose_(x * 2, 0, 1),
]


@pytest.mark.parametrize("function", TURNING)
def test_turns_a_tensor_in_place(function: Callable[[Tensor], Any]) -> None:
    graph = Captured(function, (X,)).module.graph
    assert sum(map(turns_in_place, graph.nodes)) == 1


@pytest.mark.parametrize("function", [*WRITES, *RANDOM[:9], lambda x: x.t().unsqueeze(0)])
def test_turns_no_tensor(function: Callable[[Tensor], Any]) -> None:
    graph = Captured(function, (X.clone(),)).module.graph
    assert not any(map(turns_in_place, graph.nodes))
