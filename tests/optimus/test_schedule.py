"""Grouping over the whole graph: cycles, chains, diamonds, groups behind groups."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from random import Random

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from optimus.schedule import Schedule, schedule
from tests.optimus.capture import names, rewritten
from tests.optimus.handmade import batch_pointwise

Edges = Mapping[str, Sequence[str]]


def graph_of(edges: Edges) -> dict[str, Node]:
    """Nodes by name, in order, each with the nodes it reads."""
    graph = Graph()
    nodes: dict[str, Node] = {}
    for name, inputs in edges.items():
        nodes[name] = graph.create_node(
            "call_function", torch.add, tuple(nodes[i] for i in inputs), {}, name
        )
    return nodes


def plan(edges: Edges, after: Edges | None = None) -> tuple[Schedule, list[list[str]]]:
    """The schedule and its groups by name; a node's key is its name less the number at its end."""
    nodes = graph_of(edges)
    stems = {node: name.rstrip("0123456789") for name, node in nodes.items()}
    keys: dict[Node, Hashable] = {n: stem for n, stem in stems.items() if not stem.startswith("x")}
    dependencies = {nodes[n]: [nodes[m] for m in ms] for n, ms in (after or {}).items()}
    result = schedule(list(nodes.values()), keys, dependencies)
    check(result, nodes, keys, dependencies)
    return result, [[node.name for node in group] for group in result.groups]


def check(
    result: Schedule,
    nodes: Mapping[str, Node],
    keys: Mapping[Node, Hashable],
    dependencies: Mapping[Node, Sequence[Node]],
) -> None:
    """Every node once, behind what it needs; every group one block of one key."""
    assert sorted(result.order) == sorted(nodes.values())
    position = {node: i for i, node in enumerate(result.order)}
    for node in result.order:
        for earlier in (*node.all_input_nodes, *dependencies.get(node, ())):
            assert position[earlier] < position[node]
    for group in result.groups:
        first = position[group[0]]
        assert [position[node] for node in group] == list(range(first, first + len(group)))
        assert len({keys[node] for node in group}) == 1
        members = set(group)
        assert all(not members & set(node.all_input_nodes) for node in group)


def test_towers_of_equal_layers() -> None:
    edges = {"x": [], "a0": ["x"], "b0": ["a0"], "a1": ["x"], "b1": ["a1"]}
    _, groups = plan(edges)
    assert groups == [["a0", "a1"], ["b0", "b1"]]


def test_a_node_may_be_a_group_alone() -> None:
    nodes = graph_of({"x": [], "a": ["x"], "b": ["a"]})
    keys: dict[Node, Hashable] = {nodes["a"]: "a", nodes["b"]: "b"}
    assert schedule(list(nodes.values()), keys, {}).groups == []
    assert schedule(list(nodes.values()), keys, {}, {"a"}).groups == [[nodes["a"]]]


def test_crossed_pairs_make_no_cycle() -> None:
    """a0 -> b0 and b1 -> a1: merging both pairs would be a cycle, one pair is not."""
    edges = {"x": [], "a0": ["x"], "b0": ["a0"], "b1": ["x"], "a1": ["b1"]}
    _, groups = plan(edges)
    assert len(groups) == 1


def test_three_crossed_groups() -> None:
    edges = {
        "x": [], "a0": ["x"], "b0": ["a0"], "b1": ["x"], "c1": ["b1"], "c2": ["x"], "a2": ["c2"],
    }  # fmt: skip
    _, groups = plan(edges)
    assert len(groups) == 2


def test_diamond() -> None:
    edges = {"x": [], "a0": ["x"], "b0": ["a0"], "b1": ["a0"], "c0": ["b0"], "c1": ["b1"],
             "d0": ["c0", "c1"]}  # fmt: skip
    _, groups = plan(edges)
    assert groups == [["b0", "b1"], ["c0", "c1"]]


