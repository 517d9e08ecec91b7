"""How long all patterns take on a graph, and how that grows with the graph.

    python -m benchmarks.rewrite_time --out benchmarks/results/rewrite_time.csv

Graphs of about 1,000, 3,000 and 10,000 nodes, written naively, as Dynamo would hand them over:
`towers` (one tensor cut into branches of linear, layer norm, activation, linear, joined again),
`slices` (the same in other words, unequal widths and activations, one weight for every third
branch), `chain` (no two operations alike side by side) and `illustrative` (the graph of
benchmarks/illustrative.py, of which its branches are nearly all). Seconds are processor time on one
core, of the shortest of `--repeats` runs, as whatever else the machine does makes a run longer;
`growth` is the exponent from the size before (1: linear). With --upstream the same graphs go
through PyTorch's own passes as well, those that work before autograd, in the set of
benchmarks.providers that was tuned by hand.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import operator
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from benchmarks.providers import TUNED
from benchmarks.rows import append, commit
from optimus.backend import copy_graph_module
from optimus.driver import rewrite
from optimus.pipeline import PIPELINE
from optimus.records import PatternReport

SIZES = (1_000, 3_000, 10_000)
BATCH = 32


class GraphBuilder:
    """A graph in Torch IR, with fake values, written call by call."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.mode = FakeTensorMode(static_shapes=True)
        self._end = self.graph.output(())
        self._first_call = self._end

    def input(self, *shape: int, requires_grad: bool = True) -> Node:
        """A placeholder, in front of all calls."""
        with self.graph.inserting_before(self._first_call), self.mode:
            node = self.graph.placeholder(f"p{len(self.graph.nodes)}")
            value = torch.empty(shape)
            parameter = torch.nn.Parameter(value) if requires_grad else value
            node.meta["example_value"] = parameter
        return node

    def call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        """A call of a function, or of a method by name."""
        with self.graph.inserting_before(self._end):
            if isinstance(target, str):
                node = self.graph.call_method(target, args, kwargs)
            else:
                node = self.graph.call_function(target, args, kwargs)
        if self._first_call is self._end:
            self._first_call = node
        values, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with self.mode:
            if isinstance(target, str):
                value = getattr(values[0], target)(*values[1:], **named)
            else:
                value = target(*values, **named)
        node.meta["example_value"] = value
        return node

    def finish(self, *outputs: Node) -> GraphModule:
        """The module that returns `outputs`."""
        self._end.args = (outputs,)
        return GraphModule(torch.nn.Module(), self.graph)


def towers(num_nodes: int) -> GraphModule:
    """Equal branches: 12 nodes each."""
    builder, count = GraphBuilder(), num_nodes // 12
    x = builder.input(BATCH, 8 * count, requires_grad=False)
    params = [
        [builder.input(*s) for s in ((6, 8), (6,), (6,), (6,), (4, 6), (4,))] for _ in range(count)
    ]
    parts = builder.call(torch.split, x, 8, 1)
    branches: list[Node] = []
    for i, (w, b, gain, shift, v, c) in enumerate(params):
        part = builder.call(operator.getitem, parts, i)
        h = builder.call(F.linear, part, w, b)
        h = builder.call(F.layer_norm, h, (6,), gain, shift, 1e-5)
        h = builder.call("relu", h)
        h = builder.call(F.linear, h, v, c)
        branches.append(builder.call(torch.tanh, h))
    joined = builder.call(torch.cat, branches, 1)
    return builder.finish(builder.call("sum", joined, 1))


def slices(num_nodes: int) -> GraphModule:
    """Branches in other words, of three widths and activations; every third shares a weight. Three
    have 26 nodes."""
    builder, count = GraphBuilder(), 3 * num_nodes // 26
    widths = [(4, 6, 8)[i % 3] for i in range(count)]
    x = builder.input(BATCH, sum(widths), requires_grad=False)
    shared = builder.input(4, 4)
    params = [(builder.input(w, 4), builder.input(4)) for w in widths]
    branches: list[Node] = []
    start = 0
    for i, (width, (w, b)) in enumerate(zip(widths, params, strict=True)):
        part = builder.call(operator.getitem, x, (slice(None), slice(start, start + width)))
        start += width
        if i % 3:
            h = builder.call(torch.matmul, part, w)
            h = builder.call(torch.add, h, b)
        else:
            h = builder.call(F.linear, part, shared, None)
        h = builder.call((torch.tanh, torch.relu, F.gelu)[i % 3], h)
        h = builder.call("mul", h, 0.5 if i % 2 else 2.0)
        h = builder.call("softmax", h, -1)
        branches.append(builder.call("unsqueeze", h, 1))
    joined = builder.call(torch.cat, branches, 1)
    return builder.finish(builder.call(torch.mean, joined, 1))


