"""Estimate what a training step holds in memory at most, and moves, from AOTAutograd's two graphs.

Inductor makes one kernel of element-wise operations and of the reductions and joins that read them.
So of element-wise results only those are stored that something else reads, that are returned, or
that several would have to compute anew from much. The rest is a walk along the graph: what is
stored is alive until its last reader, a kernel may write over what dies with it, and backward lets
go of what was saved. Parameters, inputs and what the optimizer keeps are alive all the time,
whatever the graphs do, and are not in the figures; gradients are.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

_MOST_READS_OF_SEVERAL = 4
"""From how many tensors Inductor computes anew what several read (realize_reads_threshold)."""
_MOST_READS = 8
"""And what one reads (realize_acc_reads_threshold)."""

_FUSED = frozenset(
    ("sum", "mean", "var_mean", "amax", "amin", "max", "min", "any", "all", "prod", "cat")
)
"""Not element-wise, but what is element-wise in front of them is computed in the same kernel."""


@dataclass(frozen=True)
class Estimate:
    """Bytes held at most `forward` and `backward`, `saved` between them, and `moved` by kernels."""

    forward: int
    saved: int
    backward: int
    moved: int

    @property
    def peak(self) -> int:
        """Bytes held at most."""
        return max(self.forward, self.backward)


class Unsized(Exception):
    """The size of a tensor is not known."""


def estimate(forward: Graph, backward: Graph) -> Estimate:
    """Of a step whose forward graph returns, by name, what its backward graph takes.

    Raises Unsized.
    """
    first = _Kernels(forward, {})
    returned = {node.name: first.source(node) for node in forward.output_node().all_input_nodes}
    inputs = {node.name for node in forward.nodes if node.op == "placeholder"}
    held: dict[Node, int] = {}
    owners: dict[Node, Node] = {}  # of what the forward graph stores, the first that shows it
    shown: dict[Node, Node] = {}
    for node in backward.find_nodes(op="placeholder"):
        source = returned.get(node.name)
        if source is None and node.name not in inputs:  # the gradient of a result
            held[node] = _bytes(node)
        elif source is not None and source.op != "placeholder":
            shown[node] = owners.setdefault(source, node)
            held[shown[node]] = _bytes(source)
    second = _Kernels(backward, shown)
    return Estimate(
        first.most_held({}),
        sum(held.values()),
        second.most_held(held),
        first.moved() + second.moved(),
    )


class _Kernels:
    """What a graph stores, and from what. `shown`: inputs that are views of another input."""

    def __init__(self, graph: Graph, shown: Mapping[Node, Node]) -> None:
        self._shown = shown
        end = graph.output_node()
        self._returned = {self.source(node) for node in end.all_input_nodes}
        self._users: dict[Node, list[Node]] = defaultdict(list)
        calls = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        calls = [node for node in calls if not _is_view(node)]
        for node in [*calls, end]:
            for source in self._sources(node):
                self._users[source].append(node)
        self.reads: dict[Node, dict[Node, None]] = {}
        """Of each stored result, in order, what its kernel reads."""
        inlined: dict[Node, dict[Node, None]] = {}
        for node in calls:
            reads = {r: None for s in self._sources(node) for r in inlined.get(s, (s,))}
            if self._is_stored(node, len(reads)):
                self.reads[node] = reads
            else:
                inlined[node] = reads

    def source(self, node: Node) -> Node:
        """What `node` is a view of."""
        while _is_view(node):
            node = node.all_input_nodes[0]
        return self._shown.get(node, node)

    def _sources(self, node: Node) -> Iterator[Node]:
        return iter(dict.fromkeys(map(self.source, node.all_input_nodes)))

    def _is_stored(self, node: Node, num_reads: int) -> bool:
        if not _is_elementwise(node):
            return True
        if not num_reads:  # a constant
            return False
        users = self._users[node]
        if not all(_is_elementwise(user) or _name(user) in _FUSED for user in users):
            return True
        return num_reads > (_MOST_READS_OF_SEVERAL if len(users) > 1 else _MOST_READS)

    def _in_order(self) -> list[Node]:
        """Kernels in the order they run: what is element-wise where it is needed first."""
        done: dict[Node, None] = {}
        place = {node: i for i, node in enumerate(self.reads)}
        late = [node for node in self.reads if _is_elementwise(node)]
        for node in [*(n for n in self.reads if not _is_elementwise(n)), *late]:
            pending, needed = [node], set[Node]()
            while pending:
                each = pending.pop()
                if each in self.reads and each not in done and each not in needed:
                    needed.add(each)
                    pending += self.reads[each]
            done.update(dict.fromkeys(sorted(needed, key=place.__getitem__)))
        return list(done)

    def most_held(self, held: Mapping[Node, int]) -> int:
        """Bytes alive at most, if `held` are alive when the graph begins and nobody else's."""
        order = self._in_order()
        sizes = {**held, **{node: _bytes(node) for node in order}}
        last = {read: node for node in order for read in self.reads[node]}
        dying: dict[Node, list[int]] = defaultdict(list)
        for read, node in last.items():
            if read in sizes and read not in self._returned:
                dying[node].append(sizes[read])
        live = sum(size for node, size in held.items() if node in last or node in self._returned)
        most = live
        for node in order:
            size, gone = sizes[node], dying[node]
            writes_over = _is_elementwise(node) and size in gone
            most = max(most, live if writes_over else live + size)
            live += size - sum(gone)
            if node not in last and node not in self._returned:
                live -= size
        return most

    def moved(self) -> int:
        """Bytes that kernels read and write."""
        return sum(sum(map(_bytes, (node, *reads))) for node, reads in self.reads.items())


def _bytes(node: Node) -> int:
    """Of all tensors that a node stands for."""
    if node.op not in ("placeholder", "get_attr") and _writes(node):
        return 0
    values = pytree.tree_leaves(node.meta.get("val"))
    return sum(_size(v) for v in values if isinstance(v, torch.Tensor))


def _size(tensor: torch.Tensor) -> int:
    number: Any = tensor.numel()
    if not isinstance(number, int):
        number = getattr(number.node, "hint", None)  # a private name
        if number is None:
            raise Unsized
    return int(number) * tensor.element_size()


def _is_elementwise(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    is_constant = not node.all_input_nodes
    return torch.Tag.pointwise in target.tags or is_constant or _name(node) in _TAKES_ELEMENTS


_TAKES_ELEMENTS = frozenset(
    (
        "clone",
        "constant_pad_nd",
        "convert_element_type",
        "embedding",
        "flip",
        "gather",
        "index",
        "repeat",
        "select_scatter",
        "slice_scatter",
    )
)
"""Element by element for Inductor, though PyTorch has no tag there that says so."""


def _is_view(node: Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    if _name(node) in ("reshape", "_unsafe_view"):
        return True
    alias = next((r.alias_info for r in target._schema.returns), None)
    return alias is not None and not alias.is_write


def _writes(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _name(node: Node) -> str:
    target = node.target
    return target._opname if isinstance(target, torch._ops.OpOverload) else ""
