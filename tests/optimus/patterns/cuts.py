"""Random graphs of cuts, joins and reshapes, built without Dynamo: many of them in a second."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

SHAPES = ((4, 6), (2, 3, 4), (4, 4), (2, 2, 2, 3), (6, 1))


class CutGraph:
    """A graph under construction; `pool` holds its tensors, `groups` those cut side by side."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.graph = Graph()
        self.mode = FakeTensorMode()
        self.inputs: list[Tensor] = []
        self.pool: list[Node] = []
        self.groups: list[list[Node]] = []
        for i in range(rng.randint(1, 3)):
            tensor = torch.randn(rng.choice(SHAPES), requires_grad=rng.random() < 0.7)
            node = self.graph.placeholder(f"x{i}")
            node.meta["example_value"] = self.mode.from_tensor(tensor)
            self.inputs.append(tensor)
            self.pool.append(node)

    def call(self, target: Callable[..., Any], *args: Any) -> Node:
        """A new node; raises whatever the call raises."""
        values = torch.fx.map_arg(args, lambda node: node.meta["example_value"])
        with self.mode:
            value = target(*values)
        node = self.graph.call_function(target, args)
        node.meta["example_value"] = value
        return node

    def shape(self, node: Node) -> tuple[int, ...]:
        """Sizes of a node's tensor."""
        return tuple(node.meta["example_value"].shape)

    def any(self) -> Node:
        """A tensor, likely a late one."""
        return self.pool[-1 - min(int(self.rng.expovariate(0.2)), len(self.pool) - 1)]

    def finish(self, returns_views: bool) -> GraphModule:
        """Return some tensors, those that are used nowhere among them; most are computed with."""
        ends = [node for node in self.pool if not node.users][-6:]
        outputs: list[Node] = []
        for node in dict.fromkeys((*ends, *self.rng.sample(self.pool, 1))):
            as_it_is = returns_views and self.rng.random() < 0.3
            outputs.append(node if as_it_is else self.call(torch.relu, node))
        self.graph.output(tuple(outputs))
        return GraphModule(torch.nn.Module(), self.graph)


def random_cuts(
    seed: int, num_steps: int = 16, returns_views: bool = True
) -> tuple[GraphModule, list[Tensor]]:
    """A graph of about that many steps, and inputs for it."""
    torch.manual_seed(seed)
    building = CutGraph(Random(seed))
    for _ in range(num_steps):
        step = building.rng.choice(STEPS)
        try:
            building.pool += step(building, building.any())
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
    return building.finish(returns_views), building.inputs


def _dim(building: CutGraph, node: Node) -> int:
    return building.rng.randrange(len(building.shape(node)))


def _parts(building: CutGraph, parts: Node) -> list[Node]:
    count = len(parts.meta["example_value"])
    kept = [i for i in range(count) if building.rng.random() < 0.9]
    items = [building.call(operator.getitem, parts, i) for i in kept]
    building.groups += [items] if len(items) > 1 else []
    return items


def _split(building: CutGraph, node: Node) -> list[Node]:
    dim = _dim(building, node)
    size, sizes = building.shape(node)[dim], list[int]()
    while sum(sizes) < size:
        sizes.append(building.rng.randint(building.rng.random() > 0.1, size - sum(sizes)))
    return _parts(building, building.call(torch.split, node, sizes, dim))


def _equal_split(building: CutGraph, node: Node) -> list[Node]:
    dim = _dim(building, node)
    return _parts(building, building.call(torch.split, node, building.rng.choice((1, 2)), dim))


def _unbind(building: CutGraph, node: Node) -> list[Node]:
    return _parts(building, building.call(torch.unbind, node, _dim(building, node)))


def _index(building: CutGraph, node: Node) -> list[Node]:
    parts: list[Any] = []
    for size in building.shape(node):
        start = building.rng.randrange(size)
        some = slice(start, building.rng.randint(start, size))
        parts.append(building.rng.choice((slice(None), slice(None), some, start, None)))
    return [building.call(operator.getitem, node, tuple(parts))]


def _join(building: CutGraph, node: Node) -> list[Node]:
    """Join some of what was cut side by side, all of it treated alike before."""
    rng = building.rng
    group = rng.choice(building.groups)
    start = rng.randrange(len(group))
    run = group[start : rng.randint(start, len(group)) + 1] if rng.random() < 0.4 else list(group)
    for step in rng.choice(((), (), (), (_reshape,), (_permute,), (_pointwise,), (_view,))):
        state = rng.getstate()
        made: list[Node] = []
        for part in run:
            rng.setstate(state)
            made += step(building, part)
        run = made
    if rng.random() < 0.15:
        rng.shuffle(run)
    if rng.random() < 0.2:
        run.insert(rng.randint(0, len(run)), rng.choice((node, run[0])))
    join = rng.choice((torch.cat, torch.stack))
    return [building.call(join, run, rng.randint(-2, 2))]


def _view(building: CutGraph, node: Node) -> list[Node]:
    (turned,) = _permute(building, node)
    return [building.call(torch.unsqueeze, turned, 0)]


def _slices(building: CutGraph, node: Node) -> list[Node]:
    """Ranges or places of one dimension, taken one by one."""
    dim = _dim(building, node)
    size, width = building.shape(node)[dim], building.rng.choice((0, 1, 2))
    before = (slice(None),) * dim
    places = [slice(i, i + width) if width else i for i in range(0, size, width or 1)]
    items = [building.call(operator.getitem, node, (*before, place)) for place in places]
    building.groups += [items] if len(items) > 1 else []
    return items


def _reshape(building: CutGraph, node: Node) -> list[Node]:
    sizes = list(building.shape(node))
    dim = _dim(building, node)
    kind = building.rng.randrange(4)
    if kind == 0:
        return [building.call(torch.flatten, node, dim)]
    if kind == 1:
        return [building.call(torch.unsqueeze, node, dim)]
    if kind == 2:
        return [building.call(torch.squeeze, node, dim)]
    factor = building.rng.choice((1, 2, 3))
    return [building.call(torch.reshape, node, (*sizes[:dim], factor, -1, *sizes[dim + 1 :]))]


def _permute(building: CutGraph, node: Node) -> list[Node]:
    order = list(range(len(building.shape(node))))
    building.rng.shuffle(order)
    return [building.call(torch.permute, node, tuple(order))]


def _noop(building: CutGraph, node: Node) -> list[Node]:
    target = building.rng.choice((torch.Tensor.contiguous, torch.Tensor.float))
    return [building.call(target, node)]


def _pointwise(building: CutGraph, node: Node) -> list[Node]:
    return [building.call(building.rng.choice((torch.relu, torch.sin)), node)]


def _write(building: CutGraph, node: Node) -> list[Node]:
    if building.rng.random() < 0.7:
        return []
    with building.mode:
        fresh = building.call(torch.mul, node, 2)
    building.pool.append(fresh)
    view = building.call(torch.select, fresh, 0, 0)
    building.call(torch.Tensor.mul_, view, 3)
    return [fresh, view]


STEPS: Sequence[Callable[[CutGraph, Node], list[Node]]] = (
    *[_split, _equal_split, _unbind, _slices] * 2,
    *[_join] * 8,
    _index,
    _reshape,
    _permute,
    _noop,
    _pointwise,
    _write,
)
