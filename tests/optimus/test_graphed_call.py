"""Compiled graphs that are replayed: results and gradients to the last bit, or not replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimus.graphed_call import _key_of, _objection
from tests.optimus.graph_loop import Loop, Towers
from tests.optimus.rerun import Rerun

Losses = list[float]


def both(train: Callable[[Loop], Losses]) -> Loop:
    """The loop with graphs, after it was seen to do what the one without does."""
    found: list[tuple[Losses, torch.Tensor]] = []
    for graphed in (False, True):
        loop = Loop(graphed)
        torch.manual_seed(1)
        found.append((train(loop), torch.get_rng_state()))
    assert found[0][0] == found[1][0], "to the last bit"
    assert torch.equal(found[0][1], found[1][1]), "as many random numbers"
    return loop


def test_steps_are_replayed_and_equal_to_the_last_bit() -> None:
    weights: list[list[torch.Tensor]] = []

    def train(loop: Loop) -> Losses:
        losses = [loop.step(i) for i in range(12)]
        weights.append(list(loop.module.state_dict().values()))
        return losses

    loop = both(train)
    assert loop.replays == [9]
    assert loop.counts["optimizers"] == [
        {"name": "AdamW", "replays": 9, "outside": 3, "declined": ""}
    ]
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other), "running statistics of the batch norm included"


def test_nothing_is_recorded_before_it_was_gone_back_through() -> None:
    loop = Loop(True)
    for step in range(8):
        loop.begin()
        loop.loss(step)
        loop.end()
    assert loop.replays == [0]
    for step in range(4):
        loop.step(step)
    assert loop.replays == [3]


@pytest.mark.parametrize("options", [{}, {"set_to_none": False}])
def test_gradients_accumulate(options: dict[str, Any]) -> None:
    loop = both(lambda loop: [loop.step(i, micro=3, **options) for i in range(6)])
    assert loop.replays == [15]


def test_a_batch_of_another_shape_runs_outside_and_the_recording_stays() -> None:
    loop = both(lambda loop: [loop.step(i, rows=5 if i == 6 else 8) for i in range(12)])
    # Compiled anew for any number of rows, which is another graph.
    assert loop.replays == [3, 2]
    assert loop.counts["optimizers"][0]["replays"] == 9
    assert not loop.counts["failure"]


def test_an_odd_last_batch_every_epoch_costs_nothing_else() -> None:
    loop = Loop(True)
    for i in range(60):
        loop.step(i, rows=5 if i % 4 == 3 else 8)
    # Compiled for 8 rows, then anew for any number: that graph warms up once more.
    assert loop.replays == [0, 3 * 13]
    assert loop.graphs is not None
    assert not any(graph["declined"] for graph in loop.counts["graphs"])
    assert [call.is_recorded for call in loop.graphs._calls] == [False, True]


def test_shapes_that_never_settle_are_said() -> None:
    loop = Loop(True)
    for i in range(20):
        loop.begin()
        loop.loss(i, rows=4 + i).backward()
        loop.end()
    assert sum(loop.replays) == 0
    assert loop.graphs is not None
    assert any("change from step to step" in remark for remark in loop.graphs.remarks())


def test_results_are_the_callers_own() -> None:
    loop = Loop(True)
    kept = []
    for i in range(6):
        loop.begin()
        result = loop.forward(torch.full((8, 16), float(i)))
        result.sum().backward()
        kept.append(result.detach())
        loop.end()
    assert loop.replays == [3]
    assert len({t.data_ptr() for t in kept}) == 6


def test_an_attribute_that_changes_still_acts() -> None:
    def train(loop: Loop) -> Losses:
        losses: Losses = []
        for i in range(14):
            loop.module.temperature = 1.0 if i < 6 else 0.5
            losses.append(loop.step(i))
        return losses

    assert len(both(train).replays) == 2, "one graph of each"


def test_a_second_call_before_the_first_ones_backward_runs_outside() -> None:
    loop = both(lambda loop: [loop.step(i, calls=2) for i in range(8)])
    assert loop.replays == [6]


def test_a_step_that_goes_back_twice_stays_outside() -> None:
    loop = both(lambda loop: [loop.step(i, backwards=2) for i in range(6)])
    assert loop.replays == [0]
    assert "more than once" in loop.counts["graphs"][0]["declined"]


def test_going_back_twice_later_is_an_error_and_never_a_wrong_gradient() -> None:
    loop = Loop(True)
    for i in range(5):
        loop.step(i)
    with pytest.raises(RuntimeError, match="cuda_graphs=off"):
        loop.step(6, backwards=2)


def test_a_number_from_the_host_is_part_of_what_was_recorded() -> None:
    gpu = torch.device("cuda")
    assert _objection(torch.tensor(0.5), gpu) == ""
    assert _key_of(torch.tensor(0.5), "cuda") == 0.5
    assert "is on cpu" in _objection(torch.ones(2), gpu)


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return self.linear(x)


class ReturnsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), x.view(-1)


@pytest.mark.parametrize(
    ("make", "reason"), [(WritesInput, "writes to its inputs"), (ReturnsInput, "view of an input")]
)
def test_what_shares_memory_with_the_caller_stays_outside(make: Any, reason: str) -> None:
    loop = Loop(True, make)
    for i in range(5):
        loop.begin()
        x = torch.full((8, 16), float(i))
        found = loop.forward(x)
        loss = found[0] if isinstance(found, tuple) else found
        loss.sum().backward()
        loop.end()
        if make is WritesInput:
            assert torch.equal(x, torch.full((8, 16), i + 1.0))
    assert loop.replays == [0]
    assert reason in loop.counts["graphs"][0]["declined"]


def test_an_expanded_input_stays_outside() -> None:
    loop = Loop(True)
    for _ in range(5):
        loop.begin()
        loop.forward(torch.ones(1, 16).expand(8, 16)).sum().backward()
    assert "expanded" in loop.counts["graphs"][0]["declined"]


def test_outside_of_training_steps_nothing_is_replayed() -> None:
    loop = Loop(True)
    for i in range(6):
        loop.step(i)
    before = loop.replays
    loop.loss(7).backward()
    with torch.no_grad():
        loop.begin()
        loop.loss(8)
    assert loop.replays[0] == before[0]


def test_a_parameter_with_other_memory_is_read_where_it_is_now() -> None:
    def train(loop: Loop) -> Losses:
        losses = [loop.step(i) for i in range(6)]
        loop.module.head.weight.data = torch.ones(1, 12)
        return losses + [loop.step(i) for i in range(6, 12)]

    assert both(train).replays == [6], "three in the old place, three in the new"


@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_recording_that_fails_costs_the_graphs_only(which: int) -> None:
    def train(loop: Loop) -> Losses:
        if loop.graphs is not None:
            loop.graphs._session.capture = Rerun({which: "the host was asked"})
        return [loop.step(i) for i in range(8)]

    loop = both(train)
    assert loop.graphs is not None
    (remark,) = loop.graphs.remarks()
    assert "the host was asked" in remark
    assert "step" not in loop.optimizer.__dict__


def test_gradients_are_handed_over_without_a_copy() -> None:
    """A batched product's weight gradient comes transposed, which autograd would copy."""
    loop = Loop(True)
    for i in range(6):
        loop.step(i)
    loop.optimizer.zero_grad()
    loop.begin()
    loop.loss(6).backward()
    assert loop.graphs is not None
    leaves = [p for group in loop.optimizer.param_groups for p in group["params"]]
    outside = {id(p) for p in loop.source.parameters()}
    inside = [p for p in leaves if id(p) not in outside]
    assert any(p.dim() == 3 for p in inside), "a pack"
    for leaf in inside:
        assert leaf.grad is not None
        assert leaf.grad.data_ptr() in loop.graphs._session.static


