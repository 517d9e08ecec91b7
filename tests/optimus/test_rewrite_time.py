"""The time of a rewrite grows with the graph about linearly."""

from __future__ import annotations

import cProfile
import pstats

import pytest

from benchmarks.rewrite_time import GRAPHS, measure


def num_calls(name: str, size: int) -> tuple[int, int]:
    """Nodes of a graph, and Python calls that all patterns take on it: a clock that is exact."""
    module = GRAPHS[name](size)
    profile = cProfile.Profile()
    profile.enable()
    measure(module)
    profile.disable()
    return len(module.graph.nodes), pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", GRAPHS)
def test_growth(name: str) -> None:
    """Four times the nodes take less than 1.1 times as much work a node."""
    num_calls(name, 100)  # what is done once for a process
    few, work_on_few = num_calls(name, 300)
    many, work_on_many = num_calls(name, 1200)
    assert work_on_many / many < 1.1 * work_on_few / few
