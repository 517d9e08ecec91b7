"""Put everything together at once instead of parts first.

Before: `cat([cat([a, b], 1), c], 1)`
After:  `cat([a, b, c], 1)`

Gains: the copy of a and b, forward and backward. Costs: none.
Needs: one dimension and one dtype; the inner cat is used nowhere else.
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


@dataclass(frozen=True)
class MergeNestedCats(Pattern):
    """See the module's text."""

    anchors = ("cat",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        joined = joined_by(node)
        if joined is None:
            return Miss("not a list of tensors")
        parts, dim = joined
        inner = {part: _inner(part, node, dim) for part in dict.fromkeys(parts)}
        nested = [part for part, found in inner.items() if found is not None]
        if not nested:
            return Miss("no part is a cat of its own, along the same dimension and used only here")
        flat = [leaf for part in parts for leaf in inner[part] or [part]]
        return Match((node, *nested), values={"parts": flat, "dim": dim})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, edit.call("cat", match["parts"], match["dim"]))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 5)
        return (
            Example("nested", lambda: (_Nested(1), (x, y)), fires=1, exact=True),
            Example("other dimension", lambda: (_Nested(0), (x, y)), fires=0, exact=True),
        )


def _inner(part: Node, outer: Node, dim: int) -> list[Node] | None:
    """What `part` is put together from, if nothing but `outer` needs it."""
    op = op_of(part)
    if op is None or op.name != "cat" or len(part.users) > 1:
        return None
    joined = joined_by(part)
    if joined is None or joined[1] != dim:
        return None
    parts, _ = joined
    tensors = [tensor_of(n) for n in (*parts, outer)]
    # Rounded to the inner type first, a number may be another one in the outer type.
    types = {tensor.dtype for tensor in tensors if tensor is not None}
    return parts if len(types) == 1 and None not in tensors else None


class _Nested(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner = torch.cat([x.relu(), x.tanh()], self.dim)
        return torch.relu(torch.cat([inner, inner, *[y.relu()] * self.dim], 1))
