"""Make one reshape of several in a row, and none where they cancel.

Before: `x.flatten(1).unflatten(1, (4, -1)).unsqueeze(2)`
After:  `reshape(x, (-1, 4, 1, 8))`

Gains: nodes; what stands around it is seen as neighbours. Costs: none: a copy is made where one of
the reshapes made one.
Needs: at most one dynamic size in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import op_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.reshaping import RESHAPES, shape_to_say
from optimus.values import is_view, same_sizes


@dataclass(frozen=True)
class MergeReshapes(Pattern):
    """See the module's text."""

    anchors = RESHAPES
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        if len(node.users) == 1 and _is_reshape(next(iter(node.users))):
            return Miss("one of several in a row, but not the last")
        chain = [node]
        while _can_go(source := chain[-1].all_input_nodes[0]):
            chain.append(source)
        if len(chain) == 1:
            return Miss("its input is no reshape, or a copy that is used elsewhere, too")
        base = chain[-1].all_input_nodes[0]
        before, after = tensor_of(base), tensor_of(node)
        if before is None or after is None:
            return Miss("not a tensor made of a tensor")
        shape = None if same_sizes(before.shape, after.shape) else shape_to_say(after)
        if isinstance(shape, Miss):
            return shape
        return Match(tuple(chain), values={"base": base, "shape": shape})

    def rewrite(self, match: Match, edit: Editor) -> None:
        base, shape = match["base"], match["shape"]
        edit.replace(match.anchor, base if shape is None else edit.call("reshape", base, shape))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(5, 4, 8)
        return (
            Example("chain", lambda: (_Chain(), (x,)), fires=3, exact=True),
            Example("apart", lambda: (_Apart(), (x,)), fires=0, exact=True),
        )


def _can_go(node: Node) -> bool:
    """A view costs nothing to leave out; a copy must not be made a second time."""
    return _is_reshape(node) and (is_view(node) or len(node.users) == 1)


def _is_reshape(node: Node) -> bool:
    op = op_of(node)
    return op is not None and op.name in RESHAPES


class _Chain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.flatten(1).unflatten(1, (8, -1)).unsqueeze(2)
        return torch.relu(y).squeeze(2).flatten(1).view(-1, 4, 8) + x.unsqueeze(1).squeeze(1)


class _Apart(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.mT.flatten(1)
        return torch.relu(x.flatten(1)).unflatten(1, (4, 8)) + y.unflatten(1, (4, 8)) + y.sum()
