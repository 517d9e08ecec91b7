"""What running a node does besides returning a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from optimus.effects import Effects, effects_of

ATEN = torch.ops.aten


def effects(target: Any, *args: Any, **kwargs: Any) -> tuple[Effects, Any]:
    """Effects of a call whose first argument is a tensor, and that argument's node."""
    graph = Graph()
    x = graph.placeholder("x")
    kwargs = {name: x if value is ... else value for name, value in kwargs.items()}
    return effects_of(graph.call_function(target, (x, *args), kwargs)), x


@pytest.mark.parametrize("target", [ATEN.relu, ATEN.relu.default, ATEN.mm, ATEN.split])
def test_operator_that_computes(target: Any) -> None:
    assert effects(target)[0].pure


@pytest.mark.parametrize("target", [ATEN.relu_, ATEN.bernoulli, ATEN.batch_norm, ATEN.add_])
def test_packet_that_does_more(target: Any) -> None:
    assert effects(target)[0].barrier


def test_packet_with_out() -> None:
    assert not effects(ATEN.mm, out=...)[0].pure


def test_overload_that_writes() -> None:
    found, x = effects(ATEN.relu_.default)
    assert found.writes == (x,) and not found.barrier
