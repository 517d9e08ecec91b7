"""What others do with parameters that lie in a pack has the effect it has without packs.

Each script trains the same model twice, plain and packed, and everything it notes must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimus.backend import OptimusBackend
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing


class Towers(nn.Module):
    """Four towers, of which a call may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, x: Tensor, count: int = 4, grad: bool | None = None) -> Tensor:
        parts = torch.split(x, 4, 1)
        with torch.set_grad_enabled(torch.is_grad_enabled() if grad is None else grad):
            return torch.cat([self.towers[i](parts[i]) for i in range(count)], 1)


class Run:
    """One model in training, plain or packed; `adopted`: the optimizer steps on packs."""

    def __init__(self, packed: bool, adopted: bool = False) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Towers().double()
        self.weights = [tower.weight for tower in self.model.towers]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1)
        self.call: Any = self.model
        self.noted: list[Any] = []
        self.packing = Packing()
        if packed:
            if adopted:
                self.packing.adopt = PackedOptimizer([self.optimizer]).adopt
            backend = OptimusBackend(
                inner="aot_eager", packing=self.packing, verify=False, strict=True
            )
            self.call = torch.compile(self.model, backend=backend)

    def score(self, **options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(len(self.noted))
        x = torch.randn(5, 16, generator=generator, dtype=torch.float64)
        return self.call(x.to(self.weights[0].dtype), **options)

    def step(self, **options: Any) -> None:
        self.optimizer.zero_grad()
        self.score(**options).square().mean().backward()
        self.optimizer.step()
        self.note()

    def note(self) -> None:
        self.noted.append([p.detach().clone() for p in self.model.parameters()])


def weights_are_set_aside_for_an_evaluation(run: Run) -> None:
    shadows = [p.data.clone() for p in run.model.parameters()]
    for _ in range(3):
        run.step()
        backup = [p.data for p in run.model.parameters()]
        for p, shadow in zip(run.model.parameters(), shadows, strict=True):
            shadow.lerp_(p.data, 0.5)
            p.data = shadow
        with torch.no_grad():
            run.noted.append(run.score())
        for p, value in zip(run.model.parameters(), backup, strict=True):
            p.data = value
        run.note()


def weights_come_and_go(run: Run) -> None:
    for factor in (2, 3):
        run.step()
        backup = [p.data for p in run.model.parameters()]
        for p in run.model.parameters():
            p.data = p.data * factor
        with torch.no_grad():
            run.noted.append(run.score())
        for p, value in zip(run.model.parameters(), backup, strict=True):
            p.data = value
        run.step()


def weights_change_places(run: Run) -> None:
    run.step()
    one, other = run.weights[:2]
    one.data, other.data = other.data, one.data
    run.step()
    run.step()


def a_weight_moves_to_memory_of_somebody_else(run: Run) -> None:
    run.step()
    memory = torch.full((3, 4), 0.5, dtype=torch.float64)
    run.weights[1].data = memory
    run.step()
    memory.mul_(2)
    run.step()
    run.noted.append(memory)


def two_weights_are_one_memory(run: Run) -> None:
    run.step()
    run.weights[0].data = run.weights[1].data
    run.step()
    run.step()


def two_weights_are_one_memory_from_the_start(run: Run) -> None:
    run.weights[0].data = run.weights[1].data
    run.step()
    run.step()


def somebody_holds_all_memory(run: Run) -> None:
    state = run.model.state_dict()
    run.step()
    run.step()
    run.noted.append(list(state.values()))


def a_graph_is_gone_back_through_later(run: Run) -> None:
    run.step()
    run.optimizer.zero_grad()
    loss = run.score().square().mean()
    for p in run.model.parameters():
        p.data = p.data * 2
    (loss + run.score().square().mean()).backward()
    run.optimizer.step()
    run.note()


def a_weight_is_frozen_and_thawed(run: Run) -> None:
    run.step()
    for frozen in (True, False):
        run.optimizer.zero_grad()
        run.weights[0].requires_grad_(not frozen)
        run.step()
        run.step()


def all_weights_are_frozen_and_thawed(run: Run) -> None:
    run.step()
    for frozen in (True, False):
        run.optimizer.zero_grad()
        for weight in run.weights:
            weight.requires_grad_(not frozen)
        run.step()


def some_are_left_out_of_a_step(run: Run) -> None:
    for count in (4, 2, 4, 3, 4):
        run.step(count=count)


def some_are_left_out_after_others_were_called(run: Run) -> None:
    run.step()
    run.optimizer.zero_grad()
    loss = run.score().square().mean()
    (loss + run.score(count=2).square().mean()).backward()
    run.optimizer.step()
    run.note()


def the_model_learns_under_no_grad(run: Run) -> None:
    run.step()
    run.optimizer.zero_grad()
    with torch.no_grad():
        score = run.score(grad=True)
        run.noted.append(run.score(grad=False))
    score.square().mean().backward()
    run.optimizer.step()
    run.note()
    run.step()


def the_first_call_is_in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.score()
    run.step()
    for p in run.model.parameters():
        p.data = p.data * 2
    with torch.inference_mode():
        run.score()
    run.step()


def the_model_is_of_another_type_later(run: Run) -> None:
    run.step()
    for kind in (torch.float32, torch.float64):
        run.optimizer.zero_grad()
        run.optimizer.state.clear()
        run.model.to(kind)
        run.step()


SCRIPTS: list[Callable[[Run], None]] = [
    weights_are_set_aside_for_an_evaluation,
    weights_come_and_go,
    weights_change_places,
    a_weight_moves_to_memory_of_somebody_else,
    two_weights_are_one_memory,
    two_weights_are_one_memory_from_the_start,
    somebody_holds_all_memory,
    a_graph_is_gone_back_through_later,
    a_weight_is_frozen_and_thawed,
    all_weights_are_frozen_and_thawed,
    some_are_left_out_of_a_step,
    some_are_left_out_after_others_were_called,
    the_model_learns_under_no_grad,
    the_first_call_is_in_inference_mode,
    the_model_is_of_another_type_later,
]


@pytest.mark.parametrize("adopted", [False, True], ids=["parameters", "packs"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_script(script: Callable[[Run], None], adopted: bool) -> None:
    plain, packed = Run(False), Run(True, adopted)
    for run in (plain, packed):
        script(run)
    for one, other in zip(packed.noted, plain.noted, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_put_aside_in_evaluation_stays_a_pack() -> None:
    run = Run(True, True)
    run.step()
    whole = run.packing.packs[0].whole
    weights_are_set_aside_for_an_evaluation(run)
    run.step()
    pack = run.packing.packs[0]
    assert pack.whole is whole
    assert pack.is_intact()
    assert pack.leaf is not None


def test_pytorch_counts_who_holds_memory() -> None:
    """A private name: without it packs take members from memory that others hold."""
    assert hasattr(torch._C, "_storage_Use_Count")
