"""Call every known operation by one name, with its arguments in one form.

Before: `x.relu()`, `F.relu(x)`, `1 + x`, `torch.concat(parts, dim=-1)`, `x.view(2, -1)`
After:  `torch.relu(x)`, `torch.add(x, 1)`, `torch.cat(parts, -1)`, `torch.reshape(x, (2, -1))`

Gains: every other pattern sees one spelling of an operation. Costs: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.ops import OPS, arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern


@dataclass(frozen=True)
class CanonicalizeCalls(Pattern):
    """See the module's text."""

    anchors = tuple(name for name in OPS if name not in ("getitem", "getattr"))
    family = "normalize"

    def match(self, node: Node) -> Match | Miss:
        op, values = op_of(node), arguments(node)
        if op is None or values is None:
            return Miss("says something that the canonical form cannot")
        if node.target is op.target and op.build(values) == (node.args, node.kwargs):
            return Miss("canonical already")
        return Match((node,), values={"op": op.name, "arguments": values})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.respell(match.anchor, match["op"], **match["arguments"])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (
            Example("methods", lambda: (_Spellings(), (torch.randn(3, 4),)), fires=4, exact=True),
            Example("canonical", lambda: (_Canonical(), (torch.randn(3, 4),)), fires=0),
        )


class _Spellings(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.concat([1 + x.relu(), x.view(3, 4)], dim=-1)


class _Canonical(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)
