"""Apply one linear to several inputs at once.

Before: `[linear(x_i, W, b) for x_i in x.split(D, 1)]`
After:  `linear(x.unflatten(1, (N, D)), W, b).unbind(1)`

Inputs may have different numbers of rows if these are static. Gains: one GEMM over all rows, one
for the gradient of W in place of N and their sum. Costs: a copy of inputs that are not parts of one
tensor (not before anything else has been merged, and not at all with `copy_inputs=False`); the
weight is never copied.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.grouping import freeze
from optimus.legality import tensor_of
from optimus.merging import call_again, has_plain_parameters, input_of, row_sizes
from optimus.ops import arguments
from optimus.pattern import Example, GroupPattern, Miss
from optimus.pieces import concat, region_of, split
from optimus.stacking import in_order, path_of, plan_stack, rank_of


@dataclass(frozen=True)
class JoinSharedWeightLinears(GroupPattern):
    """See the module's text."""

    copy_inputs: bool = True

    anchors = ("linear",)
    family = "horizontal"

    def key(self, node: Node) -> Hashable | Miss:
        values = arguments(node) or {}
        x = tensor_of(values["input"])
        if x is None or not has_plain_parameters(node):
            return Miss("its weight is no matrix of static height, or its bias no vector")
        if x.dim() < 1 or row_sizes(x) is None:
            return Miss("more than one size in front of the features is dynamic")
        bias = values["bias"]
        return (path_of(values["weight"]), None if bias is None else path_of(bias))

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        distinct = _without_repeats(group)
        if _are_rows(ordered := in_order(distinct, [input_of(node) for node in distinct])):
            return [ordered]
        parts: dict[Hashable, list[Node]] = {}
        for node in distinct:
            parts.setdefault(_shape(node), []).append(node)
        alone = [part[0] for part in parts.values() if len(part) == 1]
        joined = [in_order(p, [input_of(n) for n in p]) for p in parts.values() if len(p) > 1]
        joined += _of_static_rows(alone)
        return [part for part in joined if self.copy_inputs or not self.copies(part)]

    def copies(self, group: Sequence[Node]) -> bool:
        inputs = [input_of(node) for node in group]
        if len({_shape(node) for node in group}) == 1:
            return plan_stack(inputs).copies
        return not _are_rows(group)

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        is_stack = len({_shape(node) for node in group}) == 1 and not _are_rows(group)
        parts = _linear_of_stack(edit, group) if is_stack else _linear_of_rows(edit, group)
        for node, part in zip(group, parts, strict=True):
            edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(5, 8)
        return (
            Example("features", lambda: (_Shared(), (x,)), fires=1),
            Example("two inputs", lambda: (_Two(), (x[:, :4], x[:, 4:] + 1)), fires=1),
            Example("in a row", lambda: (_InARow(), (x[:, :4],)), fires=0),
        )


def _shape(node: Node) -> Hashable:
    tensor = tensor_of(input_of(node))
    assert tensor is not None
    return freeze(tensor.shape)


def _are_rows(group: Sequence[Node]) -> bool:
    """Whether the inputs are matrices that lie one above the other."""
    inputs = [input_of(node) for node in group]
    return all(rank_of(x) == 2 for x in inputs) and region_of(inputs, 0) is not None


def _without_repeats(group: Sequence[Node]) -> list[Node]:
    """One member for each input: equal calls are for others to merge."""
    return list({path_of(input_of(node)): node for node in reversed(group)}.values())[::-1]


def _of_static_rows(nodes: Sequence[Node]) -> list[list[Node]]:
    """Members of equal rank, in the order of their inputs, whose numbers of rows are known."""
    by_rank: dict[int, list[Node]] = {}
    for node in nodes:
        tensor = tensor_of(input_of(node))
        if tensor is not None and -1 not in (row_sizes(tensor) or (-1,)):
            by_rank.setdefault(tensor.dim(), []).append(node)
    return [in_order(part, [input_of(node) for node in part]) for part in by_rank.values()]


def _linear_of_stack(edit: Editor, group: Sequence[Node]) -> list[Node]:
    """Inputs of equal shapes: their rows as one matrix, members where they lie in memory."""
    inputs = [input_of(node) for node in group]
    stacked = plan_stack(inputs).build(edit)
    tensor = tensor_of(inputs[0])
    rows = row_sizes(tensor) if tensor is not None else None
    assert rows is not None
    at = stacked.dim if stacked.dim <= len(rows) else 0
    sizes = (*rows[:at], len(group), *rows[at:])
    x = stacked.at(edit, at)
    if len(sizes) > 1:
        x = edit.call("flatten", x, 0, len(sizes) - 1)
    out = call_again(edit, group[0], input=x)
    if len(sizes) > 1:
        out = edit.call("unflatten", out, 0, sizes)
    parts = edit.call("unbind", out, at)
    return edit.items(parts, range(len(group)))


def _linear_of_rows(edit: Editor, group: Sequence[Node]) -> list[Node]:
    """Inputs with different static numbers of rows: all rows in one matrix."""
    inputs = [input_of(node) for node in group]
    shapes = [row_sizes(tensor) or [] for x in inputs if (tensor := tensor_of(x)) is not None]
    flat = [
        x if len(s) == 1 else edit.call("flatten", x, 0, len(s) - 1)
        for x, s in zip(inputs, shapes, strict=True)
    ]
    out = call_again(edit, group[0], input=concat(edit, flat, 0))
    parts = split(edit, out, [math.prod(shape) for shape in shapes], 0)
    return [
        part if len(s) == 1 else edit.call("unflatten", part, 0, tuple(s))
        for part, s in zip(parts, shapes, strict=True)
    ]


class _Shared(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(part) for part in x.split(4, 1)], 1)


class _Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x.relu()) + self.linear(y)


class _InARow(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x).relu())
