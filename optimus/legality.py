"""What may be moved, merged or replaced: the one place that answers for every pattern.

Three facts about a Torch-IR graph are kept here. *Memory*: which values share storage (read off the
fake values Dynamo computed, so views are known exactly) and which nodes write to it. *Context*: the
grad mode and the autocast state that a node runs under. *Order*: the dependencies between nodes,
by data, by memory, by randomness and by context; any order that respects them means the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from optimus.effects import PURE, Effects, effects_of
from optimus.facts import Facts


def value_of(node: Node) -> Any:
    """The fake value that `node` returns (a tensor, a tuple of them, a number), None if unknown."""
    return node.meta.get("example_value")


def tensor_of(node: object) -> torch.Tensor | None:
    """The fake tensor that `node` returns; None for anything else."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def storages_of(value: Any) -> frozenset[int]:
    """Identities of the storages that a value (nested or not) lives in."""
    if isinstance(value, torch.Tensor):
        try:
            return frozenset((value.untyped_storage()._cdata,))
        except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have no storage
            return frozenset((id(value),))
    if isinstance(value, tuple | list):
        parts: Iterable[Any] = value
        return frozenset[int]().union(*(storages_of(part) for part in parts))
    return frozenset()


def memory_of(nodes: Iterable[Node]) -> frozenset[int]:
    """Identities of the storages that the values of `nodes` live in.

    A thousand parts of one tensor are looked at once, not again for each node that takes one.
    """
    return frozenset[int]().union(*map(memory_of_one, nodes))


_KNOWN = Facts[tuple[Any, frozenset[int]]]()


def memory_of_one(node: Node) -> frozenset[int]:
    """As `memory_of`, of one node."""
    value = node.meta.get("example_value")
    known = _KNOWN.of.get(node)
    if known is None or known[0] is not value:
        known = _KNOWN.of[node] = (value, storages_of(value))
    return known[1]


def forget_memory() -> None:
    """Read all memory anew: a call has been made on fake values that may give them another one."""
    _KNOWN.of.clear()


@dataclass(frozen=True)
class Context:
    """The global state a node runs under. `autocast`: arguments of the regions entered, outermost
    first, on top of the state the graph is called in."""

    grad: bool
    autocast: tuple[tuple[Any, ...], ...] = ()
    region: int = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run something as a node of this context would be run."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype, enabled, cache in self.autocast:
                stack.enter_context(
                    torch.autocast(device, dtype, enabled=enabled, cache_enabled=cache)
                )
            yield


