"""Write basic indexing as the views that it is: narrow for a range, select for a place.

Before: `x[:, a:b]`, `x[..., i]`, `x[0, 2:, None]`, `parts[-1]` of a split
After:  `narrow(x, 1, a, b - a)`, `select(x, n - 1, i)`, a chain of these, `parts[n - 1]`

Gains: every other pattern sees one spelling. Costs: none.
Needs: numbers for bounds, steps of one, and static sizes where a range is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of, value_of
from optimus.ops import OPS
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import slice_bounds
from optimus.values import static_size

Step = tuple[Any, ...]
"""An operation's name and its arguments after the tensor."""


@dataclass(frozen=True)
class LowerIndexToNarrow(Pattern):
    """See the module's text."""

    anchors = ("getitem",)
    family = "normalize"

    def match(self, node: Node) -> Match | Miss:
        source, index = node.args
        if isinstance(source, Node) and isinstance(value_of(source), tuple | list):
            if type(index) is not int or index >= 0:
                return Miss("a part of a tuple, counted from the front")
            item = ("getitem", index + len(value_of(source)))
            return Match((node,), values={"steps": [item]})
        tensor = tensor_of(source)
        if tensor is None:
            return Miss("indexes no tensor")
        steps = _steps(index if isinstance(index, tuple) else (index,), tensor)
        return steps if isinstance(steps, Miss) else Match((node,), values={"steps": steps})

    def rewrite(self, match: Match, edit: Editor) -> None:
        result, steps = match.anchor.args[0], match["steps"]
        if len(steps) == 1:  # the same view in other words: no new value to compute
            name, *args = steps[0]
            arguments = zip(OPS[name].parameters, (result, *args), strict=True)
            edit.respell(match.anchor, name, **dict(arguments))
            return
        for name, *args in steps:
            result = edit.call(name, result, *args)
        assert isinstance(result, Node)
        edit.replace(match.anchor, result)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 6, 2)
        return (
            Example("ranges", lambda: (_Ranges(), (x,)), fires=5, exact=True),
            Example("other", lambda: (_Other(), (x,)), fires=0, exact=True),
        )


def _steps(index: tuple[Any, ...], tensor: torch.Tensor) -> list[Step] | Miss:
    """Views that take `index` of `tensor`, one dimension after another as indexing does."""
    parts = _spread(index, tensor.dim())
    if parts is None:
        return Miss("not basic indexing with numbers")
    steps: list[Step] = []
    taken = kept = 0  # dimensions of the tensor, and of the result, so far
    for part in parts:
        if part is None:
            steps.append(("unsqueeze", kept))
        else:
            step = _step(part, kept, static_size(tensor, taken))
            if isinstance(step, Miss):
                return step
            steps += step
            taken += 1
        kept += not isinstance(part, int)
    return steps or Miss("takes everything")


def _spread(index: tuple[Any, ...], rank: int) -> list[Any] | None:
    """`index` with a part for each dimension, and None for new ones; None if it is not basic."""
    for part in index:
        if isinstance(part, slice):
            if any(
                b is not None and type(b) is not int for b in (part.start, part.stop, part.step)
            ):
                return None
        elif part is not None and part is not Ellipsis and type(part) is not int:
            return None
    missing = [slice(None)] * (rank - sum(p is not None and p is not Ellipsis for p in index))
    if Ellipsis not in index:
        return [*index, *missing]
    at = index.index(Ellipsis)
    return [*index[:at], *missing, *index[at + 1 :]]


def _step(part: slice | int, dim: int, extent: int | None) -> list[Step] | Miss:
    if isinstance(part, int):
        return [("select", dim, part + extent if part < 0 and extent is not None else part)]
    if part in (slice(None), slice(0, None), slice(None, None, 1), slice(0, None, 1)):
        return []
    if extent is None:
        return Miss("a range of a dynamic dimension")
    bounds = slice_bounds(part, extent)
    if bounds is None:
        return Miss("a step other than one")
    start, stop = bounds
    return [("narrow", dim, start, stop - start)] if (start, stop) != (0, extent) else []


class _Ranges(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x[:, 1:3, 0] + x[..., 2:-2, -1]
        b = x[:, -1, None, 1:]
        return torch.cat([a, b[:, 0], x[:, 5]], 1)


class _Other(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, ::2], x[:, [0, 2]], x[:]], 1)
