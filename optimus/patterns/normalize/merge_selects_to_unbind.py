"""Take the places of one tensor by one unbind.

Before: `a = x[:, 0]; b = x[:, 1]; c = x[:, 2]`
After:  `a, b, c = unbind(x, 1)`; of a tensor that is longer, `unbind(narrow(x, 1, 0, 3), 1)`

Gains: the gradient of an unbind is one stack, that of N places is N tensors as large as x, added
up; every other pattern sees one spelling. Costs: zeros for places not taken in that stack.
Needs: two places at least, no more than half of those between the first and the last unused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Example, Match, SweepPattern
from optimus.pieces import Piece, direct_piece, take


@dataclass(frozen=True)
class MergeSelectsToUnbind(SweepPattern):
    """See the module's text."""

    min_share: float = 0.5
    """The part of the places between the first and the last that must be taken."""

    anchors = ("select",)
    family = "normalize"
    loner = "too few other places of its source are taken"

    def matches(self, nodes: Sequence[Node]) -> Iterator[Match]:
        sources: dict[tuple[Node, int], dict[Node, int]] = defaultdict(dict)
        for node in nodes:
            piece = direct_piece(node)
            if piece is not None and piece.dropped:
                sources[piece.source, piece.dim][node] = piece.start
        for (source, dim), places in sources.items():
            first, last = min(places.values()), max(places.values())
            span = last + 1 - first
            if span > 1 and len(set(places.values())) >= self.min_share * span:
                piece = Piece(source, dim, first, span)
                yield Match(tuple(places), values={"piece": piece, "places": places})

    def rewrite(self, match: Match, edit: Editor) -> None:
        piece: Piece = match["piece"]
        parts = edit.call("unbind", take(edit, piece), piece.dim)
        taken = list(dict.fromkeys(match["places"].values()))
        items = edit.items(parts, [place - piece.start for place in taken])
        at = dict(zip(taken, items, strict=True))
        for node, place in match["places"].items():
            edit.replace(node, at[place])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 9, 2, requires_grad=True)
        return (
            Example("run", lambda: (_Places([2, 4, 3, 2]), (x,)), fires=1, exact=True),
            Example("far apart", lambda: (_Places([0, 8]), (x,)), fires=0, exact=True),
        )


class _Places(torch.nn.Module):
    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()
        self.places = list(places)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.relu(x[:, place]) for place in self.places], 1)
