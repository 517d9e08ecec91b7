"""Keep the inputs of linears for backward in eight bits an element.

Before: `linear(x, w, b)`, for whose weight's gradient x is saved
After:  `linear_saving_quantized(x, w, b, "int8")`

No preset selects it: the weight's gradient reads a rounded x. Its error is measured on the inputs
at hand and reported; beyond `bound` of the gradient's norm the pattern is left out. Forward and all
other gradients are exact. Gains: a quarter of the saved bytes in float32, half in a half type.
Costs: coding each input, and decoding it in backward.
Needs: an input of at least `min_bytes` that nothing else keeps: no input of the graph, no result
that its own operation needs again (of a relu in float32 a mask remains).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from kernels.quantized_linear import CODES
from optimus.editor import Editor, Refused, is_view
from optimus.legality import Legality, tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.saving import is_saved, keeps_its_result
from optimus.values import hint_of


@dataclass(frozen=True)
class QuantizeSavedActivations(Pattern):
    """See the module's text. `storage`: int8 or float8_e4m3fn."""

    storage: str = "int8"
    min_bytes: int = 1 << 20
    bound: float = 0.05

    anchors = ("linear",)
    family = "kernels"

    def __post_init__(self) -> None:
        if self.storage not in CODES:
            raise ValueError(f"unknown storage {self.storage!r}; valid: {', '.join(CODES)}")

    def gradient_error(self) -> float:
        return self.bound

    def match(self, node: Node) -> Match | Miss:
        values = arguments(node) or {}
        x, weight, out = (tensor_of(n) for n in (values["input"], values["weight"], node))
        if x is None or weight is None or out is None or x.dim() < 2 or weight.dim() != 2:
            return Miss("its input has no rows")
        if not weight.requires_grad or not out.requires_grad:
            return Miss("no gradient of a weight reads its input")
        if not out.is_floating_point() or out.element_size() == 1:
            return Miss("its input takes eight bits or less")
        size = hint_of(x.shape)
        if size is None or size * out.element_size() < self.min_bytes:
            return Miss(f"its input takes less than {self.min_bytes} bytes")
        if _made_by(values["input"]).op != "call_function":
            return Miss("its input is one of the graph and kept anyway")
        return Match((node,), values=values | {"bytes": out.element_size()})

    def rewrite(self, match: Match, edit: Editor) -> None:
        if _is_kept(match["input"], match["bytes"], edit.legality):
            raise Refused("its input is kept for another gradient, too")
        inputs = (match["input"], match["weight"], match["bias"])
        target = torch.ops.kernels.linear_saving_quantized.default
        edit.replace(match.anchor, edit.call(target, *inputs, self.storage))

    def ungated(self) -> QuantizeSavedActivations:
        return replace(self, min_bytes=0)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(16, 32)
        return (
            Example("behind a relu", lambda: (_Mlp(F.relu), (x,)), fires=1),
            Example("behind a norm", lambda: (_Mlp(lambda h: F.layer_norm(h, (32,))), (x,)), 1),
            Example("kept by the activation", lambda: (_Mlp(torch.sigmoid), (x,)), fires=0),
            Example("first layer", lambda: (torch.nn.Linear(32, 4), (x,)), fires=0),
        )


def _made_by(node: Node) -> Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_kept(node: Node, num_bytes: int, legality: Legality) -> bool:
    """Whether its values stay for backward even if no linear saves them."""
    made_by = _made_by(node)
    if is_saved(made_by, legality, ignoring=("linear",)):  # by readers of any view of it
        return True
    op = op_of(made_by)
    if op is not None and op.name == "relu":
        return num_bytes <= 2  # one byte an element stays, and one comes
    return keeps_its_result(made_by, legality)


class _Mlp(torch.nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.activation(self.first(x)))
        return out
