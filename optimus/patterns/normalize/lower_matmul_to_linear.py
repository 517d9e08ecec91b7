"""Write a product with a matrix as a linear, and one of two stacks of matrices as a bmm.

Before: `x @ w`, `torch.mm(x, w)`, `torch.addmm(bias, x, w)`; `w @ x` for a stack x of matrices
After:  `linear(x, w.t())`, `linear(x, w.t(), bias)`; `linear(x.mT, w).mT`; `torch.bmm(x, y)`

Gains: every other pattern sees one spelling of "rows times a matrix". Costs: none, the transposes
are views, and the GEMM is the one that PyTorch runs for either spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.axes import permute, swapped
from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.values import same_size


@dataclass(frozen=True)
class LowerMatmulToLinear(Pattern):
    """See the module's text."""

    anchors = ("matmul", "mm", "addmm")
    family = "normalize"

    def match(self, node: Node) -> Match | Miss:
        op, values = op_of(node), arguments(node)
        if op is None or values is None:
            return Miss("says something that the canonical form cannot")
        left = values["mat1"] if op.name == "addmm" else values["input"]
        right = values["mat2"] if op.name in ("addmm", "mm") else values["other"]
        form = _form(tensor_of(left), tensor_of(right))
        if isinstance(form, Miss):
            return form
        bias = _bias(values, tensor_of(right)) if op.name == "addmm" else None
        if isinstance(bias, Miss):
            return bias
        return Match((node,), values={"x": left, "w": right, "form": form, "bias": bias})

    def rewrite(self, match: Match, edit: Editor) -> None:
        x, w, bias = match["x"], match["w"], match["bias"]
        if match["form"] == "bmm":
            out = edit.call("bmm", x, w)
        elif match["form"] == "rows":
            out = edit.call("linear", x, _turn(edit, w), *([bias] if bias is not None else []))
        else:
            out = _turn(edit, edit.call("linear", _turn(edit, w), x))
        edit.replace(match.anchor, out)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, w, v = torch.randn(4, 6), torch.randn(6, 3), torch.randn(6)
        return (
            Example("products", lambda: (_Products(), (x, w, torch.randn(3))), fires=4),
            Example("vectors", lambda: (_Vectors(), (x, v)), fires=0, exact=True),
        )


def _turn(edit: Editor, node: Node) -> Node:
    tensor = tensor_of(node)
    assert tensor is not None
    return permute(edit, node, swapped(tensor.dim(), -2, -1))


def _form(left: torch.Tensor | None, right: torch.Tensor | None) -> str | Miss:
    """`rows`: linear(left, right.mT); `columns`: linear(right.mT, left).mT; or `bmm`."""
    if left is None or right is None or not (_is_dense(left) and _is_dense(right)):
        return Miss("not two dense tensors of floating point")
    ranks = left.dim(), right.dim()
    if min(ranks) < 2:
        return Miss("a product with a vector")
    if 2 in ranks:
        return "rows" if ranks[1] == 2 else "columns"
    if ranks == (3, 3) and same_size(left.shape[0], right.shape[0]):
        return "bmm"
    return Miss("stacks of matrices of unequal shape, or stacks of stacks")


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_floating_point()


def _bias(values: dict[str, Any], right: torch.Tensor | None) -> Node | Miss:
    """The added row of an addmm. A bias of another shape would have to be added after rounding."""
    bias = tensor_of(values["input"])
    if values["beta"] != 1 or values["alpha"] != 1:
        return Miss("scaled by alpha or beta")
    if bias is None or right is None or bias.dim() != 1:
        return Miss("adds more than a row")
    if not same_size(bias.shape[0], right.shape[1]):
        return Miss("adds a number, not a row")
    added: Node = values["input"]
    return added


class _Products(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows = x @ w + torch.mm(x, w) + torch.addmm(b, x, w)
        return torch.matmul(rows.t().tanh(), rows.unsqueeze(0).expand(2, -1, -1))


class _Vectors(torch.nn.Module):
    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, v) + v @ v + torch.addmm(x[:, :1], x, x.t(), beta=2).sum(1)
