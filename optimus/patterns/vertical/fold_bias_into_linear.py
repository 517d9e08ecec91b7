"""Add a bias in the linear that it is added to.

Before: `linear(x, w) + b`
After:  `linear(x, w, b)`

Gains: every other pattern sees one spelling; the bias is added before the result is rounded.
Costs: none.
Needs: one value for each output, in the dtype of the result; the product is used nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.values import same_size


@dataclass(frozen=True)
class FoldBiasIntoLinear(Pattern):
    """See the module's text."""

    anchors = ("add",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        values = arguments(node)
        if values is None or values["alpha"] != 1:
            return Miss("scaled by alpha")
        one, other = values["input"], values["other"]
        for product, bias in ((one, other), (other, one)):
            call = _plain_linear(product)
            if call is not None and _is_bias(bias, product):
                return Match((node, product), values=call | {"bias": bias})
        return Miss("not a linear without bias, used once, and one value for each output")

    def rewrite(self, match: Match, edit: Editor) -> None:
        call = edit.call("linear", match["input"], match["weight"], match["bias"])
        edit.replace(match.anchor, call)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, w = torch.randn(4, 6), torch.randn(3, 6, requires_grad=True)
        return (
            Example("bias", lambda: (_Biased(), (x, w, torch.randn(3))), fires=1),
            Example("rows", lambda: (_Biased(), (x, w, torch.randn(4, 3))), fires=0),
        )


def _plain_linear(node: object) -> dict[str, Node] | None:
    op = op_of(node) if isinstance(node, Node) else None
    if not isinstance(node, Node) or op is None or op.name != "linear" or len(node.users) > 1:
        return None
    values = arguments(node)
    return values if values is not None and values["bias"] is None else None


def _is_bias(bias: object, product: object) -> bool:
    row, out = tensor_of(bias), tensor_of(product)
    if row is None or out is None or row.dim() != 1 or out.dim() < 2 or row.dtype != out.dtype:
        return False
    return same_size(row.shape[0], out.shape[-1])


class _Biased(torch.nn.Module):
    def forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows = b + torch.nn.functional.linear(x, w)
        return torch.relu(rows) @ w
