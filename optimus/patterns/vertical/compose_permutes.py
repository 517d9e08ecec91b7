"""Make one reordering of dimensions of several in a row, and none where they cancel.

Before: `x.transpose(0, 1).permute(0, 2, 1)`, `w.t().t()`
After:  `permute(x, (1, 2, 0))`, `w`

Gains: nodes; what stands around it is seen as neighbours. Costs: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.axes import MOVES, base_of, order_of, permute
from optimus.editor import Editor
from optimus.pattern import Example, Match, Miss, Pattern


@dataclass(frozen=True)
class ComposePermutes(Pattern):
    """See the module's text."""

    anchors = MOVES
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        order = order_of(node)
        if order is None:
            return Miss("not only a reordering of dimensions")
        source = node.all_input_nodes[0]
        if order_of(source) is None:
            return Miss("its input is not reordered")
        base, composed = base_of(source, order)
        return Match((node, source), values={"base": base, "order": composed})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, permute(edit, match["base"], match["order"]))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(2, 3, 4)
        return (
            Example("chain", lambda: (_Chain(), (x,)), fires=2, exact=True),
            Example("apart", lambda: (_Apart(), (x,)), fires=0, exact=True),
        )


class _Chain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.transpose(0, 1).permute(0, 2, 1)) + torch.tanh(x).mT.mT.permute(1, 2, 0)


class _Apart(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.transpose(0, 1)).transpose(0, 1)
