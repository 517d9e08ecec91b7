"""Targets with the loss in them: one output is gone back through, replayed to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.optimus.graph_loop import Loop, LossInside

Losses = list[float]


def _learn(loop: Loop, loss: torch.Tensor, clip: float = 0.0) -> float:
    loop.optimizer.zero_grad()
    loss.backward()
    if clip:
        leaves = [p for group in loop.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(leaves, clip)
    loop.optimizer.step()
    loop.end()
    return loss.item()


def both(make: Callable[[], nn.Module], train: Callable[[Loop], Losses]) -> Loop:
    found: list[Losses] = []
    for graphed in (False, True):
        loop = Loop(graphed, make)
        torch.manual_seed(1)
        found.append(train(loop))
    assert found[0] == found[1], "to the last bit"
    return loop


@pytest.mark.parametrize(
    ("loss_last", "clip", "odd", "replays"), [(False, 0.05, 5, [4, 1]), (True, 0.0, 8, [9])]
)
def test_the_loss_in_the_graph_trains_the_same(
    loss_last: bool, clip: float, odd: int, replays: list[int]
) -> None:
    """Gradients are zeroed between forward and backward, as Lightning does it."""
    kept: list[torch.Tensor] = []

    def train(loop: Loop) -> Losses:
        losses: Losses = []
        for i in range(12):
            loop.begin()
            loss, logits = loop.results(i, rows=odd if i == 7 else 8)
            assert not logits.requires_grad
            kept.append(logits)
            losses.append(_learn(loop, loss / 1, clip))
            if i % 4 == 3:  # validation
                loop.module.eval()
                with torch.no_grad():
                    losses.append(float(loop.results(100 + i)[0]))
                loop.module.train()
        return losses

    loop = both(lambda: LossInside(loss_last=loss_last), train)
    assert loop.replays == replays
    half = len(kept) // 2
    assert all(map(torch.equal, kept[:half], kept[half:])), "the logits of each step, later too"


def test_logits_that_another_loss_uses_from_some_step_on() -> None:
    def train(loop: Loop) -> Losses:
        losses: Losses = []
        for i in range(10):
            loop.begin()
            loss, logits = loop.results(i)
            losses.append(_learn(loop, loss + logits.square().mean() if i > 5 else loss))
        return losses

    loop = both(lambda: LossInside(detached=False), train)
    assert loop.replays == [7]


def test_a_loss_that_is_weighed_otherwise_in_each_step() -> None:
    def train(loop: Loop) -> Losses:
        losses: Losses = []
        for i in range(10):
            loop.begin()
            losses.append(_learn(loop, loop.results(i)[0] * (0.5 + i)))
        return losses

    assert both(LossInside, train).replays == [7]


def test_a_step_that_fails_between_forward_and_backward_leaves_no_trace() -> None:
    def train(loop: Loop) -> Losses:
        losses: Losses = []
        for i in range(10):
            loop.begin()
            loss, _ = loop.results(i)
            if i == 6:
                loop.end()
                continue
            losses.append(_learn(loop, loss))
        return losses

    assert both(LossInside, train).replays == [7]


def test_frozen_parameters_get_no_gradient() -> None:
    def train(loop: Loop) -> Losses:
        loop.module.head.weight.requires_grad_(False)
        losses: Losses = []
        for i in range(10):
            loop.begin()
            losses.append(_learn(loop, loop.results(i)[0]))
        assert loop.module.head.weight.grad is None
        assert loop.module.head.bias.grad is not None
        return losses

    assert both(LossInside, train).replays == [7]
