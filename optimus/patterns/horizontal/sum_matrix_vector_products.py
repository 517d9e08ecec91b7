"""Compute products with a single column or row as sums of products.

Before: `linear(x, w, b)` with one output, `bmm(experts, gates)` with one column
After:  `(x * w).sum(-1, keepdim=True) + b`, `(experts * gates.mT).sum(-1, keepdim=True)`

Such a product reads every element once and does next to nothing with it. Gains: it is fused with
what makes its input and with what follows, forward and backward. Costs: none; sums are taken in
float32, and rounded once, as a GEMM does it.
Needs: a summed dimension of at most `deepest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.affine import HALF
from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.stacking import rank_of
from optimus.values import static_size


@dataclass(frozen=True)
class SumMatrixVectorProducts(Pattern):
    """See the module's text."""

    deepest: int = 1024

    anchors = ("linear", "matmul", "bmm", "baddbmm")
    family = "horizontal"

    def match(self, node: Node) -> Match | Miss:
        factors = factors_of(node)
        if factors is None:
            return Miss("its factors are not two floating-point matrices or stacks of them")
        left, right, bias = factors
        columns = -2 if op_of(node) is _LINEAR else -1
        one, other = tensor_of(left), tensor_of(right)
        assert one is not None and other is not None
        is_column = static_size(other, columns) == 1
        if not is_column and (columns == -2 or static_size(one, -2) != 1):
            return Miss("more than one column and row")
        depth = static_size(one, -1)
        if depth is None or depth > self.deepest:
            return Miss("the sum is long enough for a GEMM")
        values = {"left": left, "right": right, "bias": bias, "is_column": is_column}
        return Match((node,), values=values)

    def rewrite(self, match: Match, edit: Editor) -> None:
        out = tensor_of(match.anchor)
        assert out is not None
        left, right, bias = (_as_summed(edit, match[n], out) for n in ("left", "right", "bias"))
        assert left is not None and right is not None
        dim = out.dim() - 1
        if not match["is_column"]:
            dim -= 1
            left = edit.call("transpose", left, rank_of(left) - 2, rank_of(left) - 1)
        elif op_of(match.anchor) is not _LINEAR:
            right = edit.call("transpose", right, rank_of(right) - 2, rank_of(right) - 1)
        total = edit.call("sum", edit.call("mul", left, right), dim, True)
        if bias is not None:
            total = edit.call("add", total, bias)
        if out.dtype in HALF:
            total = edit.call("to", total, dtype=out.dtype)
        edit.replace(match.anchor, total)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, y = torch.randn(3, 4, 5), torch.randn(3, 5, 2)
        return (
            Example("output layer", lambda: (torch.nn.Linear(5, 1), (torch.randn(3, 5),)), fires=1),
            Example("gates", lambda: (_Product(), (x, y[..., :1].clone())), fires=1),
            Example("one row", lambda: (_Product(), (x[:, :1].clone(), y)), fires=1),
            Example("two columns", lambda: (_Product(), (x, y)), fires=0),
        )


_LINEAR = op_of(torch.fx.Graph().call_function(torch.nn.functional.linear))
_FACTORS = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other", ""),
    "bmm": ("input", "mat2", ""),
    "baddbmm": ("batch1", "batch2", "input"),
}


def factors_of(node: Node) -> tuple[Node, Node, Node | None] | None:
    """The two matrices, or stacks of them, that a product multiplies, and what it adds."""
    op, values = op_of(node), arguments(node)
    assert op is not None
    if values is None or values.get("beta", 1) != 1 or values.get("alpha", 1) != 1:
        return None
    left, right, bias = (values.get(name) for name in _FACTORS[op.name])
    for factor in (left, right):
        tensor = tensor_of(factor)
        if tensor is None or tensor.dim() < 2 or not tensor.is_floating_point():
            return None
    assert left is not None and right is not None
    return left, right, bias


def _as_summed(edit: Editor, value: Any, out: torch.Tensor) -> Node | None:
    """A factor as a GEMM with this result would read it: cast to its type, summed in float32."""
    tensor = tensor_of(value)
    if tensor is None:
        return None
    if tensor.dtype != out.dtype:
        value = edit.call("to", value, dtype=out.dtype)
    result: Node = edit.call("to", value, dtype=torch.float32) if out.dtype in HALF else value
    return result


class _Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, y)
