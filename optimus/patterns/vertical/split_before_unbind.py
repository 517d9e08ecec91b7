"""Split a tensor before it is unbound, where all its rows are split alike.

Before: `[row.split([8, 4], 1) for row in x.unbind(1)]`
After:  `[part.unbind(1) for part in x.split([8, 4], 2)]`

Gains: one split for N; what takes part j of every row (token mixing, heads) finds these side by
side in one view. Costs: none.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments, name_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import parting_of, split
from optimus.stacking import rank_of
from optimus.values import static_size


@dataclass(frozen=True)
class SplitBeforeUnbind(Pattern):
    """See the module's text."""

    anchors = ("unbind",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        values = arguments(node) or {}
        source = values["input"]
        value, at = tensor_of(source), values["dim"] % rank_of(source)
        splits = [split for row in node.users for split in row.users]
        if value is None or len(node.users) < 2 or len(node.users) != static_size(value, at):
            return Miss("not all rows are read")
        if len(splits) != len(node.users) or any(name_of(user) != "split" for user in splits):
            return Miss("rows are read otherwise than by one split each")
        cuts = {_cut(split) for split in splits}
        if len(cuts) > 1 or None in cuts:
            return Miss("rows are split in different ways")
        pieces = tuple(piece for split in splits for piece in split.users)
        nodes = (node, *node.users, *splits, *pieces)
        return Match(nodes, values={"pieces": pieces, "cut": cuts.pop(), "at": at})

    def rewrite(self, match: Match, edit: Editor) -> None:
        (sizes, dim), at = match["cut"], match["at"]
        source = (arguments(match.anchor) or {})["input"]
        parts = split(edit, source, sizes, dim if dim < at else dim + 1)
        rows = [edit.call("unbind", part, at) for part in parts]
        for piece in match["pieces"]:
            row, index = piece.args[0].args[0].args[1], piece.args[1]
            edit.replace(piece, edit.call(operator.getitem, rows[index], row))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(2, 3, 6, requires_grad=True)
        return (
            Example("token mixing", lambda: (_Mixing([[2, 4]] * 3), (x,)), fires=1, exact=True),
            Example("unlike", lambda: (_Mixing([[2, 4], [4, 2], [2, 4]]), (x,)), fires=0),
        )


def _cut(node: Node) -> tuple[tuple[int, ...], int] | None:
    """Sizes and dimension of a split; None where a size is dynamic."""
    parting = parting_of(node)
    return (tuple(parting.sizes), parting.dim) if parting is not None else None


class _Mixing(torch.nn.Module):
    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [
            row.split(list(sizes), 1) for row, sizes in zip(x.unbind(1), self.sizes, strict=True)
        ]
        return torch.cat([part.relu() for parts in zip(*rows, strict=True) for part in parts], 1)
