"""Turn in-place calls on values of the graph's own into calls that return a new value.

Before: `y = linear(x); y.add_(1); z = relu(y)`
After:  `y = linear(x); y1 = add(y, 1); z = relu(y1)`

`nn.ReLU(inplace=True)` and `x += y` are common and would keep everything around them from moving.
A piece of memory is taken on as a whole: it must have been allocated by an operation of this graph,
be written through its full extent only, by calls with an out-of-place form, and no view made before
a write may be read after it. Anything else stays as it is, and legality works around it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from optimus.legality import Legality, storages_of, value_of
from optimus.ops import Op, out_of_place
from optimus.records import PatternReport
from optimus.values import Unknown, evaluate, same_strides, same_type

NAME = "functionalize_in_place"


@dataclass
class _Memory:
    """One storage. `members` hold values in it, in graph order; the first allocates it. `names` are
    the members that stand for all of it: the first, and what in-place calls on it return."""

    members: list[Node] = field(default_factory=list[Node])
    writers: list[Node] = field(default_factory=list[Node])
    names: set[Node] = field(default_factory=set[Node])
    latest: Node | None = None


def functionalize(graph: Graph, mode: FakeTensorMode, legality: Legality) -> PatternReport:
    """Rewrite `graph` in place; the record counts in-place calls and those that were replaced.

    Where any was, `legality` no longer holds.
    """
    report = PatternReport(NAME, "normalize", nodes_before=len(graph.nodes))
    if not legality.is_functional:
        walk = _Walk(graph, legality, mode)
        for memory in _written_memory(graph, legality):
            report.anchors += len(memory.writers)
            objection = walk.objection(memory)
            if objection is None:
                walk.take(memory)
                report.fired += len(memory.writers)
            else:
                for writer in memory.writers:
                    report.miss(objection, writer.name)
        if report.fired:
            walk.replace()
    report.nodes_after = len(graph.nodes)
    return report


def _written_memory(graph: Graph, legality: Legality) -> list[_Memory]:
    memories: dict[int, _Memory] = defaultdict(_Memory)
    for node in graph.nodes:
        for storage in storages_of(value_of(node)) & legality.written_storages:
            memories[storage].members.append(node)
        for storage in storages_of([value_of(w) for w in legality.effects(node).writes]):
            memories[storage].writers.append(node)
    return list(memories.values())


class _Walk:
    def __init__(self, graph: Graph, legality: Legality, mode: FakeTensorMode) -> None:
        self._graph = graph
        self._legality = legality
        self._mode = mode
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        self._memory: dict[Node, _Memory] = {}

    def objection(self, memory: _Memory) -> str | None:
        """Why `memory` must stay as it is; None, with its `names` filled in, if it need not."""
        root = memory.members[0]
        if root.op in ("placeholder", "get_attr") or not self._legality.effects(root).pure:
            return "writes to memory that the graph did not allocate"
        memory.names.add(root)
        for writer in memory.writers:
            reason = self._writer_objection(writer, root, memory.names)
            if reason is not None:
                return reason
            memory.names.add(writer)
        for view in memory.members:
            if view not in memory.names and self._is_read_after_write(view, memory.writers):
                return "a view made before the write is read after it"
        return None

    def _writer_objection(self, writer: Node, root: Node, names: set[Node]) -> str | None:
        effects = self._legality.effects(writer)
        form = out_of_place(writer)
        if form is None or len(effects.writes) != 1 or effects.barrier:
            return "no out-of-place form"
        if effects.writes[0] not in names:
            return "writes through a view"
        if self._legality.context(writer).grad != self._legality.context(root).grad:
            return "writes under another grad mode"
        try:
            value = self._value(writer, *form)
        except Unknown as reason:
            return str(reason)
        if not same_type(value, value_of(writer)) or not same_strides(value, value_of(writer)):
            return "an out-of-place call would return another type"
        return None

    def _value(self, place: Node, op: Op, values: dict[str, Any]) -> Any:
        args, kwargs = op.build(values)
        return evaluate(self._mode, self._legality.context(place), op.target, args, kwargs)

    def _is_read_after_write(self, view: Node, writers: Sequence[Node]) -> bool:
        made = self._position[view]
        last_read = max((self._position[user] for user in view.users), default=made)
        return any(made < self._position[writer] <= last_read for writer in writers)

    def take(self, memory: _Memory) -> None:
        """Have `replace` work on `memory`."""
        self._memory |= dict.fromkeys(memory.members, memory)

    def replace(self) -> None:
        """In graph order, put new values in the place of writes and of what is read after them."""
        moved: set[Node] = set()
        for node in list(self._graph.nodes):
            memory = self._memory.get(node)
            if memory is not None and node in memory.writers:
                memory.latest = self._out_of_place(node)
            elif any(self._latest(n) is not n or n in moved for n in node.all_input_nodes):
                node.args = torch.fx.map_arg(node.args, self._latest)
                node.kwargs = torch.fx.map_arg(node.kwargs, self._latest)
                if memory is not None:  # a view of what was written
                    moved.add(node)
                    context = self._legality.context(node)
                    node.meta["example_value"] = evaluate(
                        self._mode, context, node.target, node.args, node.kwargs
                    )
        writers = {w for memory in self._memory.values() for w in memory.writers}
        for writer in sorted(writers, reverse=True):
            self._graph.erase_node(writer)

    def _latest(self, node: Node) -> Node:
        memory = self._memory.get(node)
        if memory is None or memory.latest is None or node not in memory.names:
            return node
        return memory.latest

    def _out_of_place(self, writer: Node) -> Node:
        op, values = out_of_place(writer) or (None, {})
        assert op is not None
        args, kwargs = torch.fx.map_arg(op.build(values), self._latest)
        with self._graph.inserting_before(writer):
            node = self._graph.call_function(op.target, args, kwargs)
        node.meta = dict(writer.meta)
        context = self._legality.context(writer)
        node.meta["example_value"] = evaluate(self._mode, context, op.target, args, kwargs)
        return node