@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_of_an_input_lies_as_the_input_and_may_be_kept(transposed: bool) -> None:
    loop = Loop(True)
    kept: list[torch.Tensor] = []
    for i in range(7):
        loop.begin()
        x = torch.full((16, 8), float(i)).t() if transposed else torch.full((8, 16), float(i))
        x.requires_grad_()
        loop.forward(x).square().sum().backward()
        assert x.grad is not None
        assert x.grad.stride() == x.stride()
        kept.append(x.grad)
        loop.end()
    assert loop.replays == [4]
    assert len({g.data_ptr() for g in kept}) == len(kept)


def test_gradients_read_between_backward_and_the_step_are_those_of_the_batch() -> None:
    def train(loop: Loop) -> Losses:
        found: Losses = []
        for i in range(8):
            loop.optimizer.zero_grad()
            loop.begin()
            loop.loss(i).backward()
            leaves = [p for group in loop.optimizer.param_groups for p in group["params"]]
            found.append(float(nn.utils.clip_grad_norm_(leaves, 0.05)))
            if i % 3:  # some steps are skipped
                loop.optimizer.step()
            loop.end()
        return found

    assert sum(both(train).replays) == 5


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class _TwoBiases(nn.Module):
    """The gradient of both biases is one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Linear(16, 8)
        self.shared, self.own = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.deep(x)) + (self.shared + self.own)


def test_gradients_that_are_one_tensor_are_scaled_once() -> None:
    found: list[list[float]] = []
    for graphed in (False, True):
        loop = Loop(graphed, _TwoBiases)
        for i in range(6):
            loop.optimizer.zero_grad()
            loop.begin()
            loop.loss(i).backward()
            nn.utils.clip_grad_norm_(loop.module.parameters(), 0.01)
            loop.optimizer.step()
            loop.end()
        found.append([float(p.grad.norm()) for p in loop.module.parameters() if p.grad is not None])
    assert found[0] == found[1]
    assert loop.replays == [3]


def test_hooks_on_a_parameter_run_with_each_gradient() -> None:
    def train(loop: Loop) -> Losses:
        found: Losses = []
        weight = loop.module.head.weight
        losses = [loop.step(i) for i in range(5)]
        weight.register_hook(lambda g: found.append(float(g.sum())))
        weight.register_post_accumulate_grad_hook(_halve)
        return losses + [loop.step(i) for i in range(5, 9)] + found

    assert both(train).replays == [6]


def test_gradients_asked_for_by_name_come() -> None:
    def train(loop: Loop) -> Losses:
        losses = [loop.step(i) for i in range(5)]
        loop.optimizer.zero_grad()
        loop.begin()
        (found,) = torch.autograd.grad(loop.loss(5), [loop.module.head.weight])
        assert loop.module.head.weight.grad is None
        loop.end()
        return [*losses, *found.flatten().tolist()]

    assert both(train).replays == [3]


def test_gradients_of_some_leaves_only() -> None:
    def train(loop: Loop) -> Losses:
        losses = [loop.step(i) for i in range(5)]
        head = loop.module.head
        loop.optimizer.zero_grad()
        loop.begin()
        loop.loss(5).backward(inputs=[head.weight])
        assert head.bias.grad is None
        assert head.weight.grad is not None
        loop.end()
        return [*losses, *head.weight.grad.flatten().tolist()]

    assert both(train).replays == [3]


def _leaves(loop: Loop) -> list[torch.Tensor]:
    """Of the packs: no parameters of the module or of the layer before it."""
    own = {id(p) for m in (loop.module, loop.source) for p in m.parameters()}
    return [p for p in loop.optimizer.param_groups[0]["params"] if id(p) not in own]


def _known_to_autograd(loop: Loop) -> set[int]:
    """The leaves behind a replayed graph."""
    loop.begin()
    loss = loop.loss(5)  # its node lives as long as it does
    link = loss.grad_fn
    while link is not None and type(link).__name__ != "_LinkBackward":
        link = link.next_functions[0][0]
    assert link is not None
    return {id(node.variable) for node, _ in link.next_functions if hasattr(node, "variable")}


def test_packs_and_what_is_small_are_one_to_autograd() -> None:
    loop = Loop(True)
    for i in range(5):
        loop.step(i)
    known = _known_to_autograd(loop)
    leaves = _leaves(loop)
    assert len(leaves) == 2
    assert not {id(leaf) for leaf in leaves} & known
    assert {id(p) for p in loop.module.parameters()} & known == {id(loop.module.head.weight)}


@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize("way", [torch.autograd.grad, torch.autograd.backward])
def test_autograd_knows_all_once_asked_by_name(call: int, way: Callable[..., Any]) -> None:
    def train(loop: Loop) -> Losses:
        found: Losses = []
        bias = loop.module.head.bias
        for i in range(7):
            loop.optimizer.zero_grad()
            loop.begin()
            loss = loop.loss(i)
            if i in (call, 5):
                found += [g.item() for g in way(loss, inputs=[bias]) or [bias.grad]]
            else:
                loss.backward()
                loop.optimizer.step()
            loop.end()
        return found

    loop = both(train)
    assert loop.replays == [4]
    assert id(loop.module.head.bias) in _known_to_autograd(loop)


def test_a_hook_on_a_bias_keeps_it_known() -> None:
    def train(loop: Loop) -> Losses:
        found: Losses = []
        loop.module.head.bias.register_hook(lambda g: found.append(float(g)))
        return [loop.step(i) for i in range(6)] + found

    loop = both(train)
    assert id(loop.module.head.bias) in _known_to_autograd(loop)


def test_hooks_on_the_leaf_of_a_pack_run() -> None:
    def train(loop: Loop) -> Losses:
        found: Losses = []
        losses = [loop.step(i) for i in range(5)]
        for leaf in _leaves(loop):
            leaf.register_hook(lambda g: found.append(float(g.flatten()[0])))
            leaf.register_post_accumulate_grad_hook(_halve)
        losses += [loop.step(i) for i in range(5, 9)]
        losses += [loop.step(i, micro=2) for i in range(9, 12)]
        assert len(found) == 2 * (4 + 6)
        return losses + found

    assert both(train).replays == [12]


def test_packs_take_no_gradient_where_others_are_asked_for_or_once_frozen() -> None:
    def train(loop: Loop) -> Losses:
        losses = [loop.step(i) for i in range(5)]
        loop.optimizer.zero_grad()
        for inputs in ([loop.module.head.weight], [loop.source.weight]):
            loop.begin()
            loop.loss(5).backward(inputs=inputs)
            assert all(leaf.grad is None for leaf in _leaves(loop))
            loop.end()
        loop.begin()
        torch.autograd.grad(loop.loss(5), [loop.source.weight])
        assert all(leaf.grad is None for leaf in _leaves(loop))
        loop.end()
        frozen, other = _leaves(loop)
        frozen.requires_grad_(False)
        losses += [loop.step(i) for i in range(6, 9)]
        assert frozen.grad is None
        assert other.grad is not None
        frozen.requires_grad_(True)
        return losses + [loop.step(i) for i in range(9, 12)]

    loop = Loop(True)
    train(loop)
    assert loop.replays == [2 + 3 + 6]


@pytest.mark.parametrize(
    ("make", "name"),
    [(Towers, "head.weight"), (Towers, "head.bias"), (_TwoBiases, "deep.weight")],
)
def test_a_parameter_that_is_frozen_later_gets_no_gradient(make: Any, name: str) -> None:
    """Not every release of Dynamo looks again. Two graphs with packs, and one without."""
    found: list[Losses] = []
    for graphed in (False, True):
        loop = Loop(graphed, make)
        losses = [loop.step(i) for i in range(6)]
        frozen = loop.module.get_parameter(name)
        loop.optimizer.zero_grad()
        frozen.requires_grad_(False)
        losses += [loop.step(i) for i in range(6, 9)]
        assert frozen.grad is None
        frozen.requires_grad_(True)
        found.append(losses + [loop.step(i) for i in range(9, 12)])
    assert found[0] == found[1]


def test_parameters_that_leave_a_pack_get_their_gradients() -> None:
    """Their memory stays what it was, and so does the graph's."""

    def train(loop: Loop) -> Losses:
        losses = [loop.step(i) for i in range(5)]
        for pack in loop.packing.packs:
            pack.release()
        return losses + [loop.step(i) for i in range(5, 12)]

    assert both(train).replays == [2 + 4]


