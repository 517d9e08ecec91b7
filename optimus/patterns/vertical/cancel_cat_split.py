"""Take what was put together by a cat, instead of a part of the cat.

Before: `a, b = split(cat([x, y], 1), [4, 4], 1)`; `narrow(cat([x, y, z], 1), 1, 4, 12)`
After:  `x, y`; `cat([y, z], 1)`, if nothing else of the first cat is used

Gains: the copy, forward and backward. Costs: none.
Needs: a cut along the dimension of the cat. A part that is not just one of the tensors put together
is taken only where that makes the cat superfluous and copies no more than it did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import Piece, joined_by, parting_of, sizes_of, take
from optimus.uses import keeps_type, parts_taken


@dataclass(frozen=True)
class CancelCatSplit(Pattern):
    """See the module's text."""

    anchors = ("cat",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        joined = joined_by(node)
        if joined is None:
            return Miss("not a list of tensors")
        parts, dim = joined
        sizes = sizes_of(parts, dim)
        if sizes is None:
            return Miss("sizes along the dimension are dynamic")
        taken, others = parts_taken(node, dim)
        if not taken:
            return Miss("no part of it is taken along its dimension")
        made = {item: list(_cover(piece, parts, sizes)) for item, piece in taken.items()}
        copied = sum(piece.size for item, piece in taken.items() if len(made[item]) > 1)
        kept = {item: cover for item, cover in made.items() if keeps_type(item, cover)}
        if others or copied > sum(sizes) or len(kept) < len(made):
            made = {item: cover for item, cover in kept.items() if _is_whole(cover, sizes, parts)}
        if not made:
            return Miss("no part is one that was put together, and the whole is used, too")
        nodes = (node, *made, *(user for user in node.users if parting_of(user)))
        drops = tuple(dict.fromkeys(parts))
        return Match(nodes, drops, {"made": made, "pieces": taken, "dim": dim})

    def rewrite(self, match: Match, edit: Editor) -> None:
        for item, cover in match["made"].items():
            if match["pieces"][item].dropped:
                new = edit.call("select", cover[0].source, match["dim"], cover[0].start)
            else:
                parts = [take(edit, piece) for piece in cover]
                new = parts[0] if len(parts) == 1 else edit.call("cat", parts, match["dim"])
            edit.replace(item, new)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        return (
            Example("joints", lambda: (_Cut([3, 5]), (x, y)), fires=1, exact=True),
            Example("used whole", lambda: (_Cut([2, 6], whole=True), (x, y)), fires=0),
        )


def _cover(piece: Piece, parts: Sequence[Node], sizes: Sequence[int]) -> Iterator[Piece]:
    """What `piece` of the cat consists of: ranges of the tensors that were put together."""
    starts = [0, *accumulate(sizes)]
    for part, size, start in zip(parts, sizes, starts, strict=False):
        low, high = max(piece.start, start), min(piece.stop, start + size)
        if low < high:
            yield Piece(part, piece.dim, low - start, high - low)


def _is_whole(cover: Sequence[Piece], sizes: Sequence[int], parts: Sequence[Node]) -> bool:
    whole = dict(zip(parts, sizes, strict=True))
    return len(cover) == 1 and cover[0].size == whole[cover[0].source]


class _Cut(torch.nn.Module):
    def __init__(self, sizes: Sequence[int], whole: bool = False) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.whole = whole

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([x, y], 1)
        parts = torch.split(joined, self.sizes, 1)
        sums = [torch.relu(part).sum(1) for part in parts]
        return torch.stack([*sums, joined.mean(1)] if self.whole else sums)
