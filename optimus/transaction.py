"""One rewrite before it counts, and the reasons not to let it.

A rewrite is refused that cannot be shown to keep the program's meaning; see optimus.editor for the
list. Every check here holds for any pattern, whatever it claims.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from optimus.bases import base_objection
from optimus.legality import Legality, memory_of, memory_of_one, storages_of, value_of
from optimus.ops import name_of, op_of
from optimus.values import (
    Unknown,
    evaluate,
    is_fresh,
    is_view,
    requires_grad,
    same_strides,
    same_type,
)

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""What a node calls, its arguments by place and by name."""


@dataclass
class Transaction:
    """What `nodes` are replaced by: new nodes in front of `before`, or others of the graph."""

    nodes: tuple[Node, ...]
    drops: tuple[Node, ...]
    before: Node
    replaces_effects: bool
    made: dict[Node, None] = field(default_factory=dict[Node, None])
    replaced: dict[Node, Node] = field(default_factory=dict[Node, Node])
    num_replaced_by: dict[Node, int] = field(default_factory=dict[Node, int])
    respelled: dict[Node, Call] = field(default_factory=dict[Node, Call])
    _views: dict[Node, None] | None = None
    _taken_over: dict[Node, bool] = field(default_factory=dict[Node, bool])

    @property
    def views(self) -> Collection[Node]:
        """Those of the replaced nodes that live in memory of an input; to be asked for when the
        rewrite is complete, as `takes_over` is."""
        if self._views is None:
            self._views = dict.fromkeys(old for old in self.replaced if not is_fresh(old))
        return self._views

    def reads(self) -> set[Node]:
        """What the new nodes read of the graph as it was."""
        return {n for node in self.made for n in node.all_input_nodes} - self.made.keys()

    def leaves(self) -> set[Node]:
        """What the replacement consists of besides new nodes."""
        return self.reads() | (set(self.replaced.values()) - self.made.keys())

    def takes_over(self, old: Node) -> bool:
        """Whether the new value for `old` is what `old` was: memory of its own, in one layout, that
        stands for nothing else."""
        known = self._taken_over.get(old)
        if known is None:
            known = self._taken_over[old] = self._takes_over(old)
        return known

    def _takes_over(self, old: Node) -> bool:
        new = self.replaced[old]
        if new not in self.made or old in self.views or not is_fresh(new):
            return False
        if not same_strides(value_of(old), value_of(new)):
            return False
        memory = memory_of_one(new)
        return self.num_replaced_by[new] == 1 and not any(
            memory & memory_of_one(node) for node in new.users if node in self.made
        )