def test_a_pytorch_that_does_not_tell_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd then knows of every leaf, and hands out all gradients."""
    monkeypatch.setattr("optimus.leaf_gradients._will_run", None)
    loop = both(lambda loop: [loop.step(i, micro=2) for i in range(6)])
    assert loop.replays == [9]
    assert loop.graphs is not None
    (call,) = loop.graphs._calls
    assert call._recording is not None
    assert not call._recording.packed


def test_under_a_transform_of_functorch_it_runs_as_it_is() -> None:
    loop = Loop(True)
    for i in range(6):
        loop.step(i)
    assert loop.graphs is not None
    (call,) = loop.graphs._calls
    loop.begin()
    call._compiled = lambda *args: args
    assert torch.func.vmap(lambda x: call(x)[0])(torch.arange(3)).tolist() == [0, 1, 2]
    assert loop.replays == [3]


def test_dynamo_keeps_no_record_of_its_time_until_release() -> None:
    config = torch._dynamo.config
    with config.patch(record_runtime_overhead=True):  # else replayed steps take more host time
        loop = Loop(True)
        loop.step(0)
        assert not config.record_runtime_overhead
        assert loop.graphs is not None
        loop.graphs.release()
        assert config.record_runtime_overhead


def test_this_pytorch_tells_what_is_asked_for() -> None:
    assert callable(torch._C._will_engine_execute_node), "else replayed steps take more host time"


def test_gradients_of_a_replay_have_none_themselves() -> None:
    loop = Loop(True)
    for i in range(5):
        loop.step(i)
    loop.optimizer.zero_grad()
    loop.begin()
    weight = loop.module.head.weight
    (found,) = torch.autograd.grad(loop.loss(5), [weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


def test_backward_runs_in_the_thread_of_the_step() -> None:
    loop = Loop(True)
    before = torch._C._is_multithreading_enabled()
    loop.begin()
    loop.begin()
    assert not torch._C._is_multithreading_enabled()
    loop.end()
    assert torch._C._is_multithreading_enabled() == before
    loop.begin()
    assert loop.graphs is not None
    loop.graphs.release()
    assert torch._C._is_multithreading_enabled() == before
