"""Finding targets and compiling them in place: nobody else may notice, and nothing may stop."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from optimus.targets import CompiledTarget, CompiledTargets, Target, named_targets


class Tower(nn.Module):
    """Two layers and a buffer that counts calls."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layers(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_arch = Tower()
        self.over_arch = nn.Sequential(nn.Linear(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.over_arch(self.dense_arch(x))

    def loss_and_scores(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.dense_arch(x)
        return scores.square().mean(), scores.detach()


def compiled(module: nn.Module, backend: Callable[..., Any] = aot_eager) -> CompiledTarget:
    made = CompiledTarget(Target("tower", module), backend, "test", None)
    made.install()
    return made


def failing_backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    raise RuntimeError("no such instruction\nand a long story")


# ---- naming ------------------------------------------------------------------------------------


def test_targets_are_found_by_name_module_or_several() -> None:
    model = Model()
    assert [t.name for t in named_targets(model, "dense_arch.layers")] == ["dense_arch.layers"]
    assert [t.name for t in named_targets(model, model.over_arch)] == ["over_arch"]
    assert [t.name for t in named_targets(model, ["dense_arch", model.over_arch])] == [
        "dense_arch",
        "over_arch",
    ]
    assert named_targets(model, model)[0].label == "Model"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("dense_arhc", "nearest: dense_arch"),
        (["dense_arch", "dense_arch.layers"], "lies inside target 'dense_arch'"),
        (["", "over_arch"], "lies inside target ''"),
        ("dense_arch.forward", "no sub-module or method of Model; nearest: dense_arch"),
        ("loss_and_score", "no sub-module or method of Model"),
        (3, "a dotted name or a module, not int"),
        (nn.Linear(1, 1), "Linear is not part of Model"),
    ],
)
def test_a_target_that_is_not_there_is_refused(wanted: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named_targets(Model(), wanted)


# ---- in place ----------------------------------------------------------------------------------


def compiled_method(model: Model) -> CompiledTarget:
    (target,) = named_targets(model, "loss_and_scores")
    made = CompiledTarget(target, aot_eager, "test", None)
    made.install()
    return made


def test_a_method_is_compiled_in_one_graph_with_the_modules_it_calls() -> None:
    model, x = Model(), torch.randn(5, 4)
    expected = copy.deepcopy(model).loss_and_scores(x)
    inner, target = compiled(model.dense_arch), compiled_method(model)
    for found, value in zip(model.loss_and_scores(x), expected, strict=True):
        assert torch.equal(found, value)
    assert (target.graphs, target.calls, inner.calls) == (1, 1, 0)
    model(x)
    assert (target.calls, inner.calls) == (1, 1), "the module's own call is another target"
    target.active = False
    model.loss_and_scores(x)
    assert (target.calls, inner.calls) == (1, 2)
    assert float(model.dense_arch.seen) == 3


def test_a_compiled_method_leaves_copies_and_the_module_as_they_were() -> None:
    model, x = Model(), torch.randn(5, 4)
    before = dict(model.__dict__)
    target = compiled_method(model)
    model.loss_and_scores(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.dense_arch.layers[0].weight.zero_()
        assert not torch.equal(twin.loss_and_scores(x)[0], model.loss_and_scores(x)[0])
    assert target.calls == 3, "the copies run uncompiled"
    target.uninstall()
    assert model.__dict__ == before


def test_a_method_that_fails_to_compile_runs_as_it_is() -> None:
    model, x = Model(), torch.randn(5, 4)
    expected = copy.deepcopy(model).loss_and_scores(x)
    (found,) = named_targets(model, "loss_and_scores")
    target = CompiledTarget(found, failing_backend, "test", None)
    target.install()
    with pytest.warns(UserWarning, match="loss_and_scores failed under torch.compile"):
        assert torch.equal(model.loss_and_scores(x)[0], expected[0])
    assert float(model.dense_arch.seen) == 1


@pytest.mark.parametrize("module", [nn.Sequential(nn.Linear(4, 1)), nn.Linear(4, 1), Tower()])
def test_modules_of_every_kind_are_compiled(module: nn.Module) -> None:
    x = torch.randn(5, 4)
    expected = module(x)
    target = compiled(module)
    assert torch.equal(module(x), expected)
    assert target.graphs == 1
    assert not target.compiled_nothing
    assert target.compile_seconds > 0


def test_a_module_that_gives_no_graph_is_reported() -> None:
    module = nn.LSTM(4, 4)
    targets = CompiledTargets([Target("rnn", module)], aot_eager, "test")
    targets.install()
    module(torch.randn(2, 4))
    assert targets.graphs == 0
    assert targets.remarks() == ["rnn: torch.compile made no graph of it, so it runs uncompiled"]


def test_keys_pickle_and_copies_are_those_of_the_plain_module() -> None:
    module, x = Tower(), torch.randn(3, 4)
    plain_keys = list(module.state_dict())
    target = compiled(module)
    module(x)
    assert list(module.state_dict()) == plain_keys
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))
        assert "_compiled_call_impl" not in twin.__dict__
    assert target.graphs == 1, "the copies run uncompiled"


class KeepsEverything(Tower):
    """Pickles its whole dictionary, as a module with its own __getstate__ may."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


def test_a_module_with_its_own_getstate_can_be_copied() -> None:
    module, x = KeepsEverything(), torch.randn(3, 4)
    target = compiled(module)
    twin = pickle.loads(pickle.dumps(module))
    assert torch.equal(twin(x), module(x))
    assert target.graphs == 1


def test_uninstall_leaves_the_module_as_it_was() -> None:
    module = Tower()
    before = dict(module.__dict__)
    target = compiled(module)
    module(torch.randn(2, 4))
    target.uninstall()
    assert module.__dict__ == before
    calls = target.calls
    module(torch.randn(2, 4))
    assert target.calls == calls


def test_a_call_that_the_user_compiled_is_put_back() -> None:
    module = Tower()
    module.compile(backend="eager")
    users = module.__dict__["_compiled_call_impl"]
    target = compiled(module)
    target.uninstall()
    assert module.__dict__["_compiled_call_impl"] is users


def test_hooks_still_run() -> None:
    module, seen = Tower(), []
    module.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    compiled(module)
    module(torch.randn(2, 4))
    assert seen == [(2, 1)]


def test_two_phases_share_neither_graphs_nor_what_was_learnt_about_shapes() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    first = compiled(module)
    for rows in (3, 4, 5):
        module(torch.randn(rows, 4))
    assert first.graphs == 2, "the second size makes the batch dynamic"
    assert first.recompiles == 1
    first.uninstall()
    shapes: list[Any] = []

    def looking(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        shapes.extend(type(i) for i in example_inputs)
        return aot_eager(graph, example_inputs)

    second = compiled(module, looking)
    module(torch.randn(3, 4))
    assert second.graphs == 1
    assert torch.SymInt not in shapes, "the second phase begins with static shapes, as the first"


def test_recompiles_are_bounded_and_the_bound_is_reported() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    targets = CompiledTargets([Target("net", module)], aot_eager, "test", dynamic=False)
    targets.install()
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=3):
        warnings.simplefilter("ignore")
        for rows in range(2, 8):
            assert module(torch.randn(rows, 4)).shape == (rows, 4)
        assert targets.graphs == 3
        assert any("no more than 3" in remark for remark in targets.remarks())


# ---- failures ----------------------------------------------------------------------------------


def test_a_failing_compile_falls_back_without_a_trace() -> None:
    module, x = Tower(), torch.randn(3, 4)
    target = compiled(module, failing_backend)
    with pytest.warns(UserWarning, match="tower failed under torch.compile.*no such instruction"):
        out = module(x)
    out.sum().backward()
    assert module.seen == 1, "the buffer is updated once"
    assert target.failure
    module(x)
    assert target.calls == 1, "it is not tried again"


@torch.library.custom_op("optimus_test::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    """Works eagerly; its description for the compiler is broken."""
    return x / 2


@halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the shape rule is wrong")


halve.register_autograd(lambda ctx, grad: grad / 2)


class UsesHalve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return halve(self.drop(self.first(x)))


def test_an_op_that_cannot_be_compiled_runs_with_the_same_random_numbers() -> None:
    module, x = UsesHalve(), torch.randn(64, 4)
    torch.manual_seed(3)
    expected = module(x)
    target = compiled(module)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="the shape rule is wrong"):
        out = module(x)
    assert torch.equal(out, expected)
    assert target.failure


def backward_fails(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    from torch._dynamo.backends.common import aot_autograd

    def refuse(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise RuntimeError("no kernel for this gradient")

    def keep(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return graph.forward

    return aot_autograd(fw_compiler=keep, bw_compiler=refuse)(graph, example_inputs)


def test_a_backward_that_cannot_be_compiled_fails_early_enough_to_fall_back() -> None:
    # Names torch._functorch.config.force_non_lazy_backward_lowering.
    module = Tower()
    target = compiled(module, backward_fails)
    with pytest.warns(UserWarning, match="no kernel for this gradient"):
        out = module(torch.randn(3, 4))
    out.sum().backward()
    assert module.layers[0].weight.grad is not None
    assert target.failure


class Refusing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            raise KeyError("a batch of one")
        return x + 1


def test_an_error_of_the_user_comes_out_unchanged_and_blames_nobody() -> None:
    module = Refusing()
    target = compiled(module)
    module(torch.ones(3))
    with pytest.raises(KeyError, match="a batch of one"):
        module(torch.ones(1))
    assert not target.failure
    assert target.active


def test_inactive_targets_run_uncompiled() -> None:
    module = Tower()
    targets = CompiledTargets([Target("tower", module)], aot_eager, "test")
    targets.install()
    targets.activate(False)
    module(torch.randn(2, 4))
    assert targets.graphs == 0
    targets.activate(True)
    module(torch.randn(2, 4))
    assert targets.graphs == 1


def test_grad_modes_give_graphs_of_their_own() -> None:
    module, x = Tower(), torch.randn(2, 4)
    target = compiled(module)
    module(x)
    with torch.no_grad():
        module(x)
    with torch.inference_mode():
        module(x)
    assert target.graphs == 3
    assert target.no_grad_graphs == 2
    module(x).sum().backward()


def test_a_target_inside_a_function_that_the_user_compiles_gives_way() -> None:
    module = Tower()
    target = compiled(module)
    outer = torch.compile(lambda x: module(x) * 2, backend="aot_eager", fullgraph=True)
    outer(torch.randn(2, 4))
    assert target.calls == 0
