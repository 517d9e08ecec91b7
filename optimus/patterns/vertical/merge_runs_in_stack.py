"""Stack parts of one tensor together with other tensors as one part.

Before: `stack([y, *split(x, [8] * n, 1)], 1)`
After:  `cat([unsqueeze(y, 1), unflatten(x, 1, (n, 8))], 1)`

Gains: two parts to copy instead of n + 1. Costs: none.
Needs: parts side by side, in their order, that are used nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import joined_by, runs_of, stack
from optimus.uses import used_once


@dataclass(frozen=True)
class MergeRunsInStack(Pattern):
    """See the module's text."""

    anchors = ("stack",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        joined = joined_by(node)
        if joined is None:
            return Miss("not a list of tensors")
        parts, dim = joined
        runs = list(runs_of(parts))
        if len(runs) == 1:
            return Miss("one run, or no parts")
        groups: list[Sequence[Node]] = []
        for run, nodes in runs:
            together = run is not None and len(nodes) > 1 and used_once(nodes)
            groups += [nodes] if together else [[node] for node in nodes]
        if len(groups) == len(parts):
            return Miss("no parts of one tensor side by side that are used nowhere else")
        return Match((node,), values={"groups": groups, "dim": dim})

    def rewrite(self, match: Match, edit: Editor) -> None:
        dim = match["dim"]
        parts = [
            stack(edit, group, dim) if len(group) > 1 else edit.call("unsqueeze", group[0], dim)
            for group in match["groups"]
        ]
        edit.replace(match.anchor, edit.call("cat", parts, dim))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 2)
        return (
            Example("run", lambda: (_Stacked(), (x, y)), fires=1, exact=True),
            Example("used", lambda: (_Stacked(again=True), (x, y)), fires=0, exact=True),
        )


class _Stacked(torch.nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, 2, 1)
        out = torch.relu(torch.stack([y, *parts], 1))
        return out + sum(part.tanh().sum() for part in parts) if self.again else out
