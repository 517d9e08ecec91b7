"""An optimizer that steps on packs updates, saves and loads as one that steps on parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from optimus.backend import OptimusBackend
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing


class Towers(nn.Module):
    """Four towers on pieces of one input, and a head: two packs and two single parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, 4, 1)
        mixed = [tower(p) for tower, p in zip(self.towers, parts, strict=True)]
        return self.head(torch.cat(mixed, 1))


Make = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
}


def _input(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 16, generator=generator, dtype=torch.float64)


class Run:
    """One model in training: plain, or compiled with packs from step `pack_from` on."""

    def __init__(self, make: Make, packed: bool) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Towers().double()
        self.optimizer = make(list(self.model.parameters()))
        self.call: Any = self.model
        self.packing = Packing()
        self.packer = PackedOptimizer([self.optimizer])
        if packed:
            self.packing.adopt = self.packer.adopt
            backend = OptimusBackend(
                inner="aot_eager", packing=self.packing, verify=False, strict=True
            )
            self.call = torch.compile(self.model, backend=backend)

    def step(self, seed: int, call: Any = None) -> float:
        x = _input(seed)
        loss = (call or self.call)(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_and_checkpoints_are_the_same(name: str) -> None:
    """Packs come in the middle of training, as after a baseline; state goes both ways."""
    plain, packed = Run(OPTIMIZERS[name], False), Run(OPTIMIZERS[name], True)
    assert plain.step(1) == packed.step(1, call=packed.model)
    for seed in (2, 3):
        assert plain.step(seed) == pytest.approx(packed.step(seed), rel=1e-9)
    params = packed.optimizer.param_groups[0]["params"]
    assert len(params) == 4
    assert len(packed.packing.packs) == 2
    _assert_equal(packed.optimizer.state_dict(), plain.optimizer.state_dict())
    _assert_equal(packed.model.state_dict(), plain.model.state_dict())
    # Each goes on from the other's checkpoint.
    saved = [
        copy.deepcopy((r.model.state_dict(), r.optimizer.state_dict())) for r in (plain, packed)
    ]
    for run, (model_state, optimizer_state) in zip((packed, plain), saved, strict=True):
        run.model.load_state_dict(model_state)
        run.optimizer.load_state_dict(optimizer_state)
    assert plain.step(4) == pytest.approx(packed.step(4), rel=1e-9)
    packed.packer.release()
    packed.packing.dissolve()
    assert len(packed.optimizer.param_groups[0]["params"]) == 10
    assert plain.step(5) == pytest.approx(packed.step(5, call=packed.model), rel=1e-9)
    _assert_equal(packed.optimizer.state_dict(), plain.optimizer.state_dict())


def _assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)
    elif isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            _assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_equal(a, b)
    else:
        assert one == other


def test_a_parameter_used_outside_the_graph_keeps_that_gradient() -> None:
    runs = Run(OPTIMIZERS["sgd"], False), Run(OPTIMIZERS["sgd"], True)
    for run in runs:
        for seed in (1, 2):
            x = _input(seed)
            penalty = sum(p.square().sum() for p in run.model.parameters())
            run.optimizer.zero_grad()
            (run.call(x).square().mean() + 0.1 * penalty).backward()
            run.optimizer.step()
    _assert_equal(runs[1].model.state_dict(), runs[0].model.state_dict())


def test_gradients_accumulated_before_packing_count() -> None:
    runs = Run(OPTIMIZERS["sgd"], False), Run(OPTIMIZERS["sgd"], True)
    for run in runs:
        for seed, call in ((1, run.model), (2, run.call), (3, run.call)):
            x = _input(seed)
            call(x).square().mean().backward()
        run.optimizer.step()
    _assert_equal(runs[1].model.state_dict(), runs[0].model.state_dict())


def test_clipping_and_schedules_act_on_packs() -> None:
    runs = Run(OPTIMIZERS["adamw"], False), Run(OPTIMIZERS["adamw"], True)
    for run in runs:
        schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        for seed in range(4):
            x = _input(seed)
            loss = run.call(x).square().mean()
            run.optimizer.zero_grad()
            loss.backward()
            params = [p for g in run.optimizer.param_groups for p in g["params"]]
            torch.nn.utils.clip_grad_norm_(params, 0.01)
            run.optimizer.step()
            schedule.step()
    _assert_equal(runs[1].model.state_dict(), runs[0].model.state_dict())


class Unknown(torch.optim.SGD):
    """May be anything, such as LARS, whose step depends on each parameter's norm."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: Unknown(p, lr=0.1), "Unknown is not known to update element by element"),
        (
            lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1),
            "several, parameter groups",
        ),
        (lambda p: torch.optim.SGD(p[2:], lr=0.1), "some of its parameters are in no"),
    ],
)
def test_what_cannot_be_adopted_is_packed_all_the_same(make: Make, reason: str) -> None:
    runs = Run(make, False), Run(make, True)
    for run in runs:
        for seed in range(3):
            run.step(seed)
    assert any(reason in r for r in runs[1].packing.declined)
    assert len(runs[1].packing.packs) == 2
    _assert_equal(runs[1].model.state_dict(), runs[0].model.state_dict())


def test_hooks_on_a_parameter_still_run() -> None:
    run = Run(OPTIMIZERS["sgd"], True)
    seen: list[torch.Size] = []
    run.model.towers[0].weight.register_hook(lambda grad: seen.append(grad.shape))
    run.step(1)
    assert seen == [(3, 4)]
    assert any("has hooks" in reason for reason in run.packing.declined)
