"""Run linears that read one and the same input as one linear with all their outputs.

Before: `[linear(x, W_i, b_i) for i in range(N)]`
After:  `linear(x, cat(W_i), cat(b_i)).split(widths, -1)`

Any widths, any number of dimensions; a linear without a bias gets one of zeros where others have
one. Gains: one GEMM for N, and x and its gradient are read and written once. Costs: a copy of the
weights on every step where they are not stored together.
Where narrow outputs (gates) would leave the rows of wide ones (experts) without the alignment that
fast GEMMs need, the two are joined apart.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.merging import has_plain_parameters
from optimus.ops import arguments, op_of
from optimus.pattern import Example, GroupPattern, Miss
from optimus.pieces import concat, split
from optimus.stacking import path_of, rank_of


@dataclass(frozen=True)
class WidenSharedInputLinears(GroupPattern):
    """See the module's text."""

    anchors = ("linear",)
    family = "horizontal"
    optional = ("bias",)

    def key(self, node: Node) -> Hashable | Miss:
        values = arguments(node) or {}
        if not has_plain_parameters(node):
            return Miss("its weight is no matrix of static height, or its bias no vector")
        vector = tensor_of(values["weight" if values["bias"] is None else "bias"])
        assert vector is not None
        return (path_of(values["input"]), vector.dtype, vector.requires_grad)

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        """Outputs that are used alike side by side, for what follows to find them so."""
        uses: dict[Hashable, list[Node]] = {}
        for node in group:
            users = tuple(op.name for user in node.users if (op := op_of(user)) is not None)
            uses.setdefault((_width(node), users), []).append(node)
        ordered = [node for nodes in uses.values() for node in nodes]
        return [part for part in _aligned_parts(ordered) if _num_distinct(part) > 1]

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        members: dict[Hashable, list[Node]] = {}
        for node in group:
            members.setdefault(_parameters(node), []).append(node)
        calls = [arguments(nodes[0]) or {} for nodes in members.values()]
        widths = [_width(nodes[0]) for nodes in members.values()]
        weight = concat(edit, [call["weight"] for call in calls], 0)
        bias = _joined_bias(edit, [call["bias"] for call in calls], calls, widths)
        out = edit.call("linear", calls[0]["input"], weight, *([bias] if bias else []))
        parts = split(edit, out, widths, rank_of(out) - 1)
        for part, nodes in zip(parts, members.values(), strict=True):
            for node in nodes:
                edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(5, 8)
        return (
            Example("experts and gates", lambda: (_Heads([4, 4, 2]), (x,)), fires=1),
            Example("3-D", lambda: (_Heads([4, 3]), (x.view(5, 2, 4),)), fires=1),
            Example("bias on some", lambda: (_Heads([4, 3, 2], plain=1), (x,)), fires=1),
            Example("inputs of their own", lambda: (_Apart(), (x,)), fires=0),
        )


ROW_BYTES = 16
"""What the length of a row should be a multiple of."""
WIDE = 256
"""From this width on a GEMM's own time counts, not its launch."""


def _aligned_parts(group: Sequence[Node]) -> list[list[Node]]:
    """All together; or those whose outputs are aligned, and the rest, if these spoil it."""
    tensor = tensor_of(group[0])
    assert tensor is not None
    step = max(1, ROW_BYTES // tensor.element_size())
    even = [node for node in group if not _width(node) % step]
    odd = [node for node in group if _width(node) % step]
    if sum(map(_width, odd)) % step and sum(map(_width, even)) >= WIDE:
        return [even, odd]
    return [list(group)]


def _num_distinct(group: Sequence[Node]) -> int:
    return len({_parameters(node) for node in group})


def _width(node: Node) -> int:
    weight = tensor_of((arguments(node) or {})["weight"])
    assert weight is not None
    return int(weight.shape[0])


def _parameters(node: Node) -> Hashable:
    values = arguments(node) or {}
    bias = values["bias"]
    return (path_of(values["weight"]), None if bias is None else path_of(bias))


def _joined_bias(
    edit: Editor, given: Sequence[Any], calls: Sequence[dict[str, Any]], widths: Sequence[int]
) -> Node | None:
    if all(bias is None for bias in given):
        return None
    like = next(bias for bias in given if bias is not None)
    whole = [
        edit.call(torch.Tensor.new_zeros, like, (width,)) if bias is None else bias
        for bias, width in zip(given, widths, strict=True)
    ]
    return concat(edit, whole, 0)


class _Heads(torch.nn.Module):
    def __init__(self, widths: Sequence[int], plain: int = 0) -> None:
        super().__init__()
        biased = [False] * plain + [True] * (len(widths) - plain)
        depth = 8 if len(widths) > 2 else 4
        self.heads = torch.nn.ModuleList(
            torch.nn.Linear(depth, width, bias) for width, bias in zip(widths, biased, strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([head(x).tanh() for head in self.heads], -1)


class _Apart(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.other(x + 1)
