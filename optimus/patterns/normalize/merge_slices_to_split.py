"""Take disjoint ranges of one tensor by one split, the gaps between them being parts unused.

Before: `a = x[:, :8]; b = x[:, 8:12]; c = x[:, 20:]`
After:  `a, b, _, c = split(x, [8, 4, 8, 12], 1)`

Gains: the gradient of a split is one cat, that of N ranges is N tensors as large as x, added up;
every other pattern sees one spelling. Costs: zeros for the gaps in that cat.
Needs: two ranges at least that do not overlap. Of more, as many as possible are taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Example, Match, SweepPattern
from optimus.pieces import Piece, cut, direct_piece


@dataclass(frozen=True)
class MergeSlicesToSplit(SweepPattern):
    """See the module's text."""

    anchors = ("narrow",)
    family = "normalize"
    loner = "no second range of its source that it does not overlap"

    def matches(self, nodes: Sequence[Node]) -> Iterator[Match]:
        sources: dict[tuple[Node, int], dict[Node, Piece]] = defaultdict(dict)
        for node in nodes:
            piece = direct_piece(node)
            if piece is not None and piece.size:
                sources[piece.source, piece.dim][node] = piece
        for (source, dim), pieces in sources.items():
            ranges = _disjoint({(piece.start, piece.stop) for piece in pieces.values()})
            taken = {n: p for n, p in pieces.items() if (p.start, p.stop) in ranges}
            if len(ranges) > 1:
                values = {"source": source, "dim": dim, "ranges": ranges, "pieces": taken}
                yield Match(tuple(taken), values=values)

    def rewrite(self, match: Match, edit: Editor) -> None:
        parts = cut(edit, match["source"], match["dim"], match["ranges"])
        for node, piece in match["pieces"].items():
            edit.replace(node, parts[piece.start, piece.stop])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 20, requires_grad=True)
        return (
            Example("gaps", lambda: (_Ranges([(0, 8), (8, 12), (15, 20)]), (x,)), 1, exact=True),
            Example("overlap", lambda: (_Ranges([(0, 8), (6, 12)]), (x,)), fires=0, exact=True),
        )


def _disjoint(ranges: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """As many of these ranges as do not overlap: always the one that ends first (interval
    scheduling)."""
    chosen: set[tuple[int, int]] = set()
    last = 0
    for start, stop in sorted(ranges, key=lambda part: (part[1], -part[0])):
        if start >= last:
            chosen.add((start, stop))
            last = stop
    return chosen


class _Ranges(torch.nn.Module):
    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.ranges = list(ranges)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.relu(x[:, start:stop]) for start, stop in self.ranges], 1)
