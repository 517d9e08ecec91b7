"""Optimizers whose step is replayed: the same updates, plain numbers for everyone else."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from optimus.capture import Session
from optimus.graphed_optimizer import _CAPTURABLE, GraphedOptimizer, host_counts, objection
from optimus.group_settings import GroupSettings
from tests.optimus.rerun import Rerun

STEPS = 10
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Capturable(Rerun):
    """The form that optimizers have on a GPU, as far as a CPU runs it."""

    rate_type = torch.float32
    capturable = True


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses the form on a CPU, where all of its operations work."""
    for kind in _CAPTURABLE:
        module = sys.modules[kind.__module__]
        name = "_get_capturable_supported_devices"  # a private name
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *_, **__: ["cpu"])


def train(make: Make, capture: Rerun | None) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    optimizer = make(parameters)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.8)
    graphed = None
    if capture is not None:
        assert objection(optimizer, capture) == ""
        graphed = GraphedOptimizer(optimizer, Session(capture))
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum(((p - 1) ** 2).sum() for p in parameters).backward()  # type: ignore[union-attr]
        optimizer.step()
        schedule.step()
        assert isinstance(optimizer.param_groups[0]["lr"], float)
    if graphed is not None:
        assert graphed.replays == STEPS - 3
        graphed.release()
    return parameters, optimizer


def _makers() -> Iterator[Any]:
    for kind in _CAPTURABLE:
        options: dict[str, Any] = {"lr": 0.05}
        yield pytest.param(lambda p, k=kind, o=options: k(p, **o), id=kind.__name__)
    yield pytest.param(lambda p: torch.optim.AdamW(p, lr=0.05, fused=True), id="fused")
    yield pytest.param(lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True), id="amsgrad")
    yield pytest.param(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), id="momentum")


@pytest.mark.parametrize("make", list(_makers()))
def test_replayed_steps_update_to_the_last_bit(make: Make) -> None:
    plain, _ = train(make, None)
    graphed, optimizer = train(make, Rerun())
    for one, other in zip(plain, graphed, strict=True):
        assert torch.equal(one, other)
    assert "GraphedOptimizer" not in repr(optimizer.step)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", [k for k in _CAPTURABLE if k is not torch.optim.SGD])
@pytest.mark.usefixtures("allowed")
def test_the_form_for_gpus_computes_the_same(kind: Any, foreach: bool) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(parameters, lr=0.05, foreach=foreach)  # type: ignore[no-any-return]

    plain, _ = train(make, None)
    graphed, optimizer = train(make, Capturable())
    for one, other in zip(plain, graphed, strict=True):
        # Bias corrections are then float32 numbers of the device, not float64 ones of the host.
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    assert not optimizer.param_groups[0]["capturable"]


@pytest.mark.usefixtures("allowed")
def test_fused_sgd_reads_its_rate_on_the_device() -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)

    plain, _ = train(make, None)
    graphed, _ = train(make, Capturable())
    for one, other in zip(plain, graphed, strict=True):
        torch.testing.assert_close(one, other)


def reasons() -> Iterator[Any]:
    yield (lambda p: torch.optim.SGD(p, lr=0.1)), "fused=True"
    yield torch.optim.Adagrad, "Adagrad is not known"
    yield (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False)), "a tensor already"
    yield (lambda p: torch.optim.Adam(p, differentiable=True)), "differentiable"
    yield torch.optim.Adam, "cannot step in a form to record"  # not on a CPU


@pytest.mark.parametrize(("make", "reason"), list(reasons()))
def test_why_an_optimizer_stays_outside(make: Make, reason: str) -> None:
    assert reason in objection(make([nn.Parameter(torch.ones(2))]), Capturable())


def test_a_copy_steps_by_itself_and_a_new_schedule_may_wrap_the_step() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    graphed = GraphedOptimizer(optimizer, Session(Rerun()))
    assert "step" not in copy.deepcopy(optimizer).__dict__
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(6):
        parameter.grad = torch.ones(2)
        optimizer.step()
        schedule.step()
    assert graphed.replays == 3
    graphed.release()
    optimizer.step()
    assert graphed.replays == 3


def test_loaded_state_is_what_is_stepped_on() -> None:
    """Loading makes new states: what was recorded would go on with the old ones."""
    found: list[torch.Tensor] = []
    for capture in (None, Rerun()):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([parameter], lr=0.1)
        if capture is not None:
            GraphedOptimizer(optimizer, Session(capture))
        saved: dict[str, Any] = {}
        for i in range(12):
            if i == 1:
                saved = copy.deepcopy(optimizer.state_dict())
            if i == 6:
                optimizer.load_state_dict(saved)
            parameter.grad = torch.full((2,), float(i))
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)


def test_counts_of_steps_are_saved_where_the_optimizer_keeps_them() -> None:
    step = torch.empty((), device="meta")  # stands for any device but the host
    saved = {"state": {0: {"step": step}}, "param_groups": [{"params": [0], "fused": True}]}
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    assert host_counts(optimizer, saved)["state"][0]["step"] is step


def test_gradients_are_dropped_or_zeroed_as_asked() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    graphed = GraphedOptimizer(optimizer, Session(Rerun()))
    gradient = parameter.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is gradient
    assert not gradient.any()
    optimizer.zero_grad()
    assert parameter.grad is None
    assert "zero_grad" in optimizer.__dict__
    assert "zero_grad" not in copy.deepcopy(optimizer).__dict__
    graphed.release()
    assert "zero_grad" not in optimizer.__dict__


def test_a_zero_grad_of_the_users_own_stays() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    own = optimizer.__dict__["zero_grad"] = lambda: None
    graphed = GraphedOptimizer(optimizer, Session(Rerun()))
    assert optimizer.zero_grad is own
    graphed.release()
    assert optimizer.zero_grad is own


Change = Callable[[torch.optim.Optimizer], object]


def _add_group(optimizer: torch.optim.Optimizer) -> None:
    new = nn.Parameter(torch.ones(3))
    new.grad = torch.ones(3)
    optimizer.add_param_group({"params": [new], "lr": 0.3})


def _change_betas_in_place(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"][0] = 0.1


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.param_groups[0].update(weight_decay=0.5),
        lambda o: o.param_groups[0].update(betas=[0.5, 0.9]),
        _change_betas_in_place,
        lambda o: o.param_groups[0].update(maximize=True),
        lambda o: o.param_groups[0]["params"].pop(),
        _add_group,
    ],
)
def test_settings_that_change_after_recording_act(change: Change) -> None:
    found: list[list[torch.Tensor]] = []
    for capture in (None, Rerun()):
        parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        optimizer.param_groups[0]["betas"] = [0.9, 0.999]
        if capture is not None:
            graphed = GraphedOptimizer(optimizer, Session(capture))
        for i in range(12):
            if i == 6:
                change(optimizer)
            for n, parameter in enumerate(parameters):
                parameter.grad = torch.full((2,), float(i + n))
            optimizer.step()
        found.append([p.detach() for group in optimizer.param_groups for p in group["params"]])
    assert graphed.replays > 5, "before and after the change"
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_frozen_setting_is_not_described_anew_and_one_that_changes_is() -> None:
    groups = [{"params": [], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}]
    settings = GroupSettings(groups)
    groups[0]["lr"] = 0.2
    assert settings.still_hold(groups)
    groups[0]["eps"] = 1e-6
    assert not settings.still_hold(groups)
    groups[0]["eps"] = [1e-6]
    assert not GroupSettings(groups).still_hold(groups), "it could change in place"
