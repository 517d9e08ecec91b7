"""Stack equal parts of one tensor without a copy.

Before: `stack(split(x, [8] * n, 1), 1)`
After:  `unflatten(x, 1, (n, 8))`; permuted, to stack along another dimension

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
from optimus.patterns.vertical.cancel_unbind_stack import match_run
from optimus.pieces import stack


@dataclass(frozen=True)
class MergeSplitStack(Pattern):
    """See the module's text."""

    anchors = ("stack",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        return match_run(node, dropped=False)

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, stack(edit, match["parts"], match["dim"]))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 6, requires_grad=True)
        return (
            Example("equal", lambda: (_Stacks([2, 2, 2]), (x,)), fires=3),
            Example("order", lambda: (_Stacks([2, 2, 2], -1), (x,)), fires=0, exact=True),
        )


class _Stacks(torch.nn.Module):
    def __init__(self, sizes: Sequence[int], step: int = 1) -> None:
        super().__init__()
        self.sizes, self.step = list(sizes), step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, self.sizes, 1)[:: self.step]
        return torch.stack([torch.relu(torch.stack(parts, dim)).sum() for dim in range(3)])
