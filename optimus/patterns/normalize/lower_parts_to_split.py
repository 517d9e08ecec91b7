"""Write every way to cut a tensor into parts as one split with a list of sizes.

Before: `torch.chunk(x, 3, 1)`, `torch.tensor_split(x, [2, 5], 1)`, `x.split(4, 1)`, `x.hsplit(2)`
After:  `torch.split(x, [4, 4, 2], 1)`, ...

Gains: every other pattern sees one spelling, and reads the sizes off it. Costs: none.
Needs: sizes that are static along the dimension that is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.ops import arguments, op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import parting_of


@dataclass(frozen=True)
class LowerPartsToSplit(Pattern):
    """See the module's text."""

    anchors = ("split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit")
    family = "normalize"

    def match(self, node: Node) -> Match | Miss:
        op, values = op_of(node), arguments(node)
        parting = parting_of(node)
        if op is None or values is None or parting is None:
            return Miss("sizes along the dimension are dynamic")
        if node.all_input_nodes != [parting.source]:
            return Miss("cut at places that are computed")
        sizes, dim = parting.sizes, parting.dim
        if (
            op.name == "split"
            and values["split_size_or_sections"] == sizes
            and values["dim"] == dim
        ):
            return Miss("canonical already")
        return Match((node,), values={"source": parting.source, "sizes": sizes, "dim": dim})

    def rewrite(self, match: Match, edit: Editor) -> None:
        edit.respell(
            match.anchor,
            "split",
            tensor=match["source"],
            split_size_or_sections=match["sizes"],
            dim=match["dim"],
        )

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (
            Example("ways", lambda: (_Ways(), (torch.randn(4, 10),)), fires=4, exact=True),
            Example("sizes", lambda: (_Sizes(), (torch.randn(4, 10),)), fires=0),
        )


class _Ways(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.chunk(x, 3, 1)
        b = torch.tensor_split(x, [2, 5], -1)
        c = x.split(4, 1)
        d = torch.hsplit(x, 2)
        return torch.cat([*a, *reversed(b), *c, *d], 1)


class _Sizes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.split(x, [4, 6], 1)
        return torch.cat([b, a], 1)
