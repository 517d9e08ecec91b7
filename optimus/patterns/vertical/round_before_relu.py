"""Round before a ReLU, not behind it, where autocast rounds all that is made of it.

Before: `linear(relu(x), w, b)` under autocast to bfloat16, `x` in float32, as a norm returns it
After:  `linear(relu(x.bfloat16()), w, b)`

Gains: what is kept for backward, the layer's input, tells where ReLU cut, so that ReLU's gradient
is read off it in bfloat16; else `x` is made again, and its gradient is a float32 tensor, of a whole
stack where branches are batched. Costs: none; the layer rounds its input either way.
Rounding and ReLU commute: values are the same, and so are gradients but where `x` is under 2^-134,
which bfloat16 has no number for. With float16, whose range is small, nothing is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.merging import call_again, input_of
from optimus.ops import OPS, arguments, name_of, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.values import requires_grad


@dataclass(frozen=True)
class RoundBeforeRelu(Pattern):
    """See the module's text."""

    anchors = tuple(name for name, op in OPS.items() if op.kind == "gemm")
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        out = tensor_of(node)
        if out is None or out.dtype != torch.bfloat16:
            return Miss("not a product made in bfloat16")
        for name, value in (arguments(node) or {}).items():
            path = _path_to_relu(value)
            relu = tensor_of(path[-1]) if path else None
            if relu is None or relu.dtype != torch.float32:
                continue
            if not requires_grad(relu):
                return Miss("ReLU has no gradient")
            if not _is_rounded(path[-1]):
                return Miss("not all that reads ReLU's result rounds it to bfloat16")
            return Match((node, *path), values={"name": name, "path": path})
        return Miss("no factor is a ReLU's result in float32")

    def rewrite(self, match: Match, edit: Editor) -> None:
        *views, relu = match["path"]
        value = edit.call("relu", edit.call("to", input_of(relu), dtype=torch.bfloat16))
        for view in reversed(views):
            value = call_again(edit, view, input=value)
        edit.replace(match.anchor, call_again(edit, match.anchor, **{match["name"]: value}))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 8)
        return (
            Example("norm and layer", lambda: (_NormAndLayer(torch.bfloat16), (x,)), fires=1),
            Example("float16", lambda: (_NormAndLayer(torch.float16), (x,)), fires=0),
            Example("read in float32", lambda: (_NormAndLayer(residual=True), (x,)), fires=0),
        )


def _path_to_relu(value: Any) -> list[Node]:
    """Views that lead from a factor to the ReLU whose result they show, and that; empty if there
    is none."""
    path: list[Node] = []
    while isinstance(value, Node) and (values := arguments(value)) is not None:
        path.append(value)
        if name_of(value) == "relu":
            return path
        if not _is_view(value):
            break
        value = values["input"]
    return []


def _is_view(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.kind == "view" and tensor_of(node) is not None


def _is_rounded(node: Node) -> bool:
    """Whether all that reads a float32 value, or a view of it, makes bfloat16 of it first."""
    return all(_is_rounded(user) if _is_view(user) else _rounds(user) for user in node.users)


def _rounds(node: Node) -> bool:
    op, out = op_of(node), tensor_of(node)
    if op is None or out is None or out.dtype != torch.bfloat16:
        return False
    return op.kind == "gemm" or op.name == "to"


class _NormAndLayer(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, residual: bool = False) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.layer = torch.nn.Linear(8, 8)
        self.dtype, self.residual = dtype, residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, self.dtype):
            hidden = torch.relu(self.norm(x))
            y = self.layer(hidden.unflatten(1, (2, 4)).flatten(1))
            return y + hidden if self.residual else y
