"""Stack the places of one tensor again without a copy, along any dimension.

Before: `a, b, c = unbind(x, 1); stack([a, b, c], 0)`
After:  `transpose(x, 0, 1)`; a narrow of it for fewer places, side by side and in their order

Gains: the copy, forward and backward. Costs: the result may be laid out otherwise, and keeps all of
x alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import joined_by, run_of, stack


@dataclass(frozen=True)
class CancelUnbindStack(Pattern):
    """See the module's text."""

    anchors = ("stack",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        return match_run(node, dropped=True)

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, stack(edit, match["parts"], match["dim"]))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 3, 2, requires_grad=True)
        return (
            Example("again", lambda: (_Again([0, 1, 2]), (x,)), fires=2, exact=True),
            Example("order", lambda: (_Again([0, 2, 1]), (x,)), fires=0, exact=True),
        )


def match_run(node: Node, dropped: bool) -> Match | Miss:
    """A stack of a run: of places of a tensor if `dropped`, else of equal parts of it."""
    joined = joined_by(node)
    if joined is None:
        return Miss("not a list of tensors")
    parts, dim = joined
    run = run_of(parts)
    if run is None or run.count == 1 or run.dropped is not dropped:
        return Miss("no parts of one tensor of equal size, side by side in their order")
    return Match((node,), values={"parts": parts, "dim": dim})


class _Again(torch.nn.Module):
    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order = list(order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.unbind(x, 1)
        chosen = [places[i] for i in self.order]
        return torch.relu(torch.stack(chosen, 2)) + torch.stack(chosen, 0).permute(1, 2, 0)
