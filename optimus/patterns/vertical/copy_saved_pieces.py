"""Copy the pieces of a wide result that backward needs, where they are not most of it.

Before: `a, b, c = linear(x, cat(W)).split(widths, -1)`, of which a product saves `a` for backward
After:  `a.clone()` in its place

A saved piece keeps all of the result alive. Gains: the rest of it is freed in the forward pass.
Costs: a copy of the pieces, which are `most` of the result at most.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor, Refused
from optimus.legality import value_of
from optimus.ops import arguments, name_of, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import parting_of, split
from optimus.saving import is_saved
from optimus.values import requires_grad

_JOINS = ("cat", "stack")


@dataclass(frozen=True)
class CopySavedPieces(Pattern):
    """See the module's text. `most`: the largest part of a result that is copied."""

    anchors = ("split",)
    family = "vertical"
    most: float = 0.7

    def match(self, node: Node) -> Match | Miss:
        values = arguments(node) or {}
        parting = parting_of(node)
        if not _is_widened(values["tensor"]) or parting is None:
            return Miss("no result of linears that were put together")
        pieces = tuple(user for user in node.users if user.target is operator.getitem)
        if not requires_grad(value_of(values["tensor"])) or len(pieces) < 2:
            return Miss("nothing of it is saved")
        return Match((node, *pieces), values={"pieces": pieces, "sizes": parting.sizes})

    def rewrite(self, match: Match, edit: Editor) -> None:
        sizes, pieces = match["sizes"], match["pieces"]
        saved = [piece for piece in pieces if is_saved(piece, edit.legality)]
        if not saved:
            raise Refused("nothing of it is saved")
        if sum(sizes[piece.args[1]] for piece in saved) > self.most * sum(sizes):
            raise Refused("most of it is saved")
        values = arguments(match.anchor) or {}
        parts = split(edit, values["tensor"], sizes, values["dim"])
        for piece in pieces:
            part = parts[piece.args[1]]
            edit.replace(piece, edit.call("clone", part) if piece in saved else part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(5, 8)
        return (
            Example("a quarter", lambda: (_Wide([4, 8, 4]), (x,)), fires=1),
            Example("most", lambda: (_Wide([12, 2, 2]), (x,)), fires=0),
        )


def _is_widened(node: Node) -> bool:
    if name_of(node) != "linear":
        return False
    weight = (arguments(node) or {})["weight"]
    while (op := op_of(weight)) is not None and op.kind == "view":
        weight = weight.all_input_nodes[0]
    return name_of(weight) in _JOINS


class _Wide(torch.nn.Module):
    """Linears of which only the first one's result is needed for backward, joined by hand."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(width, 8) for width in widths)
        self.widths = list(widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.cat(list(self.weights))
        first, *rest = torch.nn.functional.linear(x, weight).split(self.widths, -1)
        return torch.cat([(first * first).sum(-1, True), *_shifted(rest)], -1)


def _shifted(parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (part + 1 for part in parts)
