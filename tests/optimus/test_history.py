"""Where nodes come from, through several rewrites."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from optimus.history import History, source_line


def nodes(graph: Graph, *names: str) -> list[Node]:
    return [graph.create_node("call_function", torch.relu, name=name) for name in names]


def test_origins_and_makers_pass_through_rewrites() -> None:
    a, b, c, d, e = nodes(Graph(), "a", "b", "c", "d", "e")
    history = History()
    history.note("first", [a, b], [c])
    history.note("second", [c, d], [e])
    assert history.taken_by("first") == {"a", "b"}
    assert history.taken_by("second") == {"a", "b", "d"}
    assert history.makers("e") == {"first", "second"}
    assert history.makers("a") == frozenset()
    assert [event.taken for event in history.events] == [("a", "b"), ("c", "d")]


def test_the_line_is_the_users_own() -> None:
    (node,) = nodes(Graph(), "a")
    assert source_line(node) == ""
    node.meta["stack_trace"] = (
        '  File "/home/me/model.py", line 12, in forward\n    return self.linear(x)\n'
        '  File "/env/site-packages/torch/nn/modules/linear.py", line 9, in forward\n    return F\n'
    )
    assert source_line(node) == "/home/me/model.py:12: return self.linear(x)"
