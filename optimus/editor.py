"""The only thing that changes a graph: transactions that are checked before they count.

A rewrite makes new nodes and names what they replace; `commit` accepts all of it or refuses all of
it. Refused are a change of shape, dtype, device or requires_grad; a result that depends on nodes
outside the match; a match across grad modes or autocast states; a write to any memory involved
between the first node matched and the place of the replacement; and new sharing of memory that
somebody writes to. Strides may change: `optimus.layout` carries the change downstream and restores
the layout where somebody could tell the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from optimus.legality import Legality, storages_of, value_of
from optimus.ops import OPS, op_of
from optimus.values import Unknown, evaluate, is_fresh, same_strides, same_type


class Refused(Exception):
    """A rewrite that cannot be shown to keep the program's meaning; the text is the reason."""


@dataclass
class _Transaction:
    nodes: tuple[Node, ...]
    drops: tuple[Node, ...]
    before: Node
    replaces_effects: bool
    made: dict[Node, None] = field(default_factory=dict[Node, None])
    replaced: dict[Node, Node] = field(default_factory=dict[Node, Node])
    num_replaced_by: Counter[Node] = field(default_factory=Counter[Node])

    def reads(self) -> set[Node]:
        """What the new nodes read of the graph as it was."""
        return {n for node in self.made for n in node.all_input_nodes} - self.made.keys()

    def leaves(self) -> set[Node]:
        """What the replacement consists of besides new nodes."""
        return self.reads() | (set(self.replaced.values()) - self.made.keys())

    def takes_over(self, old: Node) -> bool:
        """Whether the new value for `old` is what `old` was: memory of its own, in one layout, that
        stands for nothing else."""
        new = self.replaced[old]
        if new not in self.made or not is_fresh(old) or not is_fresh(new):
            return False
        if not same_strides(value_of(old), value_of(new)):
            return False
        memory = storages_of(value_of(new))
        return self.num_replaced_by[new] == 1 and not any(
            memory & storages_of(value_of(node)) for node in new.users if node in self.made
        )