class Check:
    """The checks of one graph. `mode`: if given, a call in other words is checked by value, too."""

    def __init__(self, graph: Graph, legality: Legality, mode: FakeTensorMode | None) -> None:
        self._graph = graph
        self._legality = legality
        self._mode = mode

    def objection(self, transaction: Transaction) -> str | None:
        """Why `transaction` may not be committed; None if it may."""
        leaves = transaction.leaves()
        if not all(self._legality.knows(node) for node in (*transaction.nodes, *leaves)):
            return "an earlier rewrite has taken away what it works on"
        matched = set(transaction.nodes)
        if not transaction.made and not transaction.replaced:
            return (
                self._spelling_objection(transaction, matched)
                or self._parts_objection(transaction)
                or self._work_objection(transaction)
                or self._effects_objection(transaction)
                or self._write_objection(transaction, leaves)
            )
        return (
            self._replacement_objection(transaction, matched)
            or self._place_objection(transaction)
            or self._spelling_objection(transaction, matched)
            or self._identity_objection(transaction)
            or self._parts_objection(transaction)
            or self._work_objection(transaction)
            or self._effects_objection(transaction)
            or self._cone_objection(transaction, leaves)
            or self._write_objection(transaction, leaves)
            or self._sharing_objection(transaction)
        )

    def _replacement_objection(self, transaction: Transaction, matched: Set[Node]) -> str | None:
        """What is replaced is matched, and its replacement has its type and its gradients."""
        replaced = transaction.replaced
        for old, new in replaced.items():
            if old not in matched:
                return f"replaces {_label(old)}, which is outside its match"
            if not same_type(value_of(old), value_of(new)):
                return f"would change the type of {_label(old)}"
            if new not in transaction.made and self._stops_gradients(old, new):
                return f"{_label(old)} lets no gradient through"
            if reason := base_objection(self._legality, old, replaced, transaction.made):
                return f"{_label(old)} {reason}"
        return None

    def _stops_gradients(self, old: Node, new: Node) -> bool:
        """Whether only one was made under no_grad: no gradient goes through a view that was."""
        modes = self._legality.context(old).grad, self._legality.context(new).grad
        return modes[0] is not modes[1] and requires_grad(value_of(old))

    def _place_objection(self, transaction: Transaction) -> str | None:
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

    def _spelling_objection(self, transaction: Transaction, matched: Set[Node]) -> str | None:
        """Other words for a call read what it read, and, checked if strict, mean what it meant."""
        for node, call in transaction.respelled.items():
            if node not in matched or node in transaction.replaced:
                return f"says {_label(node)} in other words, which is outside its match"
            inputs: list[Node] = []
            torch.fx.map_arg(call[1:], inputs.append)
            if set(inputs) != set(node.all_input_nodes):
                return f"other words for {_label(node)} have other inputs"
            if self._mode is not None and not self._means_the_same(node, call, self._mode):
                return f"other words for {_label(node)} have another value"
        return None

    def _means_the_same(self, node: Node, call: Call, mode: FakeTensorMode) -> bool:
        try:
            value = evaluate(mode, self._legality.context(node), *call)
        except Unknown:
            return False
        return same_type(value_of(node), value) and same_strides(value_of(node), value)

    def _identity_objection(self, transaction: Transaction) -> str | None:
        """A view that is returned is a tensor of its own, not one that the caller has already; and
        so is one that is read by a call that writes to the same memory."""
        given = {o: self._given_to_writers(o) for o in transaction.views}
        for old in transaction.views:
            if self._seen_parts(old) & self._seen_parts(transaction.replaced[old]):
                return f"a part of {_label(old)} is returned as a tensor of its own"
        seen = [o for o in transaction.views if given[o] or self._is_seen(o)]
        if not seen:
            return None
        news = Counter(self._itself(transaction.replaced[old])[-1] for old in seen)
        for old in seen:
            same = self._itself(transaction.replaced[old])
            is_input = same[-1].op in ("placeholder", "get_attr")
            alone = news[same[-1]] == 1 and given[old].isdisjoint(same)
            if is_input or not alone or any(self._is_seen(n, same) for n in same):
                return f"{_label(old)} is returned as a tensor of its own"
        return None

    def _seen_parts(self, call: Node) -> set[Any]:
        """Which of the tensors that a call returns the caller may get, each as that very tensor."""
        if not isinstance(value_of(call), tuple | list):
            return set()
        parts = [user for user in call.users if user.target is operator.getitem]
        return {part.args[1] for part in parts if self._is_seen(part)}

    def _given_to_writers(self, view: Node) -> set[Node]:
        """All else that calls are given which read `view` and write to its memory by another name,
        with what it may be itself."""
        writers = [w for w in self._legality.writers(value_of(view)) if w in view.users]
        apart = [w for w in writers if view not in self._legality.effects(w).writes]
        given = {node for writer in apart for node in writer.all_input_nodes} - {view}
        return {same for node in given for same in self._itself(node)}

    def _itself(self, node: Node) -> list[Node]:
        """`node` and earlier ones that may hold the very same tensor: each the next one's argument,
        which a call gave back, written to or not."""
        same = [node]
        while (source := self._given_back(same[-1])) is not None:
            same.append(source)
        return same

    def _given_back(self, node: Node) -> Node | None:
        writes = self._legality.effects(node).writes
        if len(writes) == 1 and storages_of(value_of(node)) == storages_of(value_of(writes[0])):
            return writes[0]
        return next((n for n in node.all_input_nodes if _may_give_back(node, n)), None)

    def _parts_objection(self, transaction: Transaction) -> str | None:
        """Autograd lets nobody write to memory that one call has cut into several views, or read
        one of these after a write."""
        replaced = [(old, transaction.replaced[old]) for old in transaction.views]
        parts = [(old, new) for old, new in replaced if _is_cut(new)]
        news = [new for old, new in parts if not _is_cut(old)]
        # Alone among the ways to cut a tensor, tensor_split makes each view by itself.
        news += [node for node in transaction.respelled if name_of(node) == "tensor_split"]
        if news:
            if writers := self._legality.writers([value_of(node) for node in news]):
                return f"{_label(writers[0])} writes to memory that would be cut by one call"
            if memory_of(news) & memory_of(self._graph.output_node().all_input_nodes):
                return "a view is returned of memory that would be cut by one call"
        for old, new in parts:
            place = transaction.before if new in transaction.made else new
            writer = self._legality.written_between((new,), place, old)
            if writer is not None:
                return f"{_label(writer)} writes to it after the call that has cut it"
        return None

    def _is_seen(self, node: Node, but: Collection[Node] = ()) -> bool:
        """Whether the caller may get the very tensor: it is returned, or a call's result is that
        gives it back, because it writes to it or because it has nothing to do (flatten). Calls in
        `but` do not count."""
        end = self._graph.output_node()
        return any(user is end or self._is_given_back(node, user, but) for user in node.users)

    def _is_given_back(self, node: Node, user: Node, but: Collection[Node]) -> bool:
        if user in but:
            return False
        may = node in self._legality.effects(user).writes or _may_give_back(user, node)
        return may and self._is_seen(user, but)

    def _work_objection(self, transaction: Transaction) -> str | None:
        """All work moves to one place: it must be pure and run under that place's state."""
        place = self._legality.context(transaction.before)
        for node in transaction.nodes:
            context = self._legality.context(node)
            stays = context is place or context == place
            pure = transaction.replaces_effects or self._legality.effects(node).pure
            if (stays and pure) or (is_view(node) and context.grad == place.grad):
                continue
            if not stays:
                return "nodes run under different grad modes or autocast states"
            return f"{_label(node)} writes to memory or draws random numbers"
        return None

    def _effects_objection(self, transaction: Transaction) -> str | None:
        """Writes and random draws are made by the nodes that made them, or taken over whole."""
        effects = self._legality.effects
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

    def _order_objection(self, transaction: Transaction, matched: set[Node]) -> str | None:
        """Writes and draws that move may not pass one another, or a read of what is written."""
        moved = [n for n in matched if not self._legality.effects(n).pure]
        if not moved:
            return None
        written = storages_of(
            [value_of(w) for n in moved for w in self._legality.effects(n).writes]
        )
        random = any(self._legality.effects(n).random for n in moved)
        node, last = min(*moved, transaction.before), max(*moved, transaction.before)
        while node is not last:
            if node not in matched and node not in transaction.made:
                if random and self._legality.effects(node).random:
                    return f"{_label(node)} draws random numbers in between"
                if written & memory_of((node, *node.all_input_nodes)):
                    return f"{_label(node)} reads memory in between that the match writes to"
            node = node.next
        return None

    def _cone_objection(self, transaction: Transaction, leaves: set[Node]) -> str | None:
        """What is replaced may depend on nothing but the match, its drops and the new inputs."""
        matched = set(transaction.nodes)
        grad = self._legality.context(transaction.before).grad
        seen = leaves | set(transaction.drops)
        kept = [n for n in leaves if n in matched or is_view(n)]  # they read what the match reads
        while kept:
            inputs = [n for n in kept.pop().all_input_nodes if n not in seen]
            seen.update(inputs)
            kept += [n for n in inputs if n in matched or is_view(n)]
        pending = list(transaction.replaced)
        while pending:
            for node in pending.pop().all_input_nodes:
                if node in seen:
                    continue
                seen.add(node)
                if node not in matched and not is_view(node):
                    return f"the result depends on {_label(node)}, which the replacement ignores"
                if self._legality.context(node).grad != grad:
                    return "views were made under another grad mode"
                pending.append(node)
        return None

    def _write_objection(self, transaction: Transaction, leaves: set[Node]) -> str | None:
        """Nothing that is read earlier than it was, or later, may have been written in between."""
        if self._legality.is_functional:
            return None
        work = [node for node in transaction.nodes if not is_view(node)]
        first, last = min((*work, transaction.before)), max((*work, transaction.before))
        touched = {*leaves, *transaction.nodes}
        if not leaves.isdisjoint(transaction.nodes):  # what one of them read stands for all
            touched.update(source for node in work for source in node.all_input_nodes)
        ignored = set(transaction.nodes) if transaction.replaces_effects else set[Node]()
        writer = self._legality.written_between(touched, first, last, ignored)
        return f"{_label(writer)} writes to memory of the match" if writer is not None else None

    def _sharing_objection(self, transaction: Transaction) -> str | None:
        """Memory that somebody writes to must be shared by the same values as before."""
        if self._legality.is_memory_free:
            return None
        sharers: dict[int, list[Node]] = {}
        for old, new in transaction.replaced.items():
            if self._legality.is_pinned(value_of(old)) and not same_strides(
                value_of(old), value_of(new)
            ):
                return f"{_label(old)} must stay as it is laid out"
            for storage in memory_of_one(new):
                sharers.setdefault(storage, []).append(old)
        for olds in sharers.values():
            if len({memory_of_one(old) for old in olds}) == 1 and all(
                self._keeps_memory(transaction, old) for old in olds
            ):
                continue
            pairs = [(value_of(old), value_of(transaction.replaced[old])) for old in olds]
            if self._legality.is_pinned([before for before, _ in pairs]):
                return f"{_label(olds[0])} must keep its memory"
            writers = self._legality.writers(pairs)
            if writers:
                return f"{_label(writers[0])} writes to memory that would be shared or copied"
        return None

    def _keeps_memory(self, transaction: Transaction, old: Node) -> bool:
        new = transaction.replaced[old]
        return memory_of_one(old) == memory_of_one(new) or transaction.takes_over(old)


def _may_give_back(call: Node, argument: Node) -> bool:
    """Whether the call may return its argument itself."""
    value, own = value_of(argument), value_of(call)
    if name_of(call) in _NEW_TENSORS or not isinstance(own, torch.Tensor):
        return False
    return not is_fresh(call) and same_type(value, own) and same_strides(value, own)


# Views that are tensors of their own even where they show all of their source as it is.
_NEW_TENSORS = {
    *("chunk", "dsplit", "hsplit", "split", "tensor_split", "unbind", "vsplit"),
    *("getitem", "narrow", "select"),
    *("expand", "reshape", "squeeze", "unflatten", "unsqueeze"),
    *("movedim", "permute", "t", "transpose", "detach"),
}


def _is_cut(node: Node) -> bool:
    """Whether the value is several views that one call returned, one of them, or a view of one;
    what a call has computed, one result beside another, is not."""
    if isinstance(value_of(node), tuple | list):
        return is_view(node)
    while is_view(node):
        node, source = node.all_input_nodes[0], node
        if isinstance(value_of(node), tuple | list) and source.target is operator.getitem:
            return is_view(node)
    return False


def _label(node: Node) -> str:
    op = op_of(node)
    return op.name if op is not None else str(getattr(node.target, "__name__", node.target))
