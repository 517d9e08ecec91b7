"""Run softmaxes over parts of one tensor as one softmax.

Before: `[softmax(g_i, 1) for g_i in g.split(E, 1)]`
After:  `softmax(g.unflatten(1, (N, E)), 2).unbind(1)`

Gains: one kernel for N, as for the gates of a mixture of experts with many tasks. Costs: none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.merging import arrange, call_again, input_of, merge
from optimus.ops import arguments
from optimus.pattern import Example, GroupPattern, Miss
from optimus.stacking import rank_of


@dataclass(frozen=True)
class BatchSoftmaxes(GroupPattern):
    """See the module's text."""

    anchors = ("softmax", "log_softmax")
    family = "horizontal"

    def key(self, node: Node) -> Hashable | Miss:
        dim, rank = (arguments(node) or {})["dim"], rank_of(input_of(node))
        if dim is None or not rank:
            return Miss("names no dimension")
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
            Example("gates", lambda: (_Softmaxes(1), (x,)), fires=1),
            Example("over rows", lambda: (_Softmaxes(0), (x,)), fires=1),
            Example("of two tensors", lambda: (_Apart(), (x, x.clone())), fires=0),
        )


def _inputs(node: Node) -> list[Node]:
    return [input_of(node)]


def _dim(node: Node) -> int:
    dim: int = (arguments(node) or {})["dim"]
    return dim % rank_of(input_of(node))


class _Softmaxes(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.softmax(self.dim) for part in x.split(4, 1)][::-1], 1)


class _Apart(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 1) * torch.softmax(y, 1)
