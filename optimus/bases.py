"""Which tensors autograd gives one history.

A write makes the gradients of its tensor, and of all views of the same base, go another way. What
is detached lies in the same memory but is a base of its own: writes to either leave the history of
the other alone. A fake value, which all writes have been made to, tells whether a tensor required
a gradient after the last of them, not when its node was run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

from torch.fx import Graph, Node

from optimus.dropouts import kept_by_dropout
from optimus.legality import Legality, memory_of, memory_of_one, value_of
from optimus.ops import target_name
from optimus.values import is_fresh, requires_grad

Base = Node | int
"""The node that made it, or the storage of an input: inputs may be views of one another."""


def bases_of(node: Node) -> frozenset[Base]:
    """The bases that `node` is a view of, or is."""
    found: set[Base] = set()
    seen, pending = {node}, [node]
    while pending:
        view = pending.pop()
        sources = _viewed(view)
        if not sources:
            found |= _as_base(view)
        pending += [source for source in sources if source not in seen]
        seen.update(sources)
    return frozenset(found)


def base_objection(
    legality: Legality, old: Node, replaced: Mapping[Node, Node], made: Collection[Node]
) -> str | None:
    """Why what is put in place of `old` has no base that it may have: one that a dropout may take
    over from its input, or one of which writes change another history than they changed before.
    `made`: nodes which nobody else reads yet."""
    new = replaced[old]
    before, now = bases_of(old), bases_of(new)
    if any(isinstance(base, Node) and kept_by_dropout(base) for base in now - before):
        return "would be in the memory that a dropout has dropped nothing of"
    if not legality.writers(value_of(old)) or not requires_grad(value_of(old)):
        return None
    if old in before:  # a base, made or detached
        kept = now == {new} and (is_fresh(old) or new in made)
    else:
        kept = now == {replaced.get(b, b) if isinstance(b, Node) else b for b in before}
    return None if kept else "is written to, with gradients of its own"


def written_bases(graph: Graph, legality: Legality) -> dict[Node, frozenset[Base]]:
    """The bases of all nodes that live in memory which somebody writes to."""
    found: dict[Node, frozenset[Base]] = {}
    for node in graph.nodes:
        if not memory_of_one(node).isdisjoint(legality.written_storages):
            sources = _viewed(node)
            found[node] = bases_in(sources, found) if sources else _as_base(node)
    return found


def bases_in(nodes: Iterable[Node], known: Mapping[Node, Set[Base]]) -> frozenset[Base]:
    """Those of all of `nodes`, as `written_bases` has told."""
    return frozenset[Base]().union(*(known[node] for node in nodes if node in known))


def stops_gradients(node: Node) -> bool:
    """Whether no gradient goes through the call to its inputs, whatever is written to its result:
    to `x.detach()`, `torch.zeros_like(x)`, `x.new_ones(3)`."""
    name = target_name(node.target) if node.op != "placeholder" else ""
    return _detaches(node) or name.endswith("_like") or name.startswith("new_")


def _viewed(node: Node) -> list[Node]:
    if _detaches(node):
        return []
    own = memory_of_one(node)
    return [n for n in node.all_input_nodes if not own.isdisjoint(memory_of_one(n))]


def _as_base(node: Node) -> frozenset[Base]:
    is_input = node.op in ("placeholder", "get_attr")
    return memory_of((node,)) if is_input else frozenset((node,))


def _detaches(node: Node) -> bool:
    return node.op.startswith("call") and target_name(node.target) in _DETACHING


# The second is what Dynamo makes of `x.data`.
_DETACHING = ("detach", "_get_data_attr")
