"""Write a cat along a dimension that all parts were given for it as a stack.

Before: `cat([a.unsqueeze(1), b.unsqueeze(1)], 1)`, `cat([a.view(-1, 1, 8), b.view(-1, 1, 8)], 1)`
After:  `stack([a, b], 1)`

Gains: every other pattern sees one spelling. Costs: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import joined_by
from optimus.values import same_sizes

_RESHAPES = ("unsqueeze", "reshape", "unflatten")


@dataclass(frozen=True)
class LowerUnsqueezedCatToStack(Pattern):
    """See the module's text."""

    anchors = ("cat",)
    family = "normalize"

    def match(self, node: Node) -> Match | Miss:
        joined = joined_by(node)
        if joined is None:
            return Miss("not a list of tensors")
        parts, dim = joined
        sources = [_before_unsqueeze(part, dim) for part in parts]
        whole = [source for source in sources if source is not None]
        if len(parts) < 2 or len(whole) < len(parts):
            return Miss("not every part was given the dimension for this")
        first = tensor_of(whole[0])
        shapes = [tensor.shape for tensor in map(tensor_of, whole) if tensor is not None]
        if first is None or not all(same_sizes(first.shape, shape) for shape in shapes):
            return Miss("parts of unequal shapes")
        return Match((node, *dict.fromkeys(parts)), values={"sources": whole, "dim": dim})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call("stack", match["sources"], match["dim"]))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        a, b = torch.randn(4, 3), torch.randn(4, 3)
        return (
            Example("unsqueeze", lambda: (_Unsqueezed(1), (a, b)), fires=1, exact=True),
            Example("other dimension", lambda: (_Unsqueezed(0), (a, b)), fires=0, exact=True),
        )


def _before_unsqueeze(node: Node, dim: int) -> Node | None:
    """The tensor to which `node` only adds dimension `dim`, of size one."""
    op, out = op_of(node), tensor_of(node)
    if op is None or op.name not in _RESHAPES or out is None or dim >= out.dim():
        return None
    source = node.all_input_nodes[0]
    tensor = tensor_of(source)
    size = out.shape[dim]
    if tensor is None or not isinstance(size, int) or size != 1:
        return None
    rest = [*out.shape[:dim], *out.shape[dim + 1 :]]
    return source if same_sizes(tensor.shape, rest) else None


class _Unsqueezed(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a.unsqueeze(1), b.view(-1, 1, 3)], self.dim)
