"""Cut a tensor into its smallest parts at once instead of parts first.

Before: `a, b = split(x, [8, 4], 1); c, d = split(a, [6, 2], 1)`;
`narrow(narrow(x, 0, 4, 8), 0, 1, 2)`
After:  `c, d, b = split(x, [6, 2, 4], 1)`; `narrow(x, 0, 5, 2)`

Gains: nodes; the gradient of x is one cat instead of a cat of cats. Costs: none.
Needs: one dimension, and that parts which are cut further are used for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import Piece, cut, direct_piece, items_of, parting_of
from optimus.uses import parts_taken


@dataclass(frozen=True)
class MergeNestedSplits(Pattern):
    """See the module's text."""

    anchors = ("split", "narrow", "select")
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        piece, parting = direct_piece(node), parting_of(node)
        if piece is not None and piece.dropped:
            return _match_select(node, piece)
        if piece is not None:
            found = _inner(node, piece)
            return Match((node, *found), values={"pieces": found}) if found else Miss(_USED)
        items = items_of(node) if parting is not None else None
        if parting is None or items is None or parting.dropped:
            return Miss("sizes along the dimension are dynamic")
        if any(not parting.piece(index).size for index in items):
            return Miss("a part of no width")
        pieces: dict[Node, Piece] = {}
        cut = False
        for index, ends in items.items():
            outer = parting.piece(index)
            found = _inner(ends[0], outer) if len(ends) == 1 else {}
            pieces |= found or dict.fromkeys(ends, outer)
            cut = cut or bool(found)
        nodes = (node, *(end for ends in items.values() for end in ends), *pieces)
        return Match(tuple(dict.fromkeys(nodes)), values={"pieces": pieces}) if cut else Miss(_USED)

    def rewrite(self, match: Match, edit: Editor) -> None:
        pieces: dict[Node, Piece] = match["pieces"]
        first = next(iter(pieces.values()))
        if first.dropped:
            edit.replace(match.anchor, edit.call("select", first.source, first.dim, first.start))
            return
        ranges = [(piece.start, piece.stop) for piece in pieces.values()]
        made = cut(edit, first.source, first.dim, ranges)
        for node, piece in pieces.items():
            edit.replace(node, made[piece.start, piece.stop])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 12, requires_grad=True)
        return (
            Example("nested", lambda: (_Nested(), (x,)), fires=2, exact=True),
            Example("used whole", lambda: (_Nested(whole=True), (x,)), fires=0, exact=True),
        )


_USED = "no part is cut further along the same dimension, into parts apart, and used only so"


def _match_select(node: Node, piece: Piece) -> Match | Miss:
    outer = direct_piece(piece.source)
    if outer is None or outer.dropped or outer.dim != piece.dim:
        return Miss("not a place in a part of a tensor")
    whole = piece._replace(source=outer.source, start=outer.start + piece.start)
    return Match((node, piece.source), values={"pieces": {node: whole}})


def _inner(part: Node, outer: Piece) -> dict[Node, Piece]:
    """What `part` is cut into, as pieces of what it was cut from; empty if it is used otherwise."""
    taken, others = parts_taken(part, outer.dim)
    pieces = {
        node: piece._replace(source=outer.source, start=outer.start + piece.start)
        for node, piece in taken.items()
    }
    ranges = sorted({(piece.start, piece.stop) for piece in pieces.values()})
    apart = all(before[1] <= after[0] for before, after in pairwise(ranges))
    if others or not apart or any(piece.dropped for piece in pieces.values()):
        return {}
    return pieces


class _Nested(torch.nn.Module):
    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.split(x, [8, 4], 1)
        c, d = torch.split(a, [6, 2], 1)
        if self.whole:
            parts = [b, c, d, a, torch.narrow(b, 1, 1, 2)]
        else:
            parts = [b, c, d, torch.narrow(torch.narrow(torch.tanh(x), 1, 4, 8), 1, 1, 2)]
        return torch.stack([torch.relu(part).sum() for part in parts])
