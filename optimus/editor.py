"""The only thing that changes a graph: transactions that are checked before they count.

A rewrite makes new nodes and names what they replace; `commit` accepts all of it or refuses all of
it. Refused are a change of shape, dtype, device or requires_grad; a result that depends on nodes
outside the match; a match across grad modes or autocast states; a write to any memory involved
between the first node matched and the place of the replacement; and new sharing of memory that
somebody writes to. Strides may change: `optimus.layout` carries the change downstream and restores
the layout where somebody could tell the difference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from optimus.evaluation import Evaluator
from optimus.facts import changed
from optimus.history import History
from optimus.legality import Legality, forget_memory, memory_of_one, value_of
from optimus.ops import OPS, canonical_call, op_of
from optimus.transaction import Call, Check, Transaction
from optimus.values import Unknown, same_strides
from optimus.values import is_view as is_view  # noqa: PLC0414 (for patterns)


class Refused(Exception):
    """A rewrite that cannot be shown to keep the program's meaning; the text is the reason."""


class Editor:
    """Edits one graph. `edits` counts the values replaced so far.

    `changed` tells for each node which of its inputs were put in place of another, and the value
    that stood there before, where the two differ in strides or in memory; `optimus.layout.settle`
    works it off.
    """

    def __init__(
        self, graph: Graph, legality: Legality, mode: FakeTensorMode, strict: bool = False
    ) -> None:
        """`strict`: check by value that a call says the same in other words."""
        self.graph = graph
        self.legality = legality
        self.edits = 0
        self.changed: dict[Node, list[tuple[Node, Any]]] = {}
        self.history: History | None = None
        self._evaluate = Evaluator(mode)
        self._check = Check(graph, legality, mode if strict else None)
        self._open: Transaction | None = None
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

    def items(self, parts: Node, places: Iterable[int]) -> list[Node]:
        """New nodes that take the items at `places` of the several values that `parts` returns."""
        transaction, take = self._transaction(), operator.getitem
        origin, place = transaction.nodes[0], transaction.before
        with self.graph.inserting_before(place):
            items = [self.make(take, (parts, i), {}, origin, place) for i in places]
        transaction.made.update(dict.fromkeys(items))
        return items

    def replace(self, old: Node, new: Node) -> None:
        """Have all users of `old` read `new` instead, once the transaction commits."""
        transaction = self._transaction()
        assert old not in transaction.replaced, "replaced twice"
        transaction.replaced[old] = new
        transaction.num_replaced_by[new] = transaction.num_replaced_by.get(new, 0) + 1

    def respell(self, node: Node, name: str, **arguments: Any) -> None:
        """Have `node` say the same of the same inputs in other words: call operation `name` with
        `arguments`. It keeps its place and its value."""
        op = OPS[name]
        self._transaction().respelled[node] = (op.target, *op.build(arguments))

    # What the driver and the layout pass call.

    def anchors(self, names: Iterable[str]) -> list[Node]:
        """All nodes of these operations, in graph order."""
        return sorted(node for name in names for node in self._by_op.get(name, ()))

    def calls(self) -> list[Node]:
        """All nodes that call something, in graph order."""
        return [n for n in self.graph.nodes if n.op in ("call_function", "call_method")]

    def begin(
        self,
        nodes: Sequence[Node],
        before: Node,
        drops: Sequence[Node] = (),
        replaces_effects: bool = False,
    ) -> None:
        """Open a transaction that replaces work of `nodes` by new nodes in front of `before`."""
        assert self._open is None, "one transaction at a time"
        self._open = Transaction(tuple(nodes), tuple(drops), before, replaces_effects)

    def commit(self) -> Transaction:
        """Accept the open transaction, or raise Refused and leave the graph as it was."""
        transaction = self._transaction()
        reason = self._check.objection(transaction)
        if reason is not None:
            self.rollback()
            raise Refused(reason)
        for node, call in transaction.respelled.items():
            self._say(node, call)
        self._put_in_place(transaction)
        changed()
        self.edits += len(transaction.replaced) + len(transaction.respelled)
        self._open = None
        if transaction.replaced or transaction.made:
            self.sweep((*transaction.nodes, *transaction.replaced, *reversed(transaction.made)))
        if transaction.replaces_effects:
            for node in sorted(filter(self.is_alive, transaction.nodes), reverse=True):
                if not self.legality.effects(node).pure:
                    inputs = node.all_input_nodes
                    self._erase(node)
                    self.sweep(inputs)
        return transaction

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
        if isinstance(target, str):
            args, kwargs = canonical_call(OPS[target], args, kwargs)
        function = OPS[target].target if isinstance(target, str) else target
        context = self.legality.context(place)
        try:
            value = self._evaluate(context, function, args, kwargs)
        except Unknown as reason:
            raise Refused(str(reason)) from reason
        name = target if isinstance(target, str) else None
        node = self.graph.create_node("call_function", function, args, kwargs, name)
        meta = node.meta
        for known in _PROVENANCE:
            if known in origin.meta:
                meta[known] = origin.meta[known]
        meta["example_value"] = value
        self.legality.adopt(node, context)
        self._index(node)
        return node

    def evaluate(self, node: Node) -> Any:
        """The value `node` has on its inputs' present values; raises Unknown."""
        assert node.op == "call_method" or callable(node.target)
        if not self.legality.effects(node).pure:
            forget_memory()
        context = self.legality.context(node)
        return self._evaluate(context, node.target, node.args, dict(node.kwargs))

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

    # Changes.

    def _put_in_place(self, transaction: Transaction) -> None:
        """All at once: a join of a thousand parts is rebuilt as a whole for any change of one."""
        replaced = transaction.replaced
        users = dict.fromkeys(user for old in replaced for user in old.users)
        for user in users:
            if user in self.changed:
                moved = [(replaced.get(n, n), before) for n, before in self.changed[user]]
                self.changed[user] = moved
        for old, new in replaced.items():
            old_value, new_value = value_of(old), value_of(new)
            if transaction.takes_over(old):
                new.meta["example_value"] = old_value  # same memory for the nodes downstream
            elif memory_of_one(old) != memory_of_one(new) or not same_strides(old_value, new_value):
                self.note_change(old, new, old_value)
        for user in users:
            user.args = torch.fx.map_arg(user.args, lambda n: replaced.get(n, n))
            if user.kwargs:
                user.kwargs = torch.fx.map_arg(user.kwargs, lambda n: replaced.get(n, n))
            self.legality.reread(user)

    def _say(self, node: Node, call: Call) -> None:
        self._unindex(node)
        target, args, kwargs = call
        if node.op != "call_function":
            node.op = "call_function"
        node.target, node.args = target, args
        if node.kwargs or kwargs:
            node.kwargs = kwargs
        self.legality.adopt(node, self.legality.context(node))
        self._index(node)

    def note_change(self, node: Node, now: Node, before: Any) -> None:
        """Have `settle` tell all users of `node` that they read `now`, where `before` was."""
        for user in node.users:
            self.changed.setdefault(user, []).append((now, before))

    def _transaction(self) -> Transaction:
        assert self._open is not None, "the editor is used outside a rewrite"
        return self._open

    def _index(self, node: Node) -> None:
        op = op_of(node)
        if op is not None:
            self._by_op.setdefault(op.name, {})[node] = None

    def _unindex(self, node: Node) -> None:
        op = op_of(node)
        if op is not None:
            self._by_op[op.name].pop(node, None)

    def _erase(self, node: Node) -> None:
        self._unindex(node)
        self.legality.forget(node)
        self.changed.pop(node, None)
        self.graph.erase_node(node)


_PROVENANCE = ("stack_trace", "nn_module_stack")
