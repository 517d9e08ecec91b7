"""Run linears with inputs and weights of their own, but equal shapes, as one batched GEMM.

Before: `[linear(x_i, W_i, b_i) for i in range(N)]`
After:  `baddbmm(stack(b_i)[:, None], stack(x_i), stack(W_i).mT).unbind(0)`

Gains: one GEMM launch for N, forward and in each backward product. Costs: a copy of the weights
on every step where they are not stored together; of the inputs where they are not parts of one
tensor (not before anything else has been merged, and not at all with `copy_inputs=False`), and
where they are, but in rows that begin at no multiples of 16 bytes, as fast GEMMs want them (from
`many_rows` on). The bias is added in the GEMM, before the result is rounded.
Needs: at most one dynamic size in front of an input's features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.merging import has_plain_parameters, input_of, row_sizes
from optimus.ops import arguments
from optimus.pattern import Example, GroupPattern, Miss
from optimus.stacking import Path, Stacked, in_order, path_of, plan_stack
from optimus.values import static_size

ROW_BYTES = 16
"""What a GPU loads at once."""


@dataclass(frozen=True)
class BatchLinears(GroupPattern):
    """See the module's text."""

    copy_inputs: bool = True
    many_rows: int = 256

    anchors = ("linear",)
    family = "horizontal"

    def key(self, node: Node) -> Hashable | Miss:
        values = arguments(node) or {}
        x, weight = tensor_of(values["input"]), tensor_of(values["weight"])
        if x is None or weight is None or x.dim() < 2 or not has_plain_parameters(node):
            return Miss("its input has no rows, its weight is no matrix or its bias no vector")
        if row_sizes(x) is None:
            return Miss("more than one size in front of the features is dynamic")
        return (tuple(x.shape), tuple(weight.shape))

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        ordered = in_order(group, [input_of(node) for node in group])
        return [
            part for part in _without_repeats(ordered) if self.copy_inputs or not self.copies(part)
        ]

    def copies(self, group: Sequence[Node]) -> bool:
        return len(group) > 1 and plan_stack([input_of(node) for node in group]).copies

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        calls = [arguments(node) or {} for node in group]
        x = plan_stack([call["input"] for call in calls]).build(edit)
        weight = plan_stack([call["weight"] for call in calls]).build(edit)
        bias = [call["bias"] for call in calls]
        like = tensor_of(calls[0]["input"])
        rows = row_sizes(like) if like is not None else None
        assert rows is not None
        out = _batched(edit, self._matrices(edit, x, len(rows)), weight, bias)
        if len(rows) > 1:
            out = edit.call("unflatten", out, 1, tuple(rows))
        parts = edit.call("unbind", out)
        for node, part in zip(group, edit.items(parts, range(len(group))), strict=True):
            edit.replace(node, part)

    def _matrices(self, edit: Editor, x: Stacked, depth: int) -> Node:
        """The inputs as (N, rows, features), of `depth` dimensions of rows."""
        flat = x.at(edit, 0)
        if depth > 1:
            flat = edit.call("flatten", flat, 1, depth)
        return edit.call("contiguous", flat) if _is_askew(flat, self.many_rows) else flat

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(5, 32)
        return (
            Example("towers", lambda: (_Towers([8] * 4), (x,)), fires=1),
            Example("sequences", lambda: (_Towers([8] * 4), (x.view(5, 1, 32),)), fires=1),
            Example("every second width", lambda: (_Towers([4, 12, 4, 12]), (x,)), fires=2),
            Example("unequal", lambda: (_Towers([8, 16, 24]), (torch.randn(5, 48),)), fires=0),
        )


def _batched(edit: Editor, flat: Node, weight: Stacked, bias: Sequence[Any]) -> Node:
    """Linears of all members: one GEMM of (N, rows, features)."""
    matrix = edit.call("transpose", weight.at(edit, 0), 1, 2)
    if bias[0] is None:
        return edit.call("bmm", flat, matrix)
    shift = plan_stack(bias).build(edit).at(edit, 0)
    return edit.call("baddbmm", edit.call("unsqueeze", shift, 1), flat, matrix)


def _is_askew(node: Node, many_rows: int) -> bool:
    """Whether its many rows begin at no multiples of `ROW_BYTES`, as those of a copy would."""
    x = tensor_of(node)
    if x is None or (static_size(x, 1) or many_rows) < many_rows or x.stride(-1) != 1:
        return False
    size = x.element_size()
    begins = [x.storage_offset(), *x.stride()[:-1]]
    is_known = all(isinstance(begin, int) for begin in begins)
    copy_is_even = x.shape[-1] * size % ROW_BYTES == 0
    return is_known and copy_is_even and any(begin * size % ROW_BYTES for begin in begins)


def _without_repeats(group: Sequence[Node]) -> list[list[Node]]:
    """Parts of `group` with no input or weight in them twice: those are shared, not stacked."""
    parts: list[list[Node]] = []
    seen: Counter[tuple[str, Path]] = Counter()
    for node in group:
        values = arguments(node) or {}
        shared = [(name, path_of(values[name])) for name in ("input", "weight")]
        at = max(seen[name] for name in shared)
        if at == len(parts):
            parts.append([])
        parts[at].append(node)
        for name in shared:
            seen[name] = at + 1
    return parts


class _Towers(torch.nn.Module):
    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = list(widths)
        self.towers = torch.nn.ModuleList(torch.nn.Linear(width, 4) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, self.widths, -1)
        towers = zip(self.towers, parts, strict=True)
        return torch.cat([tower(part) for tower, part in list(towers)[::-1]], -1)
