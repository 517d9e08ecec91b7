"""Permutations of a tensor's dimensions: reading them under any spelling, building them once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of

MOVES = ("transpose", "t", "permute", "movedim", "getattr")
"""Operations that only reorder dimensions (getattr: `x.T`, `x.mT`)."""

Order = tuple[int, ...]
"""For each dimension of the result the dimension of the input that it is."""


def order_of(node: Node) -> Order | None:
    """How `node` reorders the dimensions of its input; None if that is not all it does."""
    op = op_of(node)
    if op is None or op.name not in MOVES:
        return None
    values = arguments(node)
    source = tensor_of(values["input"]) if values is not None else None
    if values is None or source is None or not source.dim():  # a scalar has dimensions 0 and -1
        return None
    return _READ[op.name](values, source.dim())


def _transpose(values: dict[str, Any], rank: int) -> Order | None:
    return swapped(rank, values["dim0"], values["dim1"])


def swapped(rank: int, one: int, other: int) -> Order:
    """The order that swaps two dimensions, which may be counted from the end."""
    order = list(range(rank))
    if rank:
        order[one], order[other] = order[other], order[one]
    return tuple(order)


def _t(values: dict[str, Any], rank: int) -> Order | None:
    return tuple(reversed(range(rank)))


def _permute(values: dict[str, Any], rank: int) -> Order | None:
    return tuple(dim % rank for dim in values["dims"])


def _movedim(values: dict[str, Any], rank: int) -> Order | None:
    sources, destinations = _dims(values["source"], rank), _dims(values["destination"], rank)
    placed = dict(zip(destinations, sources, strict=True))
    rest = iter(dim for dim in range(rank) if dim not in sources)
    return tuple(placed[dim] if dim in placed else next(rest) for dim in range(rank))


def _dims(dims: int | Sequence[int], rank: int) -> list[int]:
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]


def _attribute(values: dict[str, Any], rank: int) -> Order | None:
    if values["name"] == "T":
        return tuple(reversed(range(rank)))
    return swapped(rank, -2, -1) if values["name"] == "mT" and rank >= 2 else None


_READ = {
    "transpose": _transpose,
    "t": _t,
    "permute": _permute,
    "movedim": _movedim,
    "getattr": _attribute,
}


def moved(rank: int, source: int, destination: int) -> Order:
    """The order that takes one dimension to another place; neither counted from the end."""
    order = [dim for dim in range(rank) if dim != source]
    order.insert(destination, source)
    return tuple(order)


def is_identity(order: Order) -> bool:
    """Whether nothing moves."""
    return order == tuple(range(len(order)))


def spell(order: Order) -> tuple[str, tuple[Any, ...]]:
    """The canonical operation and its arguments after the tensor: a swap of two dimensions is a
    transpose of the lower with the higher one, anything else a permute."""
    places = [place for place, dim in enumerate(order) if place != dim]
    if len(places) == 2:
        return "transpose", tuple(places)
    return "permute", (order,)


def base_of(node: Node, order: Order) -> tuple[Node, Order]:
    """The tensor that `node` shows in another order (through any chain of moves), and how `order`
    on top of that arranges its dimensions."""
    inner = order_of(node)
    while inner is not None:
        order = tuple(inner[dim] for dim in order)
        node = node.all_input_nodes[0]
        inner = order_of(node)
    return node, order


def permute(edit: Editor, node: Node, order: Order) -> Node:
    """`node` with its dimensions in `order`: at most one new node, none where nothing moves."""
    base, order = base_of(node, order)
    if is_identity(order):
        return base
    name, args = spell(order)
    return edit.call(name, base, *args)
