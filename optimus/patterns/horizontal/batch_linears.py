"""Run linears with inputs and weights of their own, but equal shapes, as one batched GEMM.

Before: `[linear(x_i, W_i, b_i) for i in range(N)]`
After:  `unbind(baddbmm(stack(b_i)[:, None], stack(x_i), stack(W_i).mT))`

Gains: one GEMM launch for N, forward and in each backward product. Costs: a copy of the weights
on every step where they are not stored together; of the inputs where they are not parts of one
tensor. The bias is added in the GEMM, before the result is rounded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments
from optimus.pattern import Example, GroupPattern, Miss
from optimus.pieces import stack, unstack


@dataclass(frozen=True)
class BatchLinears(GroupPattern):
    """See the module's text."""

    anchors = ("linear",)
    family = "horizontal"
    upstream = ("batch_linear", "group_linear")

    def key(self, node: Node) -> Hashable | Miss:
        values = arguments(node) or {}
        x, weight = tensor_of(values["input"]), tensor_of(values["weight"])
        if x is None or weight is None or x.dim() != 2 or weight.dim() != 2:
            return Miss("input or weight is not 2-D")
        return (tuple(x.shape), tuple(weight.shape))

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        calls = [arguments(node) or {} for node in group]
        x = stack(edit, [call["input"] for call in calls])
        weight = stack(edit, [call["weight"] for call in calls])
        weight = edit.call("transpose", weight, 1, 2)
        if calls[0]["bias"] is None:
            out = edit.call("bmm", x, weight)
        else:
            bias = stack(edit, [call["bias"] for call in calls])
            out = edit.call("baddbmm", edit.call("unsqueeze", bias, 1), x, weight)
        for node, part in zip(group, unstack(edit, out, len(group)), strict=True):
            edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (
            Example("towers", lambda: (_Towers([8] * 4), (torch.randn(5, 32),)), fires=1),
            Example("unequal", lambda: (_Towers([8, 16, 24]), (torch.randn(5, 48),)), fires=0),
        )


class _Towers(torch.nn.Module):
    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = list(widths)
        self.towers = torch.nn.ModuleList(torch.nn.Linear(width, 4) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, self.widths, 1)
        return torch.cat([tower(p) for tower, p in zip(self.towers, parts, strict=True)], 1)
