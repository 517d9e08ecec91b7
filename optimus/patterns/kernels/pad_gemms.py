"""Pad a linear's sizes to what tensor cores read in full words.

Before: `linear(x, w, b)` of 131 features to 50 outputs, in bfloat16
After:  `linear(pad(x, (0, 5)), pad(w, (0, 5, 0, 6)), pad(b, (0, 6))).narrow(-1, 0, 50)`

Rows of 16 bytes: multiples of 8 in a half type, of 4 in float32. Gains: the GEMM takes a faster
path. Costs: a copy of the weight, and where features are padded one of the input, on every step.
Needs: that it is measured to be faster (knob `gate`: measure, always, never), on a GPU; sizes of at
least `least`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from optimus.editor import Editor
from optimus.kernel_gate import Form, verdict
from optimus.legality import tensor_of
from optimus.ops import arguments
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.stacking import rank_of
from optimus.values import static_size

ROW_BYTES = 16
"""What a GPU loads at once."""


@dataclass(frozen=True)
class PadGemms(Pattern):
    """See the module's text. `multiple`: of which sizes are made multiples, 0 for that of the
    type."""

    gate: str = "measure"
    multiple: int = 0
    least: int = 32

    anchors = ("linear",)
    family = "kernels"

    def match(self, node: Node) -> Match | Miss:
        values = arguments(node) or {}
        x, weight, out = (tensor_of(n) for n in (values["input"], values["weight"], node))
        if x is None or weight is None or out is None or x.dim() < 2 or weight.dim() != 2:
            return Miss("its input has no rows")
        pads = self._pads(weight, out)
        if isinstance(pads, Miss):
            return pads
        inputs = [values[name] for name in ("input", "weight", "bias") if values[name] is not None]
        how = (str(out.dtype), *pads)
        slower = verdict(self.gate, forms, how, inputs)
        if slower is not None:
            return slower
        return Match((node,), values=values | {"pads": pads, "outputs": weight.shape[0]})

    def _pads(self, weight: Tensor, out: Tensor) -> tuple[int, int] | Miss:
        """By how many features and outputs a weight is too small."""
        if not out.is_floating_point() or out.element_size() not in (2, 4):
            return Miss("no type that tensor cores work in")
        features, outputs = static_size(weight, 1), static_size(weight, 0)
        if features is None or outputs is None:
            return Miss("a size of its weight is dynamic")
        if min(features, outputs) < max(self.least, 1):
            return Miss(f"a size is less than {self.least}, most of it would be padding")
        multiple = self.multiple or ROW_BYTES // out.element_size()
        if features % multiple == outputs % multiple == 0:
            return Miss(f"its sizes are multiples of {multiple}")
        return -features % multiple, -outputs % multiple

    def rewrite(self, match: Match, edit: Editor) -> None:
        x, weight, bias, (features, outputs) = (
            match[name] for name in ("input", "weight", "bias", "pads")
        )
        if features:
            x = edit.call(F.pad, x, (0, features))
        weight = edit.call(F.pad, weight, (0, features, 0, outputs))
        if bias is not None and outputs:
            bias = edit.call(F.pad, bias, (0, outputs))
        out = edit.call("linear", x, weight, *([] if bias is None else [bias]))
        if outputs:
            out = edit.call("narrow", out, rank_of(out) - 1, 0, match["outputs"])
        edit.replace(match.anchor, out)

    def ungated(self) -> PadGemms:
        return replace(self, gate="always", least=1)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 6)
        return (
            Example("both", lambda: (torch.nn.Linear(6, 5), (x,)), fires=1),
            Example("outputs", lambda: (torch.nn.Linear(8, 5), (torch.randn(3, 2, 8),)), fires=1),
            Example("features", lambda: (torch.nn.Linear(6, 4, bias=False), (x,)), fires=1),
            Example("multiples", lambda: (torch.nn.Linear(8, 4), (torch.randn(3, 8),)), fires=0),
        )


def forms(dtype_name: str, features: int, outputs: int) -> tuple[Form, Form]:
    """The padded and the plain product, in the type that the result has here."""
    dtype = getattr(torch, dtype_name.removeprefix("torch."))

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, weight = F.pad(x.to(dtype), (0, features)), weight.to(dtype)
        bias = None if bias is None else F.pad(bias.to(dtype), (0, outputs))
        out = F.linear(x, F.pad(weight, (0, features, 0, outputs)), bias)
        return out[..., : out.shape[-1] - outputs]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = None if bias is None else bias.to(dtype)
        return F.linear(x.to(dtype), weight.to(dtype), bias)

    return ours, plain
