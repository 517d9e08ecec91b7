"""Cut off only the parts that are used.

Before: `_, a, _, _, b = split(x, [4] * 5, 1)`; `_, c, _ = unbind(x, 1)`
After:  `_, a, _, b = split(x, [4, 4, 8, 4], 1)`, `select(x, 1, 1)`; a narrow for a single part

Gains: nodes; zeros in the gradient of x. Costs: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.pattern import Example, Match, Miss, Pattern
from optimus.pieces import Parting, cut, items_of, parting_of


@dataclass(frozen=True)
class DropUnusedPieces(Pattern):
    """See the module's text."""

    anchors = ("split", "unbind")
    family = "vertical"

    def match(self, node: Node) -> Match | Miss:
        parting, items = parting_of(node), items_of(node)
        if parting is None or items is None:
            return Miss("sizes along the dimension are dynamic")
        used = {index: ends for index, ends in items.items() if any(end.users for end in ends)}
        if parting.count == 1 or not used or any(not parting.piece(i).size for i in used):
            return Miss("one part, or parts of no width")
        if len(used) > 1 and (parting.dropped or not _has_wide_gap(parting, used)):
            return Miss("no parts beside one another are unused")
        ends = tuple(end for ends in items.values() for end in ends)
        return Match((node, *ends), values={"parting": parting, "used": used})

    def rewrite(self, match: Match, edit: Editor) -> None:
        parting: Parting = match["parting"]
        used: dict[int, list[Node]] = match["used"]
        if parting.dropped:
            (index,) = used
            made = {index: edit.call("select", parting.source, parting.dim, index)}
        else:
            bounds = parting.bounds
            ranges = {index: (bounds[index], bounds[index + 1]) for index in used}
            parts = cut(edit, parting.source, parting.dim, ranges.values())
            made = {index: parts[ends] for index, ends in ranges.items()}
        for index, ends in used.items():
            for end in ends:
                edit.replace(end, made[index])

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(4, 6, requires_grad=True)
        return (
            Example("gaps", lambda: (_Used([1, 4], [2]), (x,)), fires=2, exact=True),
            Example("narrow gaps", lambda: (_Used([0, 2, 4], [0, 3]), (x,)), fires=0, exact=True),
        )


def _has_wide_gap(parting: Parting, used: dict[int, list[Node]]) -> bool:
    return any(i not in used and i + 1 not in used for i in range(parting.count - 1))


class _Used(torch.nn.Module):
    def __init__(self, parts: Sequence[int], places: Sequence[int]) -> None:
        super().__init__()
        self.parts, self.places = list(parts), list(places)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts, places = torch.split(x, 1, 1), torch.unbind(x, 0)
        chosen = [parts[i] for i in self.parts] + [places[i] for i in self.places]
        return torch.stack([torch.relu(part).sum() for part in chosen])
