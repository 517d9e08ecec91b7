"""Put parts of one tensor together again without a copy.

Before: `a, b, c = split(x, [4, 4, 8], 1); cat([a, b], 1); cat([y, b, c], 1)`
After:  `narrow(x, 1, 0, 8)`; `cat([y, narrow(x, 1, 4, 12)], 1)` if b and c are used nowhere else

Gains: the copy, forward and backward; or fewer parts to copy. Costs: the result keeps all of x
alive where it was the only part of x that is saved for the backward pass.
Needs: parts side by side, in their order, cut along the dimension of the cat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import Piece, joined_by, regions_of, take
from optimus.uses import used_once


@dataclass(frozen=True)
class CancelSplitCat(Pattern):
    """See the module's text."""

    anchors = ("cat",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        joined = joined_by(node)
        if joined is None:
            return Miss("not a list of tensors")
        nodes, dim = joined
        regions = list(regions_of(nodes, dim))
        parts: list[Piece | Node] = []
        for region, run in regions:
            if region is not None and len(run) > 1 and (len(regions) == 1 or used_once(run)):
                parts.append(region)
            else:
                parts += run
        if len(parts) == len(nodes):
            return Miss("no parts of one tensor side by side that are used nowhere else")
        return Match((node,), values={"parts": parts, "dim": dim})

    def rewrite(self, match: Match, edit: Editor) -> None:
        parts = [take(edit, p) if isinstance(p, Piece) else p for p in match["parts"]]
        whole = parts[0] if len(parts) == 1 else edit.call("cat", parts, match["dim"])
        edit.replace(match.anchor, whole)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 16, requires_grad=True)
        return (
            Example("whole", lambda: (_Joined([[0, 1]]), (x,)), fires=1, exact=True),
            Example("order", lambda: (_Joined([[1, 0], [2, 1]]), (x,)), fires=0, exact=True),
        )


class _Joined(torch.nn.Module):
    def __init__(self, joins: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.joins = [list(join) for join in joins]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, [4, 4, 8], 1)
        joined = [torch.relu(torch.cat([parts[i] for i in join], 1)) for join in self.joins]
        return torch.stack([part.sum() for part in (*joined, *parts)])