def chain(num_nodes: int) -> GraphModule:
    """One layer after another: nothing to merge."""
    builder, count = GraphBuilder(), num_nodes // 6
    h = builder.input(BATCH, 8, requires_grad=False)
    params = [(builder.input(8, 8), builder.input(8)) for _ in range(count)]
    for w, b in params:
        h = builder.call(F.linear, h, w, b)
        h = builder.call(torch.relu, h)
        h = builder.call("view", h, BATCH, 2, 4)
        h = builder.call("flatten", h, 1)
    return builder.finish(h)


def illustrative(num_nodes: int) -> GraphModule:
    """Many small branches of few operations, as of `benchmarks.illustrative`."""
    builder, count, width = GraphBuilder(), num_nodes // 9, 16
    x = builder.input(BATCH, width * count, requires_grad=False)
    params = [(builder.input(width, width), builder.input(width, width)) for _ in range(count)]
    parts = builder.call(torch.split, x, width, 1)
    branches: list[Node] = []
    for i, (w, v) in enumerate(params):
        h = builder.call(operator.getitem, parts, i)
        h = builder.call(F.layer_norm, h, (width,), None, None, 1e-5)
        h = builder.call(F.linear, h, w, None)
        h = builder.call(F.layer_norm, h, (width,), None, None, 1e-5)
        h = builder.call(torch.tanh, h)
        h = builder.call(F.linear, h, v, None)
        branches.append(builder.call(torch.tanh, h))
    joined = builder.call(torch.cat, branches, 1)
    return builder.finish(builder.call("mean", joined, 1, True))


GRAPHS: dict[str, Callable[[int], GraphModule]] = {
    "towers": towers,
    "slices": slices,
    "chain": chain,
    "illustrative": illustrative,
}


@dataclass
class Row:
    """One line of the results: one pattern (or all) on one graph."""

    date: str
    commit: str
    machine: str
    torch: str
    graph: str
    nodes: int
    nodes_after: int
    pattern: str
    fired: int
    seconds: float
    growth: float | None


def measure(module: GraphModule) -> tuple[float, GraphModule, list[PatternReport]]:
    """Processor seconds of one rewrite with all patterns, its result and records."""
    copy = copy_graph_module(module)
    gc.collect()
    start = time.process_time()
    reports = rewrite(copy, PIPELINE)
    return time.process_time() - start, copy, reports


def measure_upstream(module: GraphModule) -> float:
    """Processor seconds of PyTorch's own passes on the same graph."""
    # Private names, for a comparison only.
    from torch._inductor import config
    from torch._inductor.fx_passes.pre_grad import pre_grad_passes

    copy = copy_graph_module(module)
    inputs = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    gc.collect()
    with config.patch(pre_grad_fusion_options=TUNED):
        start = time.process_time()
        pre_grad_passes(copy, inputs)
        return time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; append to the file given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="CSV file to append the results to")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the shortest counts")
    parser.add_argument("--upstream", action="store_true", help="time PyTorch's own passes, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    measure(towers(100))  # imports and caches
    rows = [row for name in options.graphs for row in _grow(name, options)]
    if options.out:
        append(rows, options.out)


def _grow(name: str, options: argparse.Namespace) -> list[Row]:
    rows, where = list[Row](), _where()
    before: dict[str, tuple[int, float]] = {}
    for size in options.sizes:
        module = GRAPHS[name](size)
        nodes = len(module.graph.nodes)
        runs = [measure(module) for _ in range(options.repeats)]
        seconds, after, reports = min(runs, key=lambda run: run[0])
        spent_by = _spent(seconds, reports)
        if options.upstream:
            others = min(measure_upstream(module) for _ in range(options.repeats))
            spent_by.insert(1, ("upstream", 0, others))
        for pattern, fired, spent in spent_by:
            growth = None
            if pattern in before and min(spent, before[pattern][1]) > 0.001:
                old_nodes, old = before[pattern]
                growth = round(math.log(spent / old) / math.log(nodes / old_nodes), 2)
            before[pattern] = (nodes, spent)
            sizes_of = (nodes, len(after.graph.nodes))
            rows.append(Row(*where, name, *sizes_of, pattern, fired, round(spent, 4), growth))
        _show(rows, name, nodes)
    return rows


def _spent(seconds: float, reports: Sequence[PatternReport]) -> list[tuple[str, int, float]]:
    return [
        ("all", sum(r.fired for r in reports), seconds),
        *((r.name, r.fired, r.seconds) for r in reports),
    ]


def _show(rows: Sequence[Row], name: str, nodes: int) -> None:
    print(f"\n{name}, {nodes} nodes")
    found = [row for row in rows if row.graph == name and row.nodes == nodes]
    for row in sorted(found, key=lambda row: -row.seconds)[:12]:
        growth = "" if row.growth is None else f"  growth {row.growth:.2f}"
        print(f"  {row.pattern:32s} {row.seconds:8.3f} s  fired {row.fired:5d}{growth}", flush=True)


def _where() -> tuple[str, str, str, str]:
    machine = f"{platform.machine()}, 1 core"
    return datetime.date.today().isoformat(), commit(), machine, torch.__version__


if __name__ == "__main__":
    main()