def test_diamond_of_one_key() -> None:
    edges = {"x": [], "a0": ["x"], "a1": ["a0"], "a2": ["a0"], "a3": ["a1", "a2"]}
    _, groups = plan(edges)
    assert groups == [["a1", "a2"]]


def test_group_hidden_behind_another() -> None:
    """The second layers become ready at different times, but are merged all the same."""
    edges = {"x": [], "a0": ["x"], "b0": ["a0"], "a1": ["x"], "x1": ["a1"], "b1": ["x1"],
             "b2": ["x"]}  # fmt: skip
    _, groups = plan(edges)
    assert groups == [["a0", "a1"], ["b0", "b1", "b2"]]


def test_layers_that_differ_do_not_hide_the_first() -> None:
    edges = {"x": [], "a0": ["x"], "b0": ["a0"], "a1": ["x"], "c1": ["a1"], "a2": ["x"]}
    _, groups = plan(edges)
    assert groups == [["a0", "a1", "a2"]]


def test_chain_is_no_group() -> None:
    edges = {"x": [], "a0": ["x"], "a1": ["a0"], "a2": ["a1"]}
    _, groups = plan(edges)
    assert groups == []


def test_dependencies_beyond_data() -> None:
    edges = {"x0": [], "a0": ["x0"], "x1": ["x0"], "a1": ["x0"]}
    assert plan(edges)[1] == [["a0", "a1"]]
    assert plan(edges, {"x1": ["a0"], "a1": ["x1"]})[1] == []


def test_order_stays_without_groups() -> None:
    edges = {"x0": [], "a0": ["x0"], "x1": ["a0"], "b0": ["x0"], "x2": ["b0", "x1"]}
    result, groups = plan(edges)
    assert groups == []
    assert len(result.order) == 5


@pytest.mark.parametrize("seed", range(100))
def test_random_graphs(seed: int) -> None:
    rng = Random(seed)
    edges: dict[str, list[str]] = {}
    for i in range(rng.randrange(2, 60)):
        inputs = rng.sample(list(edges), min(len(edges), rng.randrange(3)))
        edges[f"{rng.choice('abcdx')}{i}"] = inputs
    after: dict[str, list[str]] = {}
    for i, name in enumerate(edges):
        if i and rng.random() < 0.2:
            after[name] = rng.sample(list(edges)[:i], 1)
    plan(edges, after)


def towers(count: int) -> dict[str, list[str]]:
    """`count` nodes: towers of four layers of which every third differs from all others."""
    edges: dict[str, list[str]] = {"x": []}
    for i in range(count // 4):
        last = "x"
        for layer in range(4):
            stem = f"{'abcd'[layer]}{'u' * (i % 3)}{'_' if i % 7 == 0 else ''}"
            source, last = last, f"{stem}{i}"
            edges[last] = [source]
    return edges


def seconds(count: int, unique: bool) -> float:
    nodes = graph_of(towers(count))
    keys: dict[Node, Hashable] = {
        node: name if unique else name.rstrip("0123456789") for name, node in nodes.items()
    }
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        schedule(list(nodes.values()), keys, {})
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("unique", [False, True])
def test_time_grows_linearly(unique: bool) -> None:
    """Eight times the nodes take far less than 64 times as long, even if all keys differ; on a busy
    machine, whose caches are shared, more than eight times."""
    assert seconds(8000, unique) < 32 * seconds(1000, unique) + 0.01


def test_crossed_pairs_in_a_program() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(x).relu(), torch.tanh(y.relu())

    module, reports = rewritten(
        program, (torch.randn(3, 4), torch.randn(3, 4)), batch_pointwise("tanh", "relu")
    )
    assert reports["batch_pointwise"].fired == 1
    assert len(names(module)) < 10


def test_diamond_in_a_program() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        a, b = torch.relu(y[:, :2]), torch.relu(y[:, 2:])
        return torch.tanh(a) + torch.tanh(b) + torch.tanh(x)[:, :2]

    _, reports = rewritten(program, (torch.randn(3, 4),), batch_pointwise("tanh", "relu"))
    assert reports["batch_pointwise"].fired >= 2
