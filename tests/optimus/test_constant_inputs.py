"""Inputs that are the same tensor in each step are read where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from optimus.constant_inputs import ConstantInputs
from tests.optimus.graph_loop import Loop, LossInside


def _step(loop: Loop, x: torch.Tensor, labels: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Loss and the gradient of `x` of a training step."""
    loop.optimizer.zero_grad()
    x.grad = None
    loop.begin()
    loss = loop.forward(x, labels)[0]
    loss.backward()
    loop.optimizer.step()
    loop.end()
    assert x.grad is not None
    return loss.item(), x.grad


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 16, generator=numbers).requires_grad_()
    return x, torch.rand(8, 1, generator=numbers)


def _static(loop: Loop) -> set[int]:
    assert loop.graphs is not None
    return loop.graphs._session.static


def test_a_constant_input_and_its_gradient_are_not_copied() -> None:
    found: list[list[float]] = []
    for graphed in (False, True):
        loop, batch = Loop(graphed, LossInside), _batch(0)
        steps = [_step(loop, *batch) for _ in range(7)]
        found.append([loss for loss, _ in steps] + batch[0].grad.flatten().tolist())  # type: ignore[union-attr]
    assert found[0] == found[1]
    assert loop.replays == [4]
    assert steps[-1][1].data_ptr() in _static(loop)
    assert not any(places for places, _ in loop.graphs._calls[0]._recording._copies)  # type: ignore[union-attr]


def _train(graphed: bool, batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    loop = Loop(graphed, LossInside)
    found: list[float] = []
    for i in range(14):
        loss, gradient = _step(loop, *batch(i))
        found += [loss, *gradient.flatten().tolist()]
    if graphed:
        assert loop.replays[0] >= 6
    return found


@pytest.mark.parametrize("changes", [4, 5, 9])
def test_another_tensor_in_its_place_is_read(changes: int) -> None:
    first = _batch(0)

    def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return first if i < changes else _batch(i)

    assert _train(True, batch) == _train(False, batch)


def test_what_is_written_to_it_between_steps_is_read() -> None:
    def train(graphed: bool) -> list[float]:
        x, labels = _batch(0)

        def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            if i > 5:
                with torch.no_grad():
                    x.add_(1)
            return x, labels

        return _train(graphed, batch)

    assert train(True) == train(False)


def test_a_view_of_it_gets_its_gradient() -> None:
    """It lies at the same address, but is no leaf."""

    def train(graphed: bool) -> list[float]:
        loop, (x, labels) = Loop(graphed, LossInside), _batch(0)
        found = [_step(loop, x, labels)[0] for _ in range(6)]
        loop.begin()
        x.grad = None
        loop.forward(x.view_as(x), labels)[0].backward()
        loop.end()
        assert x.grad is not None
        return found + x.grad.flatten().tolist()

    assert train(True) == train(False)


def test_gradients_that_gather_or_are_asked_for_by_name_are_the_callers_own() -> None:
    def train(graphed: bool) -> list[float]:
        loop, (x, labels) = Loop(graphed, LossInside), _batch(0)
        for _ in range(6):
            _step(loop, x, labels)
        named: list[torch.Tensor] = []
        for _ in range(3):
            loop.begin()
            loop.forward(x, labels)[0].backward()
            loop.end()
            loop.begin()
            named += torch.autograd.grad(loop.forward(x, labels)[0], [x])
            loop.end()
            loop.optimizer.step()
        assert x.grad is not None
        return torch.cat([x.grad, *named]).flatten().tolist()

    assert train(True) == train(False)


def test_writing_to_it_before_backward_is_an_error_as_in_autograd() -> None:
    loop, (x, labels) = Loop(True, LossInside), _batch(0)
    for _ in range(6):
        _step(loop, x, labels)
    loop.begin()
    loss = loop.forward(x, labels)[0]
    labels.zero_()
    with pytest.raises(RuntimeError, match="written to between forward and backward"):
        loss.backward()
    loop.end()


def test_constant_is_what_never_changed() -> None:
    watch = ConstantInputs()
    same, written = torch.zeros(2), torch.zeros(2)
    for _ in range(3):
        watch.see({0: same, 1: written, 2: torch.zeros(2)})
        written.add_(1)
    assert watch.positions() == {0}
    watch.see({0: torch.zeros(2)})
    watch.see({0: same})
    watch.see({0: same})
    assert watch.positions() == set()
