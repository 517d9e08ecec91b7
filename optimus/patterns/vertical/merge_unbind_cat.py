"""Join parts of one tensor along another dimension than they were cut along by one reshape.

Before: `cat(unbind(x, 1), 1)`; `cat(split(x, [8] * n, 1), 0)`
After:  `flatten(x, 1, 2)`; `flatten(transpose(unflatten(x, 1, (n, 8)), 0, 1), 0, 1)`

Gains: one copy instead of n, or none where the elements are in order. Costs: none.
Needs: parts of equal size side by side, in their order. Beside other tensors they are joined first
where they are used nowhere else and that makes no copy, or where they are many: the compiler runs a
kernel for every part of a cat, while it computes the copy where the cat reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.axes import moved, permute
from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import Run, joined_by, open_run, runs_of
from optimus.uses import used_once


@dataclass(frozen=True)
class MergeUnbindCat(Pattern):
    """See the module's text. `fewest_beside_others`: how many parts make a copy worth it."""

    fewest_beside_others: int = 4

    anchors = ("cat",)
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        joined = joined_by(node)
        if joined is None:
            return Miss("not a list of tensors")
        nodes, dim = joined
        runs = list(runs_of(nodes))
        parts: list[Run | Node] = []
        for run, members in runs:
            across = run is not None and len(members) > 1 and (run.dropped or run.dim != dim)
            if run is not None and across and (len(runs) == 1 or self._pays(run, members, dim)):
                parts.append(run)
            else:
                parts += members
        if len(parts) == len(nodes):
            return Miss("no parts of one tensor side by side, cut along another dimension")
        return Match((node,), values={"parts": parts, "dim": dim})

    def _pays(self, run: Run, nodes: Sequence[Node], dim: int) -> bool:
        """Whether to join the run before it is joined with others."""
        makes_no_copy = run.dropped and run.dim == dim
        return used_once(nodes) and (makes_no_copy or len(nodes) >= self.fewest_beside_others)

    def rewrite(self, match: Match, edit: Editor) -> None:
        dim = match["dim"]
        parts = [_flat(edit, p, dim) if isinstance(p, Run) else p for p in match["parts"]]
        whole = parts[0] if len(parts) == 1 else edit.call("cat", parts, dim)
        edit.replace(match.anchor, whole)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 3, 2, requires_grad=True)
        return (
            Example("across", lambda: (_Across([0, 1, 2]), (x,)), fires=3, exact=True),
            Example("order", lambda: (_Across([1, 0, 2]), (x,)), fires=0, exact=True),
        )


def _flat(edit: Editor, run: Run, dim: int) -> Node:
    """The run with its pieces one behind the other along `dim` of a piece."""
    opened = open_run(edit, run)
    tensor = tensor_of(opened)
    assert tensor is not None
    ordered = permute(edit, opened, moved(tensor.dim(), run.dim, dim))
    return edit.call("flatten", ordered, dim, dim + 1)


class _Across(torch.nn.Module):
    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order = list(order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.unbind(x, 1)
        parts = torch.split(x, 1, 1)
        a = torch.relu(torch.cat([places[i] for i in self.order], 1))
        b = torch.relu(torch.cat([places[i] for i in self.order], 0))
        return a.sum() + b.sum() + torch.relu(torch.cat([parts[i] for i in self.order], 2)).sum()
