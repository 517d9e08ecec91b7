"""Remove calls that return their input as it is.

Before: `x.contiguous()`, `x.float()`, `x.to(x.device)`, `x.view(x.shape)`, `x.expand(x.shape)`,
`x.transpose(0, 0)`, `x.narrow(0, 0, len(x))`, `x.detach()`, where they change nothing
After:  `x`

Gains: what stands around it is seen as neighbours. Costs: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import storages_of, tensor_of
from optimus.ops import OPS, arguments
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.values import same_size, same_strides, same_type

_PARTS = ("split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind")


@dataclass(frozen=True)
class RemoveNoops(Pattern):
    """See the module's text."""

    anchors = (*(n for n, op in OPS.items() if op.kind == "view" and n not in _PARTS), "to")
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        values = arguments(node)
        source = values["input"] if values is not None else None
        now, before = tensor_of(node), tensor_of(source)
        if now is None or before is None:
            return Miss("not a tensor made of a tensor")
        if not storages_of(now) & storages_of(before):
            return Miss("a copy")
        if not (same_type(now, before) and same_strides(now, before)):
            return Miss("another view")
        if now.is_complex() or not same_size(now.storage_offset(), before.storage_offset()):
            return Miss("another view")
        return Match((node,), values={"source": source})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.replace(match.anchor, match["source"])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 3)
        return (
            Example("nothing", lambda: (_Nothing(), (x,)), fires=8, exact=True),
            Example("something", lambda: (_Something(), (x,)), fires=0, exact=True),
        )


class _Nothing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x.contiguous().float().to(x.device)[:, :].expand(-1, 3))
        return y.view(-1, 3).narrow(1, 0, 3).transpose(1, 1) + 1


class _Something(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.t().contiguous().double().view(3, -1, 1).squeeze(2)
        return y[:, 1:] + y.to(torch.float64, copy=True).T[:, 1:].sum()
