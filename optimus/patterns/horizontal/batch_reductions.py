"""Reduce parts of one tensor together.

Before: `[x_i.sum(1) for x_i in x.unbind(1)]`
After:  `x.sum(2).unbind(1)`

Sums, means, maxima and minima over the same dimensions. Gains: one kernel for N. Costs: none.
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
class BatchReductions(GroupPattern):
    """See the module's text."""

    anchors = ("sum", "mean", "amax", "amin")
    family = "horizontal"

    def key(self, node: Node) -> Hashable | Miss:
        rank = rank_of(input_of(node))
        return (rank, _dims(node)) if rank else Miss("its input is a scalar")

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        return arrange(group, _inputs, _busy(group[0]))

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        values = arguments(group[0]) or {}
        merged = merge(edit, group, _inputs, _busy(group[0]))
        rank = rank_of(values["input"])
        dims = tuple(merged.dim(dim, rank) for dim in _dims(group[0]))
        out = call_again(edit, group[0], input=merged.inputs[0], dim=dims)
        at = merged.at
        if not values["keepdim"]:
            at += sum(dim - rank_of(merged.inputs[0]) > merged.at for dim in dims)
        for node, part in zip(group, merged.take_apart(edit, out, at), strict=True):
            edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 4, 6)
        return (
            Example("items", lambda: (_Reduce((1, 1, 1, 1)), (x,)), fires=2),
            Example("kept dimensions", lambda: (_Reduce((1, 1, 1, 1), True), (x,)), fires=2),
            Example("other dimensions", lambda: (_Reduce((0, 1)), (x[:, :2],)), fires=0),
        )


def _inputs(node: Node) -> list[Node]:
    return [input_of(node)]


def _dims(node: Node) -> tuple[int, ...]:
    """The dimensions that are reduced, counted from the front."""
    dims, rank = (arguments(node) or {})["dim"], rank_of(input_of(node))
    if isinstance(dims, int):
        return (dims % rank,)
    return tuple(sorted(dim % rank for dim in dims)) if dims else tuple(range(rank))


def _busy(node: Node) -> set[int]:
    return {dim - rank_of(input_of(node)) for dim in _dims(node)}


class _Reduce(torch.nn.Module):
    def __init__(self, dims: Sequence[int], keepdim: bool = False) -> None:
        super().__init__()
        self.dims = tuple(dims)
        self.keepdim = keepdim

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = x.unbind(1)
        return [
            part.sum(dim, keepdim=self.keepdim) + part.amax(dim, keepdim=self.keepdim)
            for part, dim in zip(parts, self.dims, strict=True)
        ]
