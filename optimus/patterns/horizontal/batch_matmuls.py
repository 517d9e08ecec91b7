"""Run products of matrices with equal shapes as one batched product.

Before: `[bmm(q_i, k_i) for i in range(N)]`
After:  `bmm(stack(q_i).flatten(0, 1), stack(k_i).flatten(0, 1)).unflatten(0, (N, -1)).unbind(0)`

Gains: one GEMM launch for N, forward and in each backward product. Costs: a copy of factors that
are not parts of one tensor (not before anything else has been merged, and not at all with
`copy_inputs=False`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.grouping import freeze
from optimus.legality import tensor_of
from optimus.ops import arguments
from optimus.pattern import Example, GroupPattern, Miss
from optimus.stacking import in_order, path_of, plan_stack


@dataclass(frozen=True)
class BatchMatmuls(GroupPattern):
    """See the module's text."""

    copy_inputs: bool = True

    anchors = ("bmm", "mm", "matmul")
    family = "horizontal"

    def key(self, node: Node) -> Hashable | Miss:
        left, right = map(tensor_of, _factors(node))
        if left is None or right is None or left.dim() != right.dim() or left.dim() < 2:
            return Miss("its factors are not two matrices or two stacks of them")
        return (freeze(left.shape), freeze(right.shape))

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        distinct = {(path_of(a), path_of(b)): n for n in group for a, b in [_factors(n)]}
        ordered = in_order(list(distinct.values()), *_columns(list(distinct.values())))
        return [ordered] if self.copy_inputs or not self.copies(ordered) else []

    def copies(self, group: Sequence[Node]) -> bool:
        return len(group) > 1 and any(plan_stack(column).copies for column in _columns(group))

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        left, right = (plan_stack(column).build(edit) for column in _columns(group))
        tensor = tensor_of(_factors(group[0])[0])
        assert tensor is not None
        if tensor.dim() == 2:
            at, out = 0, edit.call("bmm", left.at(edit, 0), right.at(edit, 0))
        elif tensor.dim() == 3:
            at = min(left.dim, 1)
            rows = [edit.call("flatten", side.at(edit, at), 0, 1) for side in (left, right)]
            sizes = (len(group), -1) if at == 0 else (-1, len(group))
            out = edit.call("unflatten", edit.call("bmm", *rows), 0, sizes)
        else:
            at = 0
            out = edit.call("matmul", left.at(edit, 0), right.at(edit, 0))
        parts = edit.call("unbind", out, at)
        for node, part in zip(group, edit.items(parts, range(len(group))), strict=True):
            edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, y = torch.randn(2, 3, 3, 4), torch.randn(2, 3, 4, 5)
        return (
            Example("items", lambda: (_Products(), (x, y)), fires=1),
            Example("attention heads", lambda: (_Products(), (x[None], y[None])), fires=1),
            Example("in a row", lambda: (_InARow(), (x[:, 0, :, :3],)), fires=0),
        )


def _factors(node: Node) -> tuple[Any, Any]:
    values = arguments(node) or {}
    return values["input"], values.get("mat2", values.get("other"))


def _columns(group: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    return [_factors(node)[0] for node in group], [_factors(node)[1] for node in group]


class _Products(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = zip(x.unbind(-3), y.unbind(-3), strict=True)
        return torch.stack([a @ b for a, b in parts][::-1], 1)


class _InARow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.bmm(x, x), x)
