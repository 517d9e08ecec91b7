"""Joins of stored tensors: what a graph makes of its parameters by stacks and cats.

`stack([cat([W_1, W_2]), cat([W_3, W_4])])` is one tensor in which every parameter has its part:
that is how the parameters could be stored. A join of transposed parameters is none of these: stored
so, they would have other strides, and the compiler guards strides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Node

from optimus.legality import tensor_of
from optimus.ops import name_of
from optimus.packs import Part, View
from optimus.pieces import joined_by
from optimus.values import static_size

JOINS = ("stack", "cat")


@dataclass
class Join:
    """A stack or cat, along the first dimension, of stored tensors or of such joins of them.

    `members` are the stored tensors in their order, and `parts` where each lies in the result;
    `nodes` is all that lies between: the join itself and those inside it.
    """

    node: Node
    members: list[Node] = field(default_factory=list[Node])
    parts: list[Part] = field(default_factory=list[Part])
    nodes: set[Node] = field(default_factory=set[Node])


def read_join(node: Node, is_stored: Callable[[Node], bool]) -> Join | None:
    """The join that ends in `node`; None if it is none, or joins anything that is not stored."""
    if name_of(node) not in JOINS:
        return None
    join = Join(node)
    return join if _read(node, (), join, is_stored) and len(join.members) > 1 else None


def _read(
    node: Node, views: tuple[View, ...], join: Join, is_stored: Callable[[Node], bool]
) -> bool:
    """Add what `node` is made of, which `views` of the whole show, to `join`."""
    if is_stored(node):
        join.members.append(node)
        join.parts.append(Part(views))
        return True
    join.nodes.add(node)
    joined = _joined(node) if name_of(node) in JOINS else None
    return joined is not None and all(
        _read(source, (*views, view), join, is_stored) for source, view in joined
    )


def _joined(node: Node) -> list[tuple[Node, View]] | None:
    """What a stack or cat joins along the first dimension, each with the view that shows it."""
    found, out = joined_by(node), tensor_of(node)
    if found is None or out is None or found[1]:
        return None
    if name_of(node) == "stack":
        return [(source, ("select", (0, i))) for i, source in enumerate(found[0])]
    joined: list[tuple[Node, View]] = []
    start = 0
    for source in found[0]:
        tensor = tensor_of(source)
        # An empty vector may stand among matrices, and counts for nothing.
        size = static_size(tensor, 0) if tensor is not None and tensor.dim() == out.dim() else None
        if size is None:
            return None
        joined.append((source, ("narrow", (0, start, size))))
        start += size
    return joined
