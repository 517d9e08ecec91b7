"""Run equal pointwise operations on parts of one tensor as one operation on all of them.

Before: `[gelu(x_i * w_i) for x_i in x.split(D, 1)]`
After:  `gelu(x.unflatten(1, (N, D)) * stack(w_i)).unbind(1)`

Any operation that computes each element from the elements at its place, with equal attributes:
activations, arithmetic, comparisons, casts. Inputs may be pieces of one tensor (of unequal sizes,
too), one tensor for all, or parameters. Gains: one kernel for N, and what follows finds its inputs
side by side. Costs: a small copy of the parameters where each member has its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.merging import arrange, call_again, merge
from optimus.ops import OPS, arguments
from optimus.pattern import Example, GroupPattern, Miss


@dataclass(frozen=True)
class BatchPointwise(GroupPattern):
    """See the module's text."""

    anchors = (*(name for name, op in OPS.items() if op.kind == "pointwise"), "detach")
    family = "horizontal"

    def key(self, node: Node) -> Hashable | Miss:
        inputs = _tensor_inputs(node)
        if not inputs:
            return Miss("no input is a tensor")
        formats = (torch.preserve_format, None)
        if (arguments(node) or {}).get("memory_format") not in formats:
            return Miss("makes its input contiguous")
        return tuple(tensor.dim() for tensor in map(tensor_of, inputs) if tensor is not None)

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        return arrange(group, _tensor_inputs)

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        merged = merge(edit, group, _tensor_inputs)
        names = _tensor_names(arguments(group[0]) or {})
        out = call_again(edit, group[0], **dict(zip(names, merged.inputs, strict=True)))
        for node, part in zip(group, merged.take_apart(edit, out), strict=True):
            edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = (torch.randn(3, 12),)
        return (
            Example("unequal pieces", lambda: (_Activate([2, 4, 6]), x), fires=1, exact=True),
            Example("gates", lambda: (_Gate(3, 4), (*x, torch.randn(3, 1))), fires=1, exact=True),
            Example("not in one tensor", lambda: (_Apart(), (*x, torch.randn(3, 12))), fires=0),
        )


def _tensor_names(values: dict[str, Any]) -> list[str]:
    return [name for name, value in values.items() if tensor_of(value) is not None]


def _tensor_inputs(node: Node) -> list[Node]:
    values = arguments(node) or {}
    return [values[name] for name in _tensor_names(values)]


class _Activate(torch.nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tanh(part) for part in x.split(self.sizes, 1)][::-1], 1)


class _Gate(torch.nn.Module):
    """Parameters of their own, and a gate that all members share."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(width) for _ in range(count))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self.weights), 1)
        scaled = (torch.addcmul(gate, p, w) for p, w in zip(parts, self.weights, strict=True))
        return torch.stack(list(scaled), 1).sum(1)


class _Apart(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + torch.tanh(y)
