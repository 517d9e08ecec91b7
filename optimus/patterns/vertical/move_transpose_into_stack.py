"""Stack tensors the way round in which linears read the stack.

Before: `x = stack(tensors, 1); linear(x.transpose(1, 2), W); bmm(x, y)`
After:  `x = stack(tensors, 2); linear(x, W); bmm(x.transpose(1, 2), y)`

A linear reads rows that lie in memory one behind the other; products of matrices read either way.
Gains: the transposed copy, written and saved for backward. Costs: the stack is written with gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.axes import order_of, swapped
from optimus.editor import Editor
from optimus.ops import arguments, name_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.stacking import rank_of

_READ_EITHER_WAY = ("bmm", "baddbmm", "matmul")


@dataclass(frozen=True)
class MoveTransposeIntoStack(Pattern):
    """See the module's text."""

    anchors = ("stack",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        values, rank = arguments(node) or {}, rank_of(node)
        at = values["dim"] % rank
        for other in (at + 1, at - 1):
            if not 0 <= other < rank:
                continue
            order = swapped(rank, at, other)
            moved = tuple(user for user in node.users if order_of(user) == order)
            rest = [name_of(user) for user in node.users if user not in moved]
            feeds_linear = any(
                name_of(reader) == "linear" for user in moved for reader in user.users
            )
            if feeds_linear and all(name in _READ_EITHER_WAY for name in rest):
                return Match((node, *moved), values={"at": at, "other": other})
        return Miss("no linear reads it transposed, or something else reads it as it is")

    def rewrite(self, match: Match, edit: Editor) -> None:
        node, *moved = match.nodes
        at, other = match["at"], match["other"]
        stacked = edit.call("stack", (arguments(node) or {})["tensors"], other)
        for user in moved:
            edit.replace(user, stacked)
        edit.replace(node, edit.call("transpose", stacked, at, other))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(5, 8, requires_grad=True)
        return (
            Example("dots and a linear", lambda: (_Dots(), (x,)), fires=1),
            Example("read as it is", lambda: (_Dots(norm=True), (x,)), fires=0),
        )


class _Dots(torch.nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(3, 4), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stacked = torch.stack([x, x.sin(), x.cos()], 1)
        mixed = self.linear(stacked.transpose(1, 2))
        dots = torch.bmm(stacked, mixed)
        return dots + stacked.mean() if self.norm else dots
