"""Scale parts of one tensor to length one together.

Before: `[F.normalize(x_i, dim=1) for x_i in x.split(D, 1)]`
After:  `F.normalize(x.unflatten(1, (N, D)), dim=2).unbind(1)`

Gains: one kernel for N. Costs: none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Node

from optimus.editor import Editor
from optimus.merging import arrange, call_again, input_of, merge
from optimus.ops import arguments
from optimus.pattern import Example, GroupPattern, Miss
from optimus.stacking import rank_of


@dataclass(frozen=True)
class BatchNormalizes(GroupPattern):
    """See the module's text."""

    anchors = ("normalize",)
    family = "horizontal"

    def key(self, node: Node) -> Hashable | Miss:
        dim, rank = (arguments(node) or {})["dim"], rank_of(input_of(node))
        if not isinstance(dim, int) or not rank:
            return Miss("works along no or several dimensions")
        return (rank, dim % rank)

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        return arrange(group, _inputs, {_dim(group[0]) - rank_of(input_of(group[0]))})

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        dim, rank = _dim(group[0]), rank_of(input_of(group[0]))
        merged = merge(edit, group, _inputs, {dim - rank})
        x, dim = merged.inputs[0], merged.dim(dim, rank)
        out = call_again(edit, group[0], input=x, dim=dim)
        for node, part in zip(group, merged.take_apart(edit, out), strict=True):
            edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 12)
        return (
            Example("features", lambda: (_Normalizes((1, 1, 1)), (x,)), fires=1),
            Example("every second", lambda: (_Normalizes((0, 1, 0, 1)), (x,)), fires=2),
            Example("along other dimensions", lambda: (_Normalizes((0, 1)), (x,)), fires=0),
        )


def _inputs(node: Node) -> list[Node]:
    return [input_of(node)]


def _dim(node: Node) -> int:
    dim: int = (arguments(node) or {})["dim"]
    return dim % rank_of(input_of(node))


class _Normalizes(torch.nn.Module):
    def __init__(self, dims: Sequence[int]) -> None:
        super().__init__()
        self.dims = tuple(dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(12 // len(self.dims), 1)
        return sum(
            (F.normalize(p, dim=d) for p, d in zip(parts, self.dims, strict=True)),
            torch.zeros(()),
        )
