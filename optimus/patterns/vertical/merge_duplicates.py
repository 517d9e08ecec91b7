"""Compute what is computed several times only once.

Before: `a = relu(linear(x, w)); b = relu(linear(x, w))`; the same part of x taken twice
After:  `a = relu(linear(x, w))`, read in both places

Gains: the work of all but one, forward and backward, and their saved activations. Costs: none.
Needs: operations without side effects that draw no random numbers, on the same inputs; no casts to
a coarser type whose gradients would be added up in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.effects import effects_of
from optimus.legality import tensor_of
from optimus.ops import op_of
from optimus.pattern import EVERY_CALL, Example, Match, SweepPattern
from optimus.pieces import piece_of


@dataclass(frozen=True)
class MergeDuplicates(SweepPattern):
    """See the module's text."""

    anchors = EVERY_CALL
    family = "vertical"
    loner = "computed once"

    def matches(self, nodes: Sequence[Node]) -> Iterator[Match]:
        twins = _number(nodes)
        if twins:
            # All at once, as a join of a thousand parts is rebuilt for every change of one.
            involved = dict.fromkeys((*twins, *twins.values()))
            yield Match(tuple(involved), values={"twins": twins})
        # Refused where anything in between minds: then one by one, each with the nearest before.
        first: dict[Hashable, Node] = {}
        for node in twins and nodes:
            key = _key(node, {}) if node.users else None
            twin = first.get(key)
            if key is not None and twin is not None and _may_be_one(node, twin):
                yield Match((node, twin), values={"twins": {node: twin}})
            if key is not None and node.users:
                first[key] = node

    def rewrite(self, match: Match, edit: Editor) -> None:
        for node, twin in match["twins"].items():
            edit.replace(node, twin)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 4, requires_grad=True)
        return (
            Example("twins", lambda: (_Twins(), (x,)), fires=1),
            Example("different", lambda: (_Different(), (x,)), fires=0),
        )


def _may_be_one(node: Node, twin: Node) -> bool:
    """Where both are returned, one value would have to be copied, to give each its own memory."""
    if not twin.users or not effects_of(node).pure or _rounds_gradients(node):
        return False
    return not any(user.op == "output" and user in twin.users for user in node.users)


def _rounds_gradients(node: Node) -> bool:
    """Whether it casts to a coarser type: the gradients of several casts are added up in the type
    that is cast, those of one in the coarser."""
    op, out = op_of(node), tensor_of(node)
    if op is None or op.name != "to" or out is None or not out.requires_grad:
        return False
    source = tensor_of(node.all_input_nodes[0])
    return source is None or _unit(source.dtype) < _unit(out.dtype)


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _number(nodes: Sequence[Node]) -> dict[Node, Node]:
    """For each node that computes what an earlier one does the first that does: value numbering."""
    first: dict[Hashable, Node] = {}
    twins: dict[Node, Node] = {}
    for node in nodes:
        key = _key(node, twins) if node.users else None
        if key is not None:
            twin = first.setdefault(key, node)
            if twin is not node and _may_be_one(node, twin):
                twins[node] = twin
    return twins


def _key(node: Node, twins: Mapping[Node, Node]) -> Hashable | None:
    """Equal for calls that compute the same; None for a call that cannot be compared."""
    piece = piece_of(node)
    if piece is not None:
        return piece._replace(source=twins.get(piece.source, piece.source))
    try:
        key = (node.op, node.target, _frozen(node.args, twins), _frozen(node.kwargs, twins))
        hash(key)
    except TypeError:
        return None
    return key


_PLAIN = {int, bool, str, type(None)}


def _frozen(value: Any, twins: Mapping[Node, Node]) -> Hashable:
    """Numbers by type and digits: 1, 1.0 and True are different arguments, as are 0.0 and -0.0."""
    if isinstance(value, Node):
        return twins.get(value, value)
    if type(value) in _PLAIN:
        return (type(value), value)
    if isinstance(value, dict):
        return tuple((name, _frozen(part, twins)) for name, part in sorted(value.items()))
    if isinstance(value, tuple | list):
        return tuple(_frozen(part, twins) for part in value)
    if isinstance(value, slice):
        return ("slice", *(_frozen(b, twins) for b in (value.start, value.stop, value.step)))
    return (type(value), repr(value) if isinstance(value, float | complex) else value)


class _Twins(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(self.linear(x)) + x[:, :2].sum()
        return a * torch.tanh(self.linear(x)) * torch.split(x, 2, 1)[0].sum()


class _Different(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drops = [torch.nn.functional.dropout(x, 0.5) for _ in range(2)]
        return drops[0] + drops[1] + torch.clamp(x, 0) + torch.clamp(x, 0.0)
