"""Name dimensions, and places along them, by numbers that are not negative.

Before: `torch.cat(parts, -1)`, `x.softmax(-1)`, `torch.select(x, -2, -1)`
After:  `torch.cat(parts, 1)`, `torch.softmax(x, 1)`, `torch.select(x, 0, 3)`

Gains: the same dimension has one name, so equal calls are seen to be equal. Costs: none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.values import static_size

_DIM = ("dim",)
_DIMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("split", "chunk", "tensor_split", "unbind", "narrow", "select"), _DIM),
    **dict.fromkeys(("squeeze", "unsqueeze", "unflatten", "cat", "stack", "normalize"), _DIM),
    **dict.fromkeys(("softmax", "log_softmax", "sum", "mean", "amax", "amin"), _DIM),
    "flatten": ("start_dim", "end_dim"),
    "transpose": ("dim0", "dim1"),
    "permute": ("dims",),
    "movedim": ("source", "destination"),
}
_PLACE = {"narrow": "start", "select": "index"}


@dataclass(frozen=True)
class CountDimsFromFront(Pattern):
    """See the module's text."""

    anchors = tuple(_DIMS)
    family = "normalize"

    def match(self, node: Node) -> Match | Miss:
        op, values = op_of(node), arguments(node)
        if op is None or values is None:
            return Miss("says something that the canonical form cannot")
        if not any(_is_negative(values[name]) for name in (*_DIMS[op.name], *_places(op.name))):
            return Miss("no number is negative")
        rank = _rank(op.name, values)
        if not rank:
            return Miss("the number of dimensions is not known, or none")
        changed = {name: _count(values[name], lambda dim: dim % rank) for name in _DIMS[op.name]}
        values |= changed | _counted_place(op.name, values | changed)
        if op.build(values) == (node.args, node.kwargs):
            return Miss("a place along a dynamic dimension")
        return Match((node,), values={"op": op.name, "arguments": values})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.respell(match.anchor, match["op"], **match["arguments"])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (
            Example("negative", lambda: (_Negative(), (torch.randn(3, 4),)), fires=6, exact=True),
            Example("positive", lambda: (_Positive(), (torch.randn(3, 4),)), fires=0),
        )


def _places(name: str) -> tuple[str, ...]:
    return (_PLACE[name],) if name in _PLACE else ()


def _is_negative(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_negative, value))
    return isinstance(value, int) and value < 0


def _count(value: Any, number: Callable[[int], int]) -> Any:
    """`number` of every negative int in `value`."""
    if isinstance(value, tuple | list):
        return type(value)(_count(part, number) for part in value)
    return number(value) if _is_negative(value) else value


def _counted_place(name: str, values: dict[str, Any]) -> dict[str, Any]:
    tensor = tensor_of(values.get("input"))
    if name not in _PLACE or tensor is None:
        return {}
    extent = static_size(tensor, values["dim"])
    place = values[_PLACE[name]]
    return {} if extent is None else {_PLACE[name]: _count(place, lambda at: at + extent)}


def _rank(name: str, values: dict[str, Any]) -> int | None:
    """How many dimensions the numbers count; 0 if there are none."""
    source = values.get("input", values.get("tensor", values.get("tensors")))
    sources = list(source) if isinstance(source, tuple | list) else [source]
    ranks = {t.dim() for t in map(tensor_of, sources) if t is not None}
    if len(ranks) != 1:  # cat leaves out empty tensors of one dimension
        return None
    return ranks.pop() + (name in ("stack", "unsqueeze"))


class _Negative(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, x], -1).softmax(dim=-1).unsqueeze(-1)
        return y.sum([0, -1]) + y.select(-1, -1).narrow(-1, -2, 1)


class _Positive(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], 1).softmax(1)
