"""Compute a cross layer of DCN-V2 in the epilogue of its product.

Before: `x0 * linear(y, w, b) + x`
After:  `cross_layer(x0, y, w, b, x)`

y is x in a full-rank layer and x times a narrow matrix in a low-rank one. Gains: the projection
is neither written nor saved for backward, and the gradients of x0 and of the projection come from
one pass. Costs: the product is computed again in backward. Needs: that the kernel is measured to be
faster (knob `gate`: measure, always, never).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

import kernels.cross_layer  # noqa: F401 (defines the operator)
from optimus.editor import Editor
from optimus.kernel_gate import Form, verdict
from optimus.legality import tensor_of
from optimus.merging import has_plain_parameters
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.values import same_size, same_sizes


@dataclass(frozen=True)
class FuseCrossLayer(Pattern):
    """See the module's text."""

    gate: str = "measure"

    anchors = ("add",)
    family = "kernels"

    def match(self, node: Node) -> Match | Miss:
        for product, x in _operands(node):
            for z, x0 in _operands(product, "mul"):
                parts = _projection(z)
                if parts is None or len(product.users) > 1:
                    continue
                shapes = [tensor_of(t) for t in (x0, x, z, node)]
                if any(s is None or s.dim() != 2 for s in shapes) or not _same_shapes(shapes):
                    return Miss("its tensors are not matrices of one shape")
                work, y, weight, bias = parts
                inputs = (x0, y, weight, *([] if bias is None else [bias]), x)
                slower = verdict(self.gate, _forms, (bias is not None,), inputs)
                values = {"inputs": (x0, y, weight, bias, x), "z": z}
                return slower or Match((node, product, *work), values=values)
        return Miss("not x0 * linear(y) + x, each used once")

    def rewrite(self, match: Match, edit: Editor) -> None:
        x0, y, weight, bias, x = match["inputs"]
        z, added = tensor_of(match["z"]), tensor_of(bias)
        if z is not None and added is not None and added.dtype != z.dtype:
            bias = edit.call("to", bias, dtype=z.dtype)  # as autocast does it inside a linear
        target = torch.ops.kernels.cross_layer.default
        edit.replace(match.anchor, edit.call(target, x0, y, weight, bias, x))

    def ungated(self) -> FuseCrossLayer:
        return replace(self, gate="always")

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 4, requires_grad=True)
        return (
            Example("full rank", lambda: (_Cross(2), (x,)), fires=2),
            Example("low rank", lambda: (_Cross(2, rank=2), (x,)), fires=2),
            Example("subtracted", lambda: (_Cross(2, sign=-1), (x,)), fires=0),
        )


def _operands(node: object, name: str = "add") -> Iterator[tuple[Node, Node]]:
    """Both orders of the two nodes that are added, or multiplied."""
    op = op_of(node) if isinstance(node, Node) else None
    values = arguments(node) if isinstance(node, Node) and op and op.name == name else None
    if values is None or values.get("alpha", 1) != 1:
        return
    one, other = values["input"], values["other"]
    if isinstance(one, Node) and isinstance(other, Node) and one is not other:
        yield one, other
        yield other, one


def _projection(z: Node) -> tuple[list[Node], Node, Node, Node | None] | None:
    """Work, input, weight and bias of a linear, or of one to which a bias is added."""
    op = op_of(z)
    if op is None or len(z.users) > 1:
        return None
    if op.name == "linear":
        parts = arguments(z) if has_plain_parameters(z) else None
        return None if parts is None else ([z], parts["input"], parts["weight"], parts["bias"])
    for linear, bias in _operands(z):
        parts = arguments(linear) if op_of(linear) is _LINEAR and len(linear.users) == 1 else None
        row, weight = tensor_of(bias), tensor_of((parts or {}).get("weight"))
        if parts is None or parts["bias"] is not None or row is None or weight is None:
            continue
        if row.dim() == 1 and same_size(row.shape[0], weight.shape[0]):
            return [z, linear], parts["input"], parts["weight"], bias
    return None


_LINEAR = op_of(torch.fx.Graph().call_function(torch.nn.functional.linear))


def _same_shapes(values: Sequence[Tensor | None]) -> bool:
    first, *others = [v.shape for v in values if v is not None]
    return all(same_sizes(first, other) for other in others)


def _forms(has_bias: bool) -> tuple[Form, Form]:
    def ours(x0: Tensor, y: Tensor, w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return torch.ops.kernels.cross_layer(x0, y, w, b, x)

    linear = torch.nn.functional.linear
    if has_bias:
        return ours, lambda x0, y, w, b, x: x0 * linear(y, w, b) + x
    return (
        lambda x0, y, w, x: torch.ops.kernels.cross_layer(x0, y, w, None, x),
        lambda x0, y, w, x: x0 * linear(y, w) + x,
    )


class _Cross(torch.nn.Module):
    def __init__(self, count: int, rank: int = 0, sign: int = 1) -> None:
        super().__init__()
        self.down = torch.nn.ModuleList(torch.nn.Linear(4, rank or 4, False) for _ in range(count))
        self.up = torch.nn.ModuleList(torch.nn.Linear(rank or 4, 4) for _ in range(count))
        self.rank, self.sign = rank, sign

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for down, up in zip(self.down, self.up, strict=True):
            z = up(down(x) if self.rank else x)
            x = x0 * z + x if self.sign > 0 else x0 * z - x
        return x
