"""Take what was put together by a stack, instead of a place of the stack.

Before: `a, b = unbind(stack([x, y], 1), 1)`; `select(stack([x, y], 1), 1, 0)`;
`narrow(stack([x, y, z]), 0, 1, 2)`
After:  `x, y`; `x`; `stack([y, z])`, if nothing else of the first stack is used

Gains: the copy, forward and backward. Costs: none.
Needs: places along the dimension of the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import Piece, joined_by, parting_of
from optimus.uses import keeps_type, parts_taken


@dataclass(frozen=True)
class CancelStackUnbind(Pattern):
    """See the module's text."""

    anchors = ("stack",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        joined = joined_by(node)
        if joined is None:
            return Miss("not a list of tensors")
        parts, dim = joined
        taken, others = parts_taken(node, dim)
        copied = sum(piece.size for piece in taken.values() if not piece.dropped)
        kept = {item: piece for item, piece in taken.items() if _keeps_type(item, piece, parts)}
        if others or copied > len(parts) or len(kept) < len(taken):
            taken = {item: piece for item, piece in kept.items() if piece.dropped}
        if not taken:
            return Miss("no place of it is taken along its dimension, or the whole is used, too")
        nodes = (node, *taken, *(user for user in node.users if parting_of(user)))
        drops = tuple(dict.fromkeys(parts))
        return Match(nodes, drops, {"taken": taken, "parts": parts, "dim": dim})

    def rewrite(self, match: Match, edit: Editor) -> None:
        for item, piece in match["taken"].items():
            edit.replace(item, _part(edit, piece, match["parts"][piece.start : piece.stop]))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        return (
            Example("places", lambda: (_Places(1), (x, y)), fires=1, exact=True),
            Example("other dimension", lambda: (_Places(2), (x, y)), fires=0, exact=True),
        )


def _keeps_type(item: Node, piece: Piece, parts: Sequence[Node]) -> bool:
    cover = [Piece(part, piece.dim, 0, 1) for part in parts[piece.start : piece.stop]]
    return keeps_type(item, cover)


def _part(edit: Editor, piece: Piece, parts: Sequence[Node]) -> Node:
    if piece.dropped:
        return parts[0]
    if len(parts) == 1:
        return edit.call("unsqueeze", parts[0], piece.dim)
    return edit.call("stack", parts, piece.dim)


class _Places(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = torch.unbind(torch.stack([x, y], self.dim), 1)[:2]
        return torch.relu(first) * torch.tanh(second)
