"""What is chosen to be compiled, from watching one training step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.checkpoint import checkpoint

from optimus.discovery import CallObserver
from tests.optimus.foreign_modules import (
    BATCH,
    WIDTH,
    Branches,
    Clicks,
    LogsInForward,
    Plain,
    ReadsClicks,
    Regressor,
    SubmodulesCalled,
)

X, Y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)


def watch(root: nn.Module, step: Any) -> tuple[list[str], list[str]]:
    """Names chosen and reasons given when `step` runs under an observer."""
    observer = CallObserver(root)
    observer.attach()
    try:
        step()
    finally:
        observer.detach()
    targets, refused = observer.choose()
    return [t.name for t in targets], refused


def quiet(module: Any) -> Any:
    """The module with a `log` that needs no trainer."""
    module.log = lambda *args, **kwargs: None
    return module


def test_the_module_itself_is_chosen_when_its_forward_is_called() -> None:
    module = quiet(Regressor())
    assert watch(module, lambda: module.training_step((X, Y), 0)) == ([""], [])


def test_outermost_submodules_are_chosen_but_not_losses_and_metrics() -> None:
    module = quiet(SubmodulesCalled())
    chosen, refused = watch(module, lambda: module.training_step((X, Y), 0))
    assert chosen == ["net", "head"]
    assert refused == ["metric: a metric", "criterion: has no parameters"]


def test_a_forward_that_logs_gives_way_to_what_it_calls() -> None:
    module = quiet(LogsInForward())
    chosen, refused = watch(module, lambda: module.training_step((X, Y), 0))
    assert chosen == ["net"]
    assert refused == ["LogsInForward: logs while it runs, which breaks the graph"]


def test_a_module_that_takes_an_object_gives_way_to_what_it_calls() -> None:
    module = ReadsClicks()
    chosen, refused = watch(module, lambda: module(Clicks(X, Y)))
    assert chosen == ["net"]
    assert refused == ["ReadsClicks: takes a Clicks, which breaks the graph"]
    assert watch(module, lambda: module(Plain(X)))[0] == [""], "a dataclass of tensors is plain"


class CountsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Branches()
        self.metric = torchmetrics.MeanMetric()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        self.metric(out)
        return out


def test_a_module_that_updates_a_metric_gives_way_to_what_it_calls() -> None:
    module = CountsInside()
    assert watch(module, lambda: module(X))[0] == ["net"]


def test_single_layers_are_not_worth_it() -> None:
    root = nn.ModuleDict({"one": nn.Linear(WIDTH, 1), "many": nn.Sequential(nn.Linear(WIDTH, 1))})
    chosen, refused = watch(root, lambda: (root["one"](X), root["many"](X)))
    assert chosen == ["many"]
    assert refused == ["one: a single PyTorch layer"]


def test_what_the_user_compiled_is_left_alone() -> None:
    compiled: Any = torch.compile(Branches(), backend="eager")
    root = nn.ModuleDict({"net": compiled, "own": Branches()})
    chosen, refused = watch(root, lambda: (root["net"](X), root["own"](X)))
    assert chosen == ["own"]
    assert refused == ["net: compiled or scripted already"]


def test_a_call_that_fails_does_not_confuse_the_nesting() -> None:
    module = SubmodulesCalled()

    def step() -> None:
        with pytest.raises(RuntimeError):
            module.net(X[:, :3])
        module.head(Y)

    assert watch(module, step)[0] == ["net", "head"]


def test_modules_recomputed_in_the_backward_are_not_chosen_apart() -> None:
    module = Branches()

    def step() -> None:
        out: Any = checkpoint(module, X, use_reentrant=False)
        out.sum().backward()

    assert watch(module, step)[0] == [""]


def test_watching_leaves_no_trace() -> None:
    module = Regressor()
    before = copy.copy(module.__dict__)
    hooks = {name: len(m._forward_hooks) for name, m in module.named_modules()}
    watch(module, lambda: module(X))
    assert module.__dict__ == before
    assert {name: len(m._forward_hooks) for name, m in module.named_modules()} == hooks
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_a_log_that_the_user_replaced_is_put_back() -> None:
    module = quiet(LogsInForward())
    users = module.__dict__["log"]
    watch(module, lambda: module.training_step((X, Y), 0))
    assert module.__dict__["log"] is users