class Editor:
    """Edits one graph. `edits` counts the values replaced so far.

    `changed` tells for each node which of its inputs were put in place of another, and the value
    that stood there before, where the two differ in strides or in memory; `optimus.layout.settle`
    works it off.
    """

    def __init__(self, graph: Graph, legality: Legality, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.legality = legality
        self.edits = 0
        self.changed: dict[Node, list[tuple[Node, Any]]] = {}
        self._mode = mode
        self._open: _Transaction | None = None
        self._by_op: dict[str, dict[Node, None]] = {}
        for node in graph.nodes:
            self._index(node)

    # What a rewrite calls.

    def call(self, target: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A new node calling `target`, an operation's name or a function; its value is computed."""
        transaction = self._transaction()
        with self.graph.inserting_before(transaction.before):
            node = self.make(target, args, kwargs, transaction.nodes[0], transaction.before)
        transaction.made[node] = None
        return node

    def replace(self, old: Node, new: Node) -> None:
        """Have all users of `old` read `new` instead, once the transaction commits."""
        transaction = self._transaction()
        assert old not in transaction.replaced, "replaced twice"
        transaction.replaced[old] = new
        transaction.num_replaced_by[new] += 1

    # What the driver and the layout pass call.

    def anchors(self, names: Iterable[str]) -> list[Node]:
        """All nodes of these operations, in graph order."""
        return sorted(node for name in names for node in self._by_op.get(name, ()))

    def begin(
        self,
        nodes: Sequence[Node],
        before: Node,
        drops: Sequence[Node] = (),
        replaces_effects: bool = False,
    ) -> None:
        """Open a transaction that replaces work of `nodes` by new nodes in front of `before`."""
        assert self._open is None, "one transaction at a time"
        self._open = _Transaction(tuple(nodes), tuple(drops), before, replaces_effects)

    def commit(self) -> None:
        """Accept the open transaction, or raise Refused and leave the graph as it was."""
        transaction = self._transaction()
        reason = self._objection(transaction)
        if reason is not None:
            self.rollback()
            raise Refused(reason)
        for old, new in transaction.replaced.items():
            self._put_in_place(old, new, takes_over=transaction.takes_over(old))
        self.edits += len(transaction.replaced)
        self._open = None
        self.sweep((*transaction.nodes, *transaction.replaced, *reversed(transaction.made)))
        if transaction.replaces_effects:
            for node in sorted(filter(self.is_alive, transaction.nodes), reverse=True):
                if not self.legality.effects(node).pure:
                    inputs = node.all_input_nodes
                    self._erase(node)
                    self.sweep(inputs)

    def rollback(self) -> None:
        """Drop the open transaction, if there is one, and all nodes it made."""
        if self._open is not None:
            for node in reversed(self._open.made):
                self._erase(node)
            self._open = None

    def make(
        self,
        target: str | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        origin: Node,
        place: Node,
    ) -> Node:
        """A node at the graph's insertion point, under `place`'s context, traced to `origin`.

        Raises Refused when its value cannot be told.
        """
        function = OPS[target].target if isinstance(target, str) else target
        context = self.legality.context(place)
        try:
            value = evaluate(self._mode, context, function, args, kwargs)
        except Unknown as reason:
            raise Refused(str(reason)) from reason
        node = self.graph.call_function(function, args, kwargs)
        node.meta |= {k: origin.meta[k] for k in _PROVENANCE if k in origin.meta}
        node.meta["example_value"] = value
        self.legality.adopt(node, context)
        self._index(node)
        return node

    def evaluate(self, node: Node) -> Any:
        """The value `node` has on its inputs' present values; raises Unknown."""
        assert node.op == "call_method" or callable(node.target)
        context = self.legality.context(node)
        return evaluate(self._mode, context, node.target, node.args, dict(node.kwargs))

    def is_alive(self, node: Node) -> bool:
        """Whether `node` is still part of the graph."""
        return self.legality.knows(node)

    def sweep(self, nodes: Iterable[Node]) -> None:
        """Erase those of `nodes` that nobody needs, and whatever only they needed."""
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node.op in ("placeholder", "output") or not self.is_alive(node) or node.users:
                continue
            if self.legality.effects(node).pure:
                inputs = node.all_input_nodes
                self._erase(node)
                pending += inputs

    # Checks.

    def _objection(self, transaction: _Transaction) -> str | None:
        leaves = transaction.leaves()
        for old, new in transaction.replaced.items():
            if old not in transaction.nodes:
                return f"replaces {_label(old)}, which is outside its match"
            if not same_type(value_of(old), value_of(new)):
                return f"would change the type of {_label(old)}"
        return (
            self._place_objection(transaction)
            or self._work_objection(transaction)
            or self._effects_objection(transaction)
            or self._cone_objection(transaction, leaves)
            or self._write_objection(transaction, leaves)
            or self._sharing_objection(transaction)
        )

    def _place_objection(self, transaction: _Transaction) -> str | None:
        """New nodes stand behind all they read and in front of all that is to read them."""
        for node in transaction.reads():
            if node in transaction.replaced:
                return f"the replacement of {_label(node)} reads {_label(node)}"
            if not node < transaction.before:
                return f"the replacement reads {_label(node)}, which is computed after its place"
        for old, new in transaction.replaced.items():
            place = transaction.before if new in transaction.made else new.next
            if any(user < place for user in old.users):
                return f"{_label(old)} is read before the place of its replacement"
        return None

    def _work_objection(self, transaction: _Transaction) -> str | None:
        """All work moves to one place: it must be pure and run under that place's state."""
        place = self.legality.context(transaction.before)
        for node in transaction.nodes:
            context = self.legality.context(node)
            if is_view(node) and context.grad == place.grad:
                continue
            if context != place:
                return "nodes run under different grad modes or autocast states"
            if not transaction.replaces_effects and not self.legality.effects(node).pure:
                return f"{_label(node)} writes to memory or draws random numbers"
        return None

    def _effects_objection(self, transaction: _Transaction) -> str | None:
        """Writes and random draws are made by the nodes that made them, or taken over whole."""
        effects = self.legality.effects
        if not transaction.replaces_effects:
            for node in transaction.made:
                if not effects(node).pure:
                    return f"{_label(node)} would write to memory or draw random numbers"
            return None
        matched = set(transaction.nodes)
        for node in transaction.nodes:
            unread = node in transaction.replaced or node.users.keys() <= matched
            if not effects(node).pure and not unread:
                return f"{_label(node)} is still read but not replaced"
        return self._order_objection(transaction, matched)

    def _order_objection(self, transaction: _Transaction, matched: set[Node]) -> str | None:
        """Writes and draws that move may not pass one another, or a read of what is written."""
        moved = [n for n in matched if not self.legality.effects(n).pure]
        if not moved:
            return None
        written = storages_of([value_of(w) for n in moved for w in self.legality.effects(n).writes])
        random = any(self.legality.effects(n).random for n in moved)
        node, last = min(*moved, transaction.before), max(*moved, transaction.before)
        while node is not last:
            if node not in matched and node not in transaction.made:
                if random and self.legality.effects(node).random:
                    return f"{_label(node)} draws random numbers in between"
                if written & storages_of([value_of(n) for n in (node, *node.all_input_nodes)]):
                    return f"{_label(node)} reads memory in between that the match writes to"
            node = node.next
        return None

    def _cone_objection(self, transaction: _Transaction, leaves: set[Node]) -> str | None:
        """What is replaced may depend on nothing but the match, its drops and the new inputs."""
        matched = set(transaction.nodes)
        grad = self.legality.context(transaction.before).grad
        seen = leaves | set(transaction.drops)
        kept = [leaf for leaf in leaves if leaf in matched]  # they read what the match reads
        while kept:
            inputs = [n for n in kept.pop().all_input_nodes if n not in seen]
            seen.update(inputs)
            kept += [n for n in inputs if n in matched]
        pending = list(transaction.replaced)
        while pending:
            for node in pending.pop().all_input_nodes:
                if node in seen:
                    continue
                seen.add(node)
                if node not in matched and not is_view(node):
                    return f"the result depends on {_label(node)}, which the replacement ignores"
                if self.legality.context(node).grad != grad:
                    return "views were made under another grad mode"
                pending.append(node)
        return None

    def _write_objection(self, transaction: _Transaction, leaves: set[Node]) -> str | None:
        """Nothing that is read earlier than it was, or later, may have been written in between."""
        work = [node for node in transaction.nodes if not is_view(node)]
        first, last = min((*work, transaction.before)), max((*work, transaction.before))
        touched = (*leaves, *transaction.nodes)
        ignored = set(transaction.nodes) if transaction.replaces_effects else set[Node]()
        writer = self.legality.written_between(touched, first, last, ignored)
        return f"{_label(writer)} writes to memory of the match" if writer is not None else None

    def _sharing_objection(self, transaction: _Transaction) -> str | None:
        """Memory that somebody writes to must be shared by the same values as before."""
        sharers: dict[int, list[Node]] = {}
        for old, new in transaction.replaced.items():
            for storage in storages_of(value_of(new)):
                sharers.setdefault(storage, []).append(old)
        for olds in sharers.values():
            if len({storages_of(value_of(old)) for old in olds}) == 1 and all(
                self._keeps_memory(transaction, old) for old in olds
            ):
                continue
            pairs = [(value_of(old), value_of(transaction.replaced[old])) for old in olds]
            if self.legality.is_pinned([before for before, _ in pairs]):
                return "outputs share its memory"
            writers = self.legality.writers(pairs)
            if writers:
                return f"{_label(writers[0])} writes to memory that would be shared or copied"
        return None

    def _keeps_memory(self, transaction: _Transaction, old: Node) -> bool:
        new = transaction.replaced[old]
        same = storages_of(value_of(old)) == storages_of(value_of(new))
        return same or transaction.takes_over(old)

    # Changes.

    def _put_in_place(self, old: Node, new: Node, takes_over: bool) -> None:
        old_value, new_value = value_of(old), value_of(new)
        moved = storages_of(old_value) != storages_of(new_value)
        if takes_over:
            new.meta["example_value"] = old_value  # same memory for the nodes downstream
        elif moved or not same_strides(old_value, new_value):
            self.note_change(old, new, old_value)
        for user in old.users:
            sources = self.changed.get(user, ())
            self.changed[user] = [(new if n is old else n, before) for n, before in sources]
        old.replace_all_uses_with(new)

    def note_change(self, node: Node, now: Node, before: Any) -> None:
        """Have `settle` tell all users of `node` that they read `now`, where `before` was."""
        for user in node.users:
            self.changed.setdefault(user, []).append((now, before))

    def _transaction(self) -> _Transaction:
        assert self._open is not None, "the editor is used outside a rewrite"
        return self._open

    def _index(self, node: Node) -> None:
        op = op_of(node)
        if op is not None:
            self._by_op.setdefault(op.name, {})[node] = None

    def _erase(self, node: Node) -> None:
        op = op_of(node)
        if op is not None:
            self._by_op[op.name].pop(node, None)
        self.legality.forget(node)
        self.changed.pop(node, None)
        self.graph.erase_node(node)


_PROVENANCE = ("stack_trace", "nn_module_stack")


def is_view(node: Node) -> bool:
    """Whether `node` only looks at memory of its input: moving it moves no work."""
    op = op_of(node)
    if op is None or op.kind != "view" or op.name == "detach":
        return False
    source = node.all_input_nodes[0]
    return storages_of(value_of(node)) == storages_of(value_of(source))


def _label(node: Node) -> str:
    op = op_of(node)
    return op.name if op is not None else str(getattr(node.target, "__name__", node.target))
