"""Write every reordering of dimensions as a transpose of two, or else a permute.

Before: `x.T`, `x.mT`, `x.t()`, `x.movedim(0, -1)`, `x.permute(1, 0)`, `x.transpose(2, 1)`
After:  `transpose(x, 0, 1)`, `permute(x, (1, 2, 0))`, ...

Gains: every other pattern sees two spellings. Costs: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.axes import MOVES, is_identity, order_of, spell
from optimus.editor import Editor
from optimus.ops import OPS
from optimus.pattern import Example, Match, Miss, Pattern


@dataclass(frozen=True)
class LowerMovesToPermute(Pattern):
    """See the module's text."""

    anchors = MOVES
    family = "normalize"

    def match(self, node: Node) -> Match | Miss:
        order = order_of(node)
        if order is None:
            return Miss("not only a reordering of dimensions")
        if is_identity(order):
            return Miss("nothing moves")
        name, args = spell(order)
        source = node.all_input_nodes[0]
        if node.target is OPS[name].target and node.args == (source, *args) and not node.kwargs:
            return Miss("canonical already")
        values = dict(zip(OPS[name].parameters, (source, *args), strict=True))
        return Match((node,), values={"name": name, "arguments": values})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.respell(match.anchor, match["name"], **match["arguments"])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 4)
        return (
            Example("moves", lambda: (_Moves(), (x,)), fires=5, exact=True),
            Example("none", lambda: (_None(), (x,)), fires=0, exact=True),
        )


class _Moves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x.T) + torch.tanh(x.mT) + torch.tanh(x.t())
        return y.unsqueeze(2).movedim(0, -1).relu().transpose(-1, 0) * 2


class _None(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.transpose(x, 0, 1) + x.permute(0, 1) + x.shape[0]