class Legality:
    """Memory, context and order of one graph; `graph` must be in topological order.

    The facts follow the editor: nodes it makes are `adopt`ed. Effects and contexts of a node never
    change, as nothing moves across a barrier.
    """

    def __init__(self, graph: Graph, grad: bool | None = None) -> None:
        self.graph = graph
        self._effects: dict[Node, Effects] = {}
        self._contexts: dict[Node, Context] = {}
        self._writes: dict[int, list[Node]] = defaultdict(list)
        self._writers: dict[Node, None] = {}
        self._impure: set[Node] = set()
        self._pinned: frozenset[int] = frozenset()
        context = Context(torch.is_grad_enabled() if grad is None else grad)
        entered: dict[Node, tuple[Any, ...]] = {}
        for node in graph.nodes:
            effects = self._effects[node] = effects_of(node)
            if effects.barrier:
                context = _next_context(context, node, entered)
            self._contexts[node] = context
            if not effects.pure:
                self._impure.add(node)
            if effects.writes:
                self._writers[node] = None
        self.refresh_memory()

    def refresh_memory(self) -> None:
        """Read anew what is written, after arguments or fake values have changed."""
        self._writes.clear()
        for writer in self._writers:
            self._note_writes(writer)

    def _note_writes(self, writer: Node) -> None:
        effects = self._effects[writer] = effects_of(writer)
        for storage in memory_of(effects.writes):
            self._writes[storage].append(writer)

    def effects(self, node: Node) -> Effects:
        """What running `node` does besides returning its value."""
        return self._effects[node]

    def knows(self, node: Node) -> bool:
        """Whether `node` is part of the graph (not erased)."""
        return node in self._effects

    def context(self, node: Node) -> Context:
        """The state `node` runs under; two nodes of one region have equal contexts."""
        return self._contexts[node]

    def adopt(self, node: Node, context: Context) -> None:
        """Take in a node that the editor has made."""
        effects = self._effects[node] = effects_of(node)
        self._contexts[node] = context
        if effects is PURE:
            self._impure.discard(node)
            return
        self._impure.add(node)
        if effects.writes:
            self._writers[node] = None
            self._note_writes(node)

    def reread(self, node: Node) -> None:
        """Take in that `node` has other arguments now: what it writes to goes by another name."""
        if node in self._writers:
            self._effects[node] = effects_of(node)

    def forget(self, node: Node) -> None:
        """Drop a node that the editor has erased."""
        del self._effects[node], self._contexts[node]
        self._impure.discard(node)
        if node in self._writers:
            del self._writers[node]
            self.refresh_memory()

    @property
    def is_functional(self) -> bool:
        """Whether nothing in the graph writes to memory."""
        return not self._writers

    @property
    def written_storages(self) -> Set[int]:
        """Identities of the storages that some node writes to."""
        return self._writes.keys()

    def pin(self, storages: frozenset[int]) -> None:
        """Have these storages stay as they are: a change could not be made up for later on."""
        self._pinned = storages

    def is_pinned(self, value: Any) -> bool:
        """Whether `value` lives in a storage that was pinned."""
        return bool(self._pinned) and not self._pinned.isdisjoint(storages_of(value))

    @property
    def is_memory_free(self) -> bool:
        """Whether no memory is written to, or pinned: it makes no difference which values share."""
        return not self._writes and not self._pinned

    def is_fixed(self, value: Any) -> bool:
        """Whether `value` must keep memory of its own: it is written to, or pinned."""
        return self.is_pinned(value) or bool(self.writers(value))

    def writers(self, value: Any) -> list[Node]:
        """Nodes that write to memory which `value` lives in."""
        if not self._writes:
            return []
        return [w for storage in storages_of(value) for w in self._writes.get(storage, ())]

    def written_between(
        self, nodes: Iterable[Node], first: Node, last: Node, ignored: Set[Node] = frozenset()
    ) -> Node | None:
        """A node in [first, last], not `ignored`, that writes to memory of one of `nodes`."""
        if not self._writes:
            return None
        for node in nodes:
            for writer in self.writers(value_of(node)):
                if writer not in ignored and not (writer < first or last < writer):
                    return writer
        return None

    def dependencies(self, nodes: Sequence[Node]) -> dict[Node, list[Node]]:
        """Beyond data: for each of `nodes` (in graph order) earlier ones it must stay behind; none
        where nothing does more than compute its value."""
        if not self._impure:
            return {}
        order = _Order(self)
        return {node: order.place(node) for node in nodes}


def _next_context(context: Context, node: Node, entered: dict[Node, tuple[Any, ...]]) -> Context:
    """The context after a barrier."""
    context = replace(context, region=context.region + 1)
    if node.target is torch._C._set_grad_enabled:
        return replace(context, grad=bool(node.args[0]))
    if node.target is torch.amp.autocast_mode._enter_autocast:
        entered[node] = _autocast_arguments(node)
        return replace(context, autocast=(*context.autocast, entered[node]))
    if node.target is torch.amp.autocast_mode._exit_autocast:
        return replace(context, autocast=context.autocast[:-1])
    return context


def _autocast_arguments(node: Node) -> tuple[Any, ...]:
    defaults = (None, True, None)  # after the device: dtype, enabled, cache_enabled
    return (*node.args, *defaults[len(node.args) - 1 :])


class _Order:
    """Walks nodes in graph order and says which earlier ones each must not be moved before."""

    def __init__(self, legality: Legality) -> None:
        self._legality = legality
        self._barrier: Node | None = None
        self._since_barrier: list[Node] = []
        self._random: Node | None = None
        self._last_write: dict[int, Node] = {}
        self._reads: dict[int, list[Node]] = defaultdict(list)

    def place(self, node: Node) -> list[Node]:
        effects = self._legality.effects(node)
        after = [self._barrier] if self._barrier is not None else []
        if effects.barrier:
            after += self._since_barrier
            self._barrier, self._since_barrier = node, []
        else:
            self._since_barrier.append(node)
        if effects.random:
            after += [self._random] if self._random is not None else []
            self._random = node
        if not self._legality.is_functional:
            after += self._memory(node, effects)
        return after

    def _memory(self, node: Node, effects: Effects) -> list[Node]:
        after: list[Node] = []
        written = memory_of(effects.writes)
        touched = memory_of((node, *node.all_input_nodes))
        for storage in touched & self._legality.written_storages | written:
            if storage in self._last_write:
                after.append(self._last_write[storage])
            if storage in written:
                after += self._reads.pop(storage, [])
                self._last_write[storage] = node
            else:
                self._reads[storage].append(node)
        return after
