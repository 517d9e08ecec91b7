"""Which nodes of a graph can run together: grouping by key over the whole graph at once.

Agenda-based batching (Neubig et al., "On-the-fly Operation Batching in Dynamic Computation
Graphs", NeurIPS 2017). The graph is scheduled as a machine would run it: nodes without a key run as
soon as their inputs are there; when only keyed nodes are left, all ready nodes of one key run
together. Members of a group were ready at the same time, so none depends on another, and the order
of the schedule is a topological order in which every group stands as one block: merging all groups
can make no cycle. A key with all its nodes ready goes first, as it can win no more; then the one
whose nodes lie least deep on average, so that a key waits for its members deeper in the graph.
Linear in nodes and dependencies, up to a logarithm for the queue.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch.fx import Node


@dataclass
class Schedule:
    """`order`: all nodes; `groups`: those of one key that run together, each a block of `order`."""

    order: list[Node] = field(default_factory=list[Node])
    groups: list[list[Node]] = field(default_factory=list[list[Node]])


def schedule(
    nodes: Sequence[Node],
    keys: Mapping[Node, Hashable],
    dependencies: Mapping[Node, Sequence[Node]],
    singles: Set[Hashable] = frozenset(),
) -> Schedule:
    """Group `nodes` (in topological order) by `keys`.

    `dependencies` holds, beyond a node's inputs, the earlier nodes it must stay behind. A node
    whose key is among `singles` is a group alone, too.
    """
    agenda = _Agenda(nodes, keys, dependencies)
    result = Schedule()
    while (block := agenda.next_block()) is not None:
        result.order += block
        if len(block) > 1 or keys.get(block[0]) in singles:
            result.groups.append(block)
    return result


class _Agenda:
    def __init__(
        self,
        nodes: Sequence[Node],
        keys: Mapping[Node, Hashable],
        dependencies: Mapping[Node, Sequence[Node]],
    ) -> None:
        self._keys = keys
        self._nodes = nodes
        self._position = {node: i for i, node in enumerate(nodes)}
        self._waiting: dict[Node, int] = {}
        self._followers: dict[Node, list[Node]] = {node: [] for node in nodes}
        self._plain: list[int] = []
        self._ready: dict[Hashable, list[Node]] = defaultdict(list)
        self._complete: list[tuple[_Rank, Hashable]] = []
        self._partial: list[tuple[_Rank, Hashable]] = []
        depths: dict[Node, int] = {}
        for node in nodes:
            before = node.all_input_nodes
            if also := dependencies.get(node):
                before = list(dict.fromkeys((*before, *also)))
            self._waiting[node] = len(before)
            deepest = 0
            for earlier in before:
                self._followers[earlier].append(node)
                deepest = max(deepest, depths[earlier])
            depths[node] = 1 + deepest
        self._rank = _ranks(keys, depths)
        self._missing = Counter(keys.values())
        for node, count in self._waiting.items():
            if not count:
                self._make_ready(node)

    def next_block(self) -> list[Node] | None:
        """The next nodes to run: one without a key, or all that are ready of one key."""
        if self._plain:
            block = [self._nodes[heapq.heappop(self._plain)]]
        else:
            key = self._next_key(self._complete) or self._next_key(self._partial)
            if key is None:
                return None
            block = sorted(self._ready.pop(key), key=self._position.__getitem__)
        for node in block:
            self._finish(node)
        return block

    def _next_key(self, queue: list[tuple[_Rank, Hashable]]) -> Hashable | None:
        while queue:
            _, key = heapq.heappop(queue)
            if key in self._ready:  # it may have run already, by its place in the other queue
                return key
        return None

    def _finish(self, node: Node) -> None:
        waiting = self._waiting
        for follower in self._followers[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                self._make_ready(follower)

    def _make_ready(self, node: Node) -> None:
        if node not in self._keys:
            heapq.heappush(self._plain, self._position[node])
            return
        key = self._keys[node]
        self._missing[key] -= 1
        if not self._missing[key]:
            heapq.heappush(self._complete, (self._rank[key], key))
        elif key not in self._ready:
            heapq.heappush(self._partial, (self._rank[key], key))
        self._ready[key].append(node)


_Rank = tuple[float, int]


def _ranks(keys: Mapping[Node, Hashable], depths: Mapping[Node, int]) -> dict[Hashable, _Rank]:
    """Per key the average depth of its nodes; ties go to the key seen first."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for node, depth in depths.items():
        if node in keys:
            members[keys[node]].append(depth)
    return {key: (sum(d) / len(d), i) for i, (key, d) in enumerate(members.items())}
