"""Remove dropout that drops nothing: in eval mode, or with probability zero.

Before: `F.dropout(x, p, training=False)`, `F.dropout(x, 0.0)`
After:  `x`

Gains: what stands around it is seen as neighbours; a random operation less to keep in order.
Costs: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.dropouts import DROPOUTS
from optimus.editor import Editor
from optimus.ops import arguments
from optimus.pattern import Example, Match, Miss, Pattern


@dataclass(frozen=True)
class RemoveInactiveDropout(Pattern):
    """See the module's text."""

    anchors = DROPOUTS
    family = "normalize"
    replaces_effects = True  # it would draw no random number

    def match(self, node: Node) -> Match | Miss:
        values = arguments(node)
        if values is None or not isinstance(values["input"], Node):
            return Miss("writes in place")
        active = values["training"] is not False
        zero = type(values["p"]) in (int, float) and values["p"] == 0
        if active and not zero:
            return Miss("active")
        return Match((node,), values={"input": values["input"]})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, match["input"])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 4)
        return (
            Example("eval", lambda: (_Dropouts(0.5), (x,)), fires=2, exact=True, train=False),
            Example("zero", lambda: (_Dropouts(0.0), (x,)), fires=2, exact=True),
            Example("active", lambda: (_Dropouts(0.5), (x,)), fires=0),
        )


class _Dropouts(torch.nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(p)
        self.alpha = torch.nn.AlphaDropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.alpha(torch.tanh(self.drop(x))))
