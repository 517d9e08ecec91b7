"""Reshape parts of one tensor together instead of one by one before they are joined.

Before: `stack([reshape(p, (-1, 2, 4)) for p in split(x, [8] * n, 1)], 1)`, also for `unsqueeze`,
`transpose` and the like, several in a row, and for a cat
After:  `permute(reshape(stack(split(x, ...)), (n, -1, 2, 4)), (1, 0, 2, 3))`, whose stack is a view

Gains: n copies into the join become one, or none; n reshapes become one. Costs: none.
Needs: the same reshapes of parts of equal size, side by side in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.axes import moved, order_of, permute
from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import joined_by, run_of, stack
from optimus.reshaping import RESHAPES, shape_to_say
from optimus.values import same_sizes

Level = tuple[str, tuple[int, ...]]
"""`("reshape", shape)` or `("permute", order)`, of one part."""


@dataclass(frozen=True)
class MoveReshapeOutOfStack(Pattern):
    """See the module's text."""

    anchors = ("stack", "cat")
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        joined = joined_by(node)
        if joined is None:
            return Miss("not a list of tensors")
        parts, dim = joined
        levels: list[Level] = []
        nodes: dict[Node, None] = {node: None}
        while len(parts) > 1 and run_of(parts) is None:
            level = _common(parts)
            if level is None:
                return Miss("not the same reshapes of parts of one tensor, side by side")
            levels.append(level)
            nodes |= dict.fromkeys(parts)
            parts = [part.all_input_nodes[0] for part in parts]
        if not levels:
            return Miss("parts that are not reshaped")
        found = {"parts": parts, "levels": levels, "dim": dim}
        return Match(tuple(nodes), values=found)

    def rewrite(self, match: Match, edit: Editor) -> None:
        parts, dim = match["parts"], match["dim"]
        whole = stack(edit, parts)
        for name, way in reversed(match["levels"]):
            if name == "reshape":
                whole = edit.call("reshape", whole, (len(parts), *way))
            else:
                whole = permute(edit, whole, (0, *(place + 1 for place in way)))
        tensor = tensor_of(whole)
        assert tensor is not None
        whole = permute(edit, whole, moved(tensor.dim(), 0, dim))
        if match.anchor.target is torch.cat:
            whole = edit.call("flatten", whole, dim, dim + 1)
        edit.replace(match.anchor, whole)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 24, requires_grad=True)
        return (
            Example("equal", lambda: (_Reshaped(8), (x,)), fires=2, exact=True),
            Example("unequal", lambda: (_Reshaped(10), (x,)), fires=0, exact=True),
        )


def _common(parts: Sequence[Node]) -> Level | None:
    """What all `parts` do with an input of one shape, if it is the same."""
    order = order_of(parts[0])
    if order is not None:
        return ("permute", order) if all(order_of(part) == order for part in parts) else None
    ops = [op_of(part) for part in parts]
    if any(op is None or op.name not in RESHAPES for op in ops):
        return None
    before = [tensor_of(part.all_input_nodes[0]) for part in parts]
    after = [tensor_of(part) for part in parts]
    for tensors in (before, after):
        shapes = [tensor.shape for tensor in tensors if tensor is not None]
        if not all(same_sizes(shapes[0], shape) for shape in shapes):
            return None
    first = after[0]
    shape = shape_to_say(first) if first is not None else Miss("not a tensor")
    return None if isinstance(shape, Miss) else ("reshape", shape)


class _Reshaped(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, self.width, 1)[:2]
        shaped = [part.reshape(4, 2, -1).mT for part in parts]
        if self.width == 10:
            shaped[1] = parts[1].reshape(4, -1, 2)
        return torch.relu(torch.stack(shaped, 1)).sum(1) + torch.cat(shaped, 0)[:4]
