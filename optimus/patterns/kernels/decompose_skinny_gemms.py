"""Compute products of tiny matrices as sums of products.

Before: `linear(x, w, b)` of 4 features to 16 outputs, `bmm(x, y)` of many tiny matrices
After:  `(x[..., None, :] * w).sum(-1) + b`, `(x[..., None, :] * y.mT[:, None]).sum(-1)`

Gains: fused with what makes its input and with what follows; no GEMM that is mostly empty tiles.
Costs: without a compiler that fuses them, a tensor of all products; sums are taken in float32, and
rounded once, as a GEMM does it.
Needs: that it is measured to be faster (knob `gate`: measure, always, never), on a GPU; a summed
dimension of at most `thinnest`, or of at most `smallest` like one of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from optimus.affine import HALF
from optimus.editor import Editor
from optimus.kernel_gate import Form, verdict
from optimus.legality import tensor_of
from optimus.ops import OPS, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.patterns.horizontal.sum_matrix_vector_products import factors_of
from optimus.values import static_size

Call = Callable[..., Any]


@dataclass(frozen=True)
class DecomposeSkinnyGemms(Pattern):
    """See the module's text."""

    gate: str = "measure"
    thinnest: int = 8
    smallest: int = 32

    anchors = ("linear", "matmul", "bmm", "baddbmm")
    family = "kernels"

    def match(self, node: Node) -> Match | Miss:
        factors, op, out = factors_of(node), op_of(node), tensor_of(node)
        if factors is None or op is None or out is None:
            return Miss("its factors are not two floating-point matrices or stacks of them")
        one, other = tensor_of(factors[0]), tensor_of(factors[1])
        assert one is not None and other is not None
        depth, rows = static_size(one, -1), static_size(one, -2)
        columns = static_size(other, -2 if op.name == "linear" else -1)
        if rows == 1 or columns == 1:
            return Miss("one of them is a vector")
        if not self._is_skinny(depth, rows, columns):
            return Miss("its sizes are large enough for a GEMM")
        inputs = [factor for factor in factors if factor is not None]
        tensors = [t for t in map(tensor_of, inputs) if t is not None]
        types = [part for t in tensors for part in (t.dim(), str(t.dtype))]
        form = _form(op.name, str(out.dtype), *types)
        slower = verdict(self.gate, forms, (op.name, str(out.dtype), *types), inputs)
        return slower or Match((node,), values={"inputs": inputs, "form": form})

    def _is_skinny(self, depth: int | None, rows: int | None, columns: int | None) -> bool:
        if depth is None or depth == 0:
            return False
        narrow = min(size for size in (rows, columns, self.smallest + 1) if size is not None)
        return depth <= self.thinnest or max(depth, narrow) <= self.smallest

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, match["form"].build(edit.call, *match["inputs"]))

    def ungated(self) -> DecomposeSkinnyGemms:
        return replace(self, gate="always")

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, y = torch.randn(3, 4, 5), torch.randn(3, 5, 2)
        wide = torch.randn(3, 64)
        return (
            Example("layer", lambda: (torch.nn.Linear(5, 4), (torch.randn(3, 5),)), fires=1),
            Example("tiny matrices", lambda: (_Product(), (x, y)), fires=1),
            Example("one column", lambda: (_Product(), (x, y[..., :1].clone())), fires=0),
            Example("long sums", lambda: (torch.nn.Linear(64, 4), (wide,)), fires=0),
        )


@dataclass(frozen=True)
class _Form:
    """A product by operation `name` with a result of `dtype`, in either form. `inputs`: rank and
    dtype of the left and the right factor, and of what is added, if there is something."""

    name: str
    dtype: torch.dtype
    inputs: tuple[tuple[int, torch.dtype], ...]

    def build(self, call: Call, *inputs: Any) -> Any:
        """As sums. `call` calls an operation by name."""
        left, right, *bias = (
            self._read(call, value, dtype)
            for value, (_, dtype) in zip(inputs, self.inputs, strict=True)
        )
        ranks = [rank for rank, _ in self.inputs]
        if self.name != "linear":
            right = call("transpose", right, ranks[1] - 2, ranks[1] - 1)
            right = call("unsqueeze", right, ranks[1] - 2)
        products = call("mul", call("unsqueeze", left, ranks[0] - 1), right)
        total = call("sum", products, max(ranks[:2]))
        if bias:
            total = call("add", total, bias[0])
        return call("to", total, dtype=self.dtype) if self.dtype in HALF else total

    def _read(self, call: Call, value: Any, dtype: torch.dtype) -> Any:
        """An input as a GEMM with this result would read it: cast, summed in float32."""
        if dtype != self.dtype:
            value = call("to", value, dtype=self.dtype)
        return call("to", value, dtype=torch.float32) if self.dtype in HALF else value

    def plain(self, *inputs: Tensor) -> Tensor:
        """As it is."""
        left, right, *bias = (value.to(self.dtype) for value in inputs)
        first = [*bias, left, right] if self.name == "baddbmm" else [left, right, *bias]
        out: Tensor = _call(self.name, *first)
        return out


def forms(name: str, dtype: str, *types: Any) -> tuple[Form, Form]:
    """As sums and as it is. `types`: rank and dtype of one input after another."""
    form = _form(name, dtype, *types)

    def ours(*inputs: Tensor) -> Tensor:
        out: Tensor = form.build(_call, *inputs)
        return out

    return ours, form.plain


def _form(name: str, dtype: str, *types: Any) -> _Form:
    inputs = zip(types[::2], map(_dtype, types[1::2]), strict=True)
    return _Form(name, _dtype(dtype), tuple(inputs))


def _dtype(text: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, text.removeprefix("torch."))
    return dtype


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    return OPS[name].target(*args, **kwargs)


class _Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, y)
