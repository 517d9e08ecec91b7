"""Remove joins and cuts of a single part, and parts of no width from a cat.

Before: `cat([x], 1)`, `stack([x], 1)`, `split(x, [n])`, `unbind(x)` of size one, `cat([x, empty])`
After:  `x`, `unsqueeze(x, 1)`, `(x,)`, `(squeeze(x, 0),)`, `x`

Gains: a copy; what stands around it is seen as neighbours. Costs: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import concat, direct_piece, items_of, joined_by, parting_of, sizes_of
from optimus.values import static_size


@dataclass(frozen=True)
class RemoveSingleParts(Pattern):
    """See the module's text."""

    anchors = ("cat", "stack", "split", "unbind", "select")
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        op, values = op_of(node), arguments(node)
        if op is None or values is None:
            return Miss("says something that the canonical form cannot")
        if op.kind == "join":
            return _match_join(node, op.name)
        if op.name == "select":
            return _match_select(node)
        parting, items = parting_of(node), items_of(node)
        if parting is None or items is None or parting.count != 1:
            return Miss("more than one part")
        ends = tuple(items.get(0, ()))
        squeezed = parting.dim if parting.dropped else None
        return Match(
            (node, *ends), values={"of": parting.source, "squeeze": squeezed, "ends": ends}
        )

    def rewrite(self, match: Match, edit: Editor) -> None:
        values = match.values
        if "parts" in values:
            new = concat(edit, values["parts"], values["dim"])
        elif "unsqueeze" in values:
            new = edit.call("unsqueeze", values["of"], values["unsqueeze"])
        else:
            dim = values["squeeze"]
            new = values["of"] if dim is None else edit.call("squeeze", values["of"], dim)
        for node in values["ends"]:
            edit.replace(node, new)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 3, requires_grad=True)
        return (
            Example("single", lambda: (_Single(3), (x,)), fires=5, exact=True),
            Example("several", lambda: (_Several(), (x,)), fires=0, exact=True),
        )


def _match_join(node: Node, name: str) -> Match | Miss:
    joined = joined_by(node)
    if joined is None:
        return Miss("not a list of tensors")
    parts, dim = joined
    if name == "stack":
        if len(parts) > 1:
            return Miss("more than one part")
        return Match((node,), values={"of": parts[0], "unsqueeze": dim, "ends": (node,)})
    sizes = sizes_of(parts, dim) if len(parts) > 1 else None
    kept = [p for p, size in zip(parts, sizes, strict=True) if size] if sizes else list(parts)
    kept = kept or [parts[0]]
    if len(parts) > 1 and len(kept) == len(parts):
        return Miss("more than one part")
    dropped = tuple(part for part in parts if part not in kept)
    return Match((node,), dropped, {"parts": kept, "dim": dim, "ends": (node,)})


def _match_select(node: Node) -> Match | Miss:
    piece = direct_piece(node)
    tensor = tensor_of(piece.source) if piece is not None else None
    if piece is None or tensor is None or static_size(tensor, piece.dim) != 1:
        return Miss("more than one part")
    return Match((node,), values={"of": piece.source, "squeeze": piece.dim, "ends": (node,)})


class _Single(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (whole,) = torch.split(x, [self.width], 1)
        (row,) = torch.unbind(torch.stack([whole.relu()], 1), 1)
        return torch.cat([torch.cat([row + 1], 1), x.new_zeros(4, 0)], 1)


class _Several(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.split(x, [1, 2], 1)
        return torch.cat([b, a], 1) + torch.stack([x, x]).sum(0)
