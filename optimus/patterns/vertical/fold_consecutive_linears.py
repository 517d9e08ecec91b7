"""Multiply the weights of two linears with nothing in between, instead of applying both.

Before: `linear(linear(x, A, a), B, b)`
After:  `linear(x, B @ A, linear(a, B, b))`

Gains: a GEMM over all rows and its gradients less, for one over the weights. Costs: rounding in
another order; an infinity in the input may come out as one where it came out as NaN, and so no
preset selects it.
Needs: an inner result that nothing else reads, wide enough that the product of the weights is
cheaper in operations, backward included, for the rows at hand; float32 or float64 throughout (under
autocast the product of the weights would be rounded to the half type).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.stacking import rank_of
from optimus.values import hint_of, static_size

FULL = (torch.float32, torch.float64)


@dataclass(frozen=True)
class FoldConsecutiveLinears(Pattern):
    """See the module's text."""

    anchors = ("linear",)
    family = "vertical"
    in_presets = False

    def match(self, node: Node) -> Match | Miss:
        outer = arguments(node) or {}
        first = outer["input"]
        op = op_of(first)
        inner = arguments(first) if op is not None and op.name == "linear" else None
        if inner is None:
            return Miss("no linear in front")
        if len(first.users) > 1:
            return Miss("the result in between is read elsewhere")
        call = {"x": inner["input"], "A": inner["weight"], "a": inner["bias"]}
        call |= {"B": outer["weight"], "b": outer["bias"]}
        tensors = {n: t for n, v in call.items() if (t := tensor_of(v)) is not None}
        if tensors["x"].dim() < 2 or tensors["A"].dim() != 2 or tensors["B"].dim() != 2:
            return Miss("its input has no rows")
        dtypes = {t.dtype for t in (*tensors.values(), tensor_of(node)) if t is not None}
        if len(dtypes) > 1 or dtypes.isdisjoint(FULL):
            return Miss("not in one full type throughout")
        if not _is_cheaper(tensors, tensor_of(node)):
            return Miss("the product of the weights costs more than it saves")
        return Match((node, first), values=call)

    def rewrite(self, match: Match, edit: Editor) -> None:
        x, first, a, second, b = (match[name] for name in "xAaBb")
        turned = edit.call("transpose", first, rank_of(first) - 2, rank_of(first) - 1)
        weight = edit.call("linear", second, turned)
        bias = b if a is None else edit.call("linear", a, second, *([] if b is None else [b]))
        out = edit.call("linear", x, weight, *([] if bias is None else [bias]))
        edit.replace(match.anchor, out)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(16, 4)
        return (
            Example("wide in between", lambda: (_Twice(4, 12, 4), (x,)), fires=1),
            Example("without bias", lambda: (_Twice(4, 12, 4, bias=False), (x,)), fires=1),
            Example("narrow in between", lambda: (_Twice(4, 1, 4), (x,)), fires=0),
            Example("few rows", lambda: (_Twice(4, 12, 4), (x[:2].clone(),)), fires=0),
        )


def _is_cheaper(tensors: dict[str, Tensor], out: Tensor | None) -> bool:
    """Multiplications forward and, where there is a backward pass, backward: of rows by A and B, or
    of A by B and rows by the product."""
    rows = hint_of(tensors["x"].shape[:-1])
    sizes = [
        static_size(tensors["A"], 1),
        static_size(tensors["A"], 0),
        static_size(tensors["B"], 0),
    ]
    if rows is None or out is None or any(size is None for size in sizes):
        return False
    features, width, outputs = (size or 0 for size in sizes)
    passes = 3 if out.requires_grad else 1
    # No gradient of an input that asks for none.
    unasked = 1 if out.requires_grad and not tensors["x"].requires_grad else 0
    before = rows * width * (passes * (features + outputs) - unasked * features)
    weights = passes * outputs * width * features
    return weights + (passes - unasked) * rows * features * outputs < before


class _Twice(torch.nn.Sequential):
    def __init__(self, *sizes: int, **options: Any) -> None:
        layers = pairwise(sizes)
        super().__init__(*(torch.nn.Linear(a, b, **options) for a, b in layers))
