"""Buffers that a graph updates, and how it could update those of many modules at once.

Merged batch norms update a `cat` of all running statistics and copy its parts back to where they
came from; stored as that cat, the buffers are updated where they lie. Counters that are all
incremented alike are one vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from optimus.grouping import freeze
from optimus.joins import Join
from optimus.legality import Legality, storages_of, tensor_of, value_of
from optimus.packs import Part
from optimus.pieces import piece_of


def is_buffer(node: Node, given: Mapping[Node, Any]) -> bool:
    """Whether `node` is an input that stands for a tensor which a module keeps, no parameter."""
    value = given.get(node)
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return False
    # How Dynamo marks what it found on a module; a private name.
    return bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type"))


def is_written_back(join: Join, legality: Legality) -> bool:
    """Whether nobody could tell if the members of `join` were its parts from the start.

    So it is if neither is written to; or if the members are read by the join alone, and written to
    once: each gets its part, after the last write to the join.
    """
    writers = legality.writers(value_of(join.node))
    if not writers and not legality.writers([value_of(node) for node in join.members]):
        return True
    copies = _write_backs(join)
    if not copies or any(copy < w for copy in copies for w in writers):
        return False
    own = {*join.members, *copies}
    memory = storages_of([value_of(node) for node in join.members])
    if any(storages_of(value_of(n)) & memory for n in legality.graph.nodes if n not in own):
        return False
    readers = {user for node in join.members for user in node.users}
    return readers <= {*join.nodes, *copies} and not any(
        user not in join.nodes for node in join.nodes - {join.node} for user in node.users
    )


def drop_write_backs(join: Join) -> None:
    """Erase the copies of parts of `join` to its members."""
    for copy in _write_backs(join):
        source = copy.args[1]
        copy.graph.erase_node(copy)
        while isinstance(source, Node) and source is not join.node and not source.users:
            source, unused = source.all_input_nodes[0], source
            unused.graph.erase_node(unused)


def _write_backs(join: Join) -> list[Node]:
    """Calls that give each member its part of `join`, and whose result nobody reads; none unless
    there is one for each."""
    found: list[Node] = []
    for member, part in zip(join.members, join.parts, strict=True):
        own = [user for user in member.users if _is_write_back(user, member, join, part)]
        if len(own) != 1:
            return []
        found += own
    return found


def _is_write_back(user: Node, member: Node, join: Join, part: Part) -> bool:
    if _method(user) != "copy_" or user.users or len(user.args) < 2:
        return False
    target, source = user.args[:2]
    return target is member and isinstance(source, Node) and _shows(source, join, part)


def _shows(node: Node, join: Join, part: Part) -> bool:
    """Whether `node` is `part` of the join."""
    piece = piece_of(node)
    if piece is None or piece.source is not join.node or len(part.views) != 1 or piece.dim:
        return False
    if piece.dropped:
        return part.views == (("select", (0, piece.start)),)
    return part.views == (("narrow", (0, piece.start, piece.size)),)


@dataclass
class Counters:
    """Buffers of one number each, `members`, that the graph changes alike by `calls` and reads
    nowhere else."""

    members: list[Node] = field(default_factory=list[Node])
    calls: list[Node] = field(default_factory=list[Node])

    @property
    def parts(self) -> list[Part]:
        """Where each lies in the vector of all."""
        return [Part((("select", (0, i)),)) for i in range(len(self.members))]

    def update_at_once(self, whole: Node) -> None:
        """Change the vector `whole` of all by one call in place of many."""
        first, *others = self.calls
        first.args = (whole, *first.args[1:])
        first.meta["example_value"] = tensor_of(whole)
        for call in others:
            call.graph.erase_node(call)


def counters_of(graph: Graph, given: Mapping[Node, Any]) -> list[Counters]:
    """The counters of `graph`, two or more of a kind."""
    kinds: dict[Hashable, Counters] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and (kind := _counted_by(node, given)) is not None:
            counters = kinds.setdefault(kind, Counters())
            counters.members.append(node)
            counters.calls.append(next(iter(node.users)))
    memory = Counter(s for n in graph.nodes for s in storages_of(value_of(n)))
    return [
        counters
        for counters in kinds.values()
        if len(counters.members) > 1
        # Its own value and that of the call: nothing else lives there.
        and all(memory[s] == 2 for n in counters.members for s in storages_of(value_of(n)))
    ]


def _counted_by(node: Node, given: Mapping[Node, Any]) -> Hashable | None:
    """What the one call that touches a counter does to it; None if `node` is no counter."""
    if not is_buffer(node, given) or given[node].dim() or len(node.users) != 1:
        return None
    call = next(iter(node.users))
    method = _method(call)
    if method not in ("add_", "iadd") or call.users or call.all_input_nodes != [node]:
        return None
    if call.args[0] is not node:
        return None
    value = given[node]
    return (
        method,
        freeze(call.args[1:]),
        freeze(sorted(call.kwargs.items())),
        value.dtype,
        value.device,
    )


def _method(call: Node) -> str:
    return str(getattr(call.target, "__name__", call.target))
