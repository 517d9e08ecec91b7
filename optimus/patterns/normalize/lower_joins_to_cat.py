"""Write every way to join tensors as a cat or a stack.

Before: `torch.hstack(parts)`, `torch.vstack(parts)`, `torch.dstack(parts)`, `column_stack(parts)`
After:  `torch.cat(parts, 1)`, `torch.cat(parts)`, ...; `torch.stack(vectors)` for a vstack of
vectors, and along dimension 1 for a column_stack of them

Gains: every other pattern sees two spellings. Costs: none.
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

# By the number of dimensions of all parts: the operation and its dimension. A part of more has that
# of the last entry; of fewer, it would be given new dimensions first.
_FORMS: dict[str, dict[int, tuple[str, int]]] = {
    "hstack": {1: ("cat", 0), 2: ("cat", 1)},
    "vstack": {1: ("stack", 0), 2: ("cat", 0)},
    "dstack": {2: ("stack", 2), 3: ("cat", 2)},
    "column_stack": {1: ("stack", 1), 2: ("cat", 1)},
}


@dataclass(frozen=True)
class LowerJoinsToCat(Pattern):
    """See the module's text."""

    anchors = tuple(_FORMS)
    family = "normalize"

    def match(self, node: Node) -> Match | Miss:
        op, values = op_of(node), arguments(node)
        parts = values["tensors"] if values is not None else None
        if op is None or not isinstance(parts, list | tuple) or not parts:
            return Miss("not a list of tensors")
        ranks = {tensor.dim() if tensor is not None else -1 for tensor in map(tensor_of, parts)}
        forms = _FORMS[op.name]
        rank = min(ranks.pop(), max(forms)) if len(ranks) == 1 else -1
        if rank not in forms:
            return Miss("parts would be given new dimensions")
        name, dim = forms[rank]
        return Match((node,), values={"name": name, "parts": list(parts), "dim": dim})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.respell(match.anchor, match["name"], tensors=match["parts"], dim=match["dim"])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 4)
        return (
            Example("matrices", lambda: (_Matrices(), (x,)), fires=4, exact=True),
            Example("mixed", lambda: (_Mixed(), (x,)), fires=0, exact=True),
        )


class _Matrices(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.vstack([x[0], x[1]])
        return torch.hstack([x, x]), rows, torch.dstack([x, x]), torch.column_stack([x, x])


class _Mixed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.vstack([x[0], x]), torch.column_stack([x, x[0]])
