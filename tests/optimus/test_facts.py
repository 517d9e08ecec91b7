"""What is remembered of nodes holds no longer than it is true, and no node is kept for it."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from optimus.editor import Editor
from optimus.facts import Facts, changed, kept, until_change
from optimus.legality import Legality
from optimus.ops import arguments
from optimus.pieces import piece_of


def placeholder(name: str = "x") -> Node:
    return Graph().placeholder(name)


def test_answers_hold_until_a_change() -> None:
    asked: list[Node] = []

    @until_change
    def number(node: Node) -> int:
        asked.append(node)
        return len(asked)

    node, other = placeholder(), placeholder("y")
    assert (number(node), number(node)) == (1, 2)  # nobody would say that it has changed
    with kept():
        assert (number(node), number(other), number(node)) == (3, 4, 3)
        changed()
        assert number(node) == 5
        with kept():
            assert number(node) == 5
    assert number(node) == 6


@pytest.mark.parametrize("inside", [True, False])
def test_no_node_is_kept_alive(inside: bool) -> None:
    table = Facts[str]()
    node = placeholder()
    gone = weakref.ref(node)
    if inside:
        with kept():
            table.of[node] = "read"
            assert table.of[node] == "read"
    else:
        table.of[node] = "read"
    del node
    gc.collect()
    assert gone() is None


def fail() -> None:
    with kept():
        raise ValueError("fails")


@pytest.mark.parametrize("collects", [True, False])
def test_collecting_cycles_goes_on_as_before(collects: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with kept():
            assert not gc.isenabled()
        assert gc.isenabled() is collects
        with pytest.raises(ValueError, match="fails"):
            fail()
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_an_edit_is_a_change() -> None:
    """What is read of a part is read anew when its source has been replaced or respelled."""
    graph, mode = Graph(), FakeTensorMode()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    for node in nodes:
        with mode:
            node.meta["example_value"] = torch.empty(4, 6)
    x, y = nodes
    copy = graph.call_function(torch.clone, (x,))
    parts = graph.call_function(torch.split, (copy, 3, 1))
    part = graph.call_function(operator.getitem, (parts, 1))
    graph.output((part, y))
    with mode:
        copy.meta["example_value"] = x.meta["example_value"].clone()
        parts.meta["example_value"] = torch.split(copy.meta["example_value"], 3, 1)
    part.meta["example_value"] = parts.meta["example_value"][1]
    editor = Editor(graph, Legality(graph), mode)
    with kept():
        assert piece_of(part) == (copy, 1, 3, 3, False)
        editor.begin((copy,), copy, drops=(x,))
        new = editor.call("clone", y)
        editor.replace(copy, new)
        editor.commit()
        assert piece_of(part) == (new, 1, 3, 3, False)
        assert (arguments(parts) or {})["split_size_or_sections"] == 3
        editor.begin((parts,), parts)
        editor.respell(parts, "split", tensor=new, split_size_or_sections=[3, 3], dim=1)
        editor.commit()
        assert (arguments(parts) or {})["split_size_or_sections"] == [3, 3]
