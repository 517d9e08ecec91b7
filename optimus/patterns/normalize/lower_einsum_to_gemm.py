"""Write an einsum of two operands that is one GEMM as a linear or a bmm.

Before: `einsum("bnd,df->bnf", x, w)`, `einsum("bnd,bmd->bnm", x, y)`
After:  `linear(x, w.t())`, `bmm(x, y.mT)`

Gains: every other pattern sees one spelling. Costs: none, einsum runs the same GEMM.
Needs: one label summed over; at most one in both operands and the result.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.axes import permute
from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.values import same_size


@dataclass(frozen=True)
class LowerEinsumToGemm(Pattern):
    """See the module's text."""

    anchors = ("einsum",)
    family = "normalize"

    def match(self, node: Node) -> Match | Miss:
        values = arguments(node)
        operands = _operands(values) if values is not None else []
        tensors = [tensor for tensor in map(tensor_of, operands) if tensor is not None]
        if values is None or len(tensors) != 2 or not isinstance(values["equation"], str):
            return Miss("not two tensors under an equation")
        if not all(t.is_floating_point() and t.layout is torch.strided for t in tensors):
            return Miss("not two dense tensors of floating point")
        if tensors[0].dtype != tensors[1].dtype:  # eager multiplies them where a label has size 1
            return Miss("tensors of two types")
        labels = _labels(values["equation"], [tensor.dim() for tensor in tensors])
        if labels is None or not _sizes_agree(labels, tensors):
            return Miss("a label that is repeated, or stands for unequal sizes")
        plan = _plan(*labels)
        if isinstance(plan, Miss):
            return plan
        name, swap, first, second, out = plan
        pair = tuple(reversed(operands)) if swap else tuple(operands)
        return Match((node,), values={"name": name, "pair": pair, "orders": (first, second, out)})

    def rewrite(self, match: Match, edit: Editor) -> None:
        first, second, out = match["orders"]
        x = permute(edit, match["pair"][0], first)
        y = permute(edit, match["pair"][1], second)
        edit.replace(match.anchor, permute(edit, edit.call(match["name"], x, y), out))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, w = torch.randn(2, 3, 4), torch.randn(4, 5)
        return (
            Example("gemms", lambda: (_Gemms(), (x, w)), fires=4),
            Example("other", lambda: (_Other(), (x, w)), fires=0),
        )


def _operands(values: dict[str, Any]) -> list[Any]:
    given = values["operands"]
    return list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else list(given)


def _labels(equation: str, ranks: Sequence[int]) -> tuple[str, str, str] | None:
    """Labels of both operands and of the result, one a dimension, none repeated."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        return None
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    spans = [r - len(t.replace("...", "")) for t, r in zip(terms, ranks, strict=True) if "..." in t]
    if any(span != spans[0] or span > len(unused) for span in spans):
        return None
    rest = "".join(unused[: spans[0]]) if spans else ""
    one, two, out = (term.replace("...", rest) for term in (*terms, result))
    if any(len(set(term)) < len(term) for term in (one, two, out)):
        return None
    return (one, two, out) if (len(one), len(two)) == tuple(ranks) else None


def _sizes_agree(labels: tuple[str, str, str], tensors: Sequence[torch.Tensor]) -> bool:
    one, two, _ = labels
    shapes = [dict(zip(labels[i], tensors[i].shape, strict=True)) for i in range(2)]
    return all(same_size(shapes[0][label], shapes[1][label]) for label in set(one) & set(two))


def _plan(one: str, two: str, out: str) -> tuple[Any, ...] | Miss:
    """`(operation, whether operands swap, order of each, order of the result)`."""
    summed = [label for label in one if label in two and label not in out]
    shared = [label for label in one if label in two and label in out]
    own = [
        [label for label in term if label not in other] for term, other in ((one, two), (two, one))
    ]
    if len(summed) != 1 or {*shared, *own[0], *own[1]} != set(out):
        return Miss("not one label that both operands are summed over")
    if not own[0] or not own[1]:
        return Miss("a product with a vector")
    if not shared and 1 in (len(own[0]), len(own[1])):
        swap = len(own[1]) > 1 or (len(own[0]) == 1 and out[-1] == own[0][0])
        rows, column = (own[1], own[0]) if swap else (own[0], own[1])
        x, w = (two, one) if swap else (one, two)
        orders = _order(x, [*rows, *summed]), _order(w, [*column, *summed])
        return ("linear", swap, *orders, _order([*rows, *column], out))
    if len(shared) == len(own[0]) == len(own[1]) == 1:
        orders = _order(one, [*shared, *own[0], *summed]), _order(two, [*shared, *summed, *own[1]])
        return ("bmm", False, *orders, _order([*shared, *own[0], *own[1]], out))
    return Miss("stacks of stacks of matrices")


def _order(have: Sequence[str], want: Sequence[str]) -> tuple[int, ...]:
    return tuple(have.index(label) for label in want)


class _Gemms(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.einsum("bnd,df->bnf", x, w) + torch.einsum("...d,df->...f", x, w)
        b = torch.einsum("bnd, bmd -> bmn", x, x)
        return torch.einsum("bmn,bnf->bmf", b, a)


class _Other(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        outer = torch.einsum("a,b->ab", w[0], w[1])
        return torch.einsum("bnd,bnd->bn", x, x).sum() + outer + torch.einsum("ab->ba", outer)
