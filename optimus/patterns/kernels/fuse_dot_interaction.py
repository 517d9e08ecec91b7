"""Compute DLRM's pairwise dot products, their selection and the concatenation in one kernel.

Before: `v = cat([dense.unsqueeze(1), embedded], 1)`,
        `cat([dense, bmm(v, v.transpose(1, 2))[:, rows, columns]], 1)`
After:  `dot_interaction_at(dense, embedded, rows, columns)`

Gains: the vectors are read once and never concatenated, the full matrix of products is not written;
backward is one kernel, without a scatter. Costs: the first step waits for the GPU to look at the
indices. Needs: that the kernel is measured to be faster (knob `gate`: measure, always, never).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from kernels.dot_interaction import dot_interaction
from optimus.editor import Editor
from optimus.kernel_gate import Form, verdict
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.values import same_size


@dataclass(frozen=True)
class FuseDotInteraction(Pattern):
    """See the module's text."""

    gate: str = "measure"

    anchors = ("cat",)
    family = "kernels"

    def match(self, node: Node) -> Match | Miss:
        values = arguments(node)
        if values is None or values["dim"] != 1 or len(values["tensors"]) != 2:
            return Miss("not two tensors side by side")
        dense, flat = values["tensors"]
        selected = _selected_pairs(flat)
        if selected is None:
            return Miss("the second part is no selection of products, used once")
        products, rows, columns = selected
        vectors = _squared(products)
        if vectors is None:
            return Miss("the products are not those of all vectors with each other, used once")
        embedded = _joined(vectors, dense)
        if embedded is None:
            return Miss("the vectors are not the dense one, then the embedded, joined for this")
        inputs = (dense, embedded, rows, columns)
        slower = verdict(self.gate, _forms, (), inputs)
        return slower or Match((node, flat, products, vectors), values={"inputs": inputs})

    def rewrite(self, match: Match, edit: Editor) -> None:
        target = torch.ops.kernels.dot_interaction_at.default
        edit.replace(match.anchor, edit.call(target, *match["inputs"]))

    def ungated(self) -> FuseDotInteraction:
        return replace(self, gate="always")

    @classmethod
    def examples(cls) -> Sequence[Example]:
        dense, embedded = torch.randn(3, 4), torch.randn(3, 2, 4, requires_grad=True)
        return (
            Example("upper", lambda: (_Interaction(torch.triu_indices), (dense, embedded)), 1),
            Example("lower", lambda: (_Interaction(torch.tril_indices), (dense, embedded)), 1),
            Example(
                "other vector", lambda: (_Interaction(torch.triu_indices, 2), (dense, embedded)), 0
            ),
        )


def _selected_pairs(node: object) -> tuple[Node, Node, Node] | None:
    """products, rows and columns of `products[:, rows, columns]`, used once."""
    index = _argument(node, "getitem", "index")
    products = _argument(node, "getitem", "input")
    if not isinstance(index, tuple | list) or len(index) != 3 or index[0] != slice(None):
        return None
    rows, columns = index[1:]
    pairs = [tensor_of(i) for i in (rows, columns)]
    if not all(p is not None and p.dim() == 1 and p.dtype == torch.int64 for p in pairs):
        return None
    alone = all(isinstance(n, Node) and len(n.users) == 1 for n in (node, products))
    return (products, rows, columns) if alone and isinstance(products, Node) else None


def _squared(products: Node) -> Node | None:
    """x of `bmm(x, x.transpose(1, 2))`."""
    left, right = (_argument(products, "bmm", name) for name in ("input", "mat2"))
    dims = {_argument(right, "transpose", name) for name in ("dim0", "dim1")}
    if not isinstance(left, Node) or _argument(right, "transpose", "input") is not left:
        return None
    return left if dims == {1, 2} else None


def _joined(vectors: Node, dense: Node) -> Node | None:
    """embedded of `cat([dense.unsqueeze(1), embedded], 1)`, used for the products alone."""
    tensors = _argument(vectors, "cat", "tensors")
    if not isinstance(tensors, tuple | list) or len(tensors) != 2 or len(vectors.users) != 2:
        return None
    first, embedded = tensors
    value, row = tensor_of(embedded), tensor_of(dense)
    if value is None or row is None or value.dim() != 3 or row.dim() != 2:
        return None
    fits = _argument(vectors, "cat", "dim") == 1 and _argument(first, "unsqueeze", "dim") == 1
    is_dense = _argument(first, "unsqueeze", "input") is dense
    known = isinstance(value.shape[1], int) and same_size(value.shape[2], row.shape[1])
    return embedded if fits and is_dense and known else None


def _argument(node: object, op: str, name: str) -> object:
    """An argument of a call of `op`, None if `node` is no such call."""
    found = op_of(node) if isinstance(node, Node) else None
    if not isinstance(node, Node) or found is None or found.name != op:
        return None
    return (arguments(node) or {}).get(name)


def _forms() -> tuple[Form, Form]:
    """The kernel with a triangle: the measurement's indices are all zero, which costs plain
    PyTorch the same but is none of the orders that the kernel has."""

    def plain(dense: Tensor, embedded: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat((dense, products[:, rows, columns]), 1)

    def ours(dense: Tensor, embedded: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return dot_interaction(dense, embedded)

    return ours, plain


class _Interaction(torch.nn.Module):
    indices: Tensor

    def __init__(self, order: object, dense_row: int = 0) -> None:
        super().__init__()
        assert callable(order)
        self.register_buffer("indices", order(3, 3, 1 if order is torch.triu_indices else -1))
        self.dense_row = dense_row

    def forward(self, dense: Tensor, embedded: Tensor) -> Tensor:
        rows = list(embedded.unbind(1))
        rows.insert(self.dense_row, dense)
        vectors = torch.cat((dense.unsqueeze(1), embedded), 1)
        if self.dense_row:
            vectors = torch.stack(rows, 1)
        products = torch.bmm(vectors, torch.transpose(vectors, 1, 2))
        return torch.cat((dense, products[:, self.indices[0], self.indices[1]]), dim=1)
