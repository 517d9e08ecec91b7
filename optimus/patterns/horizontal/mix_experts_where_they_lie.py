"""Sum what is mixed over each run of experts where it lies, instead of joining the runs first.

Before: `(gate * stack([*shared, *own], 1)).sum(1)`
After:  `(gate[:, :S] * shared).sum(1) + (gate[:, S:] * own).sum(1)`, where `shared` and `own` are
        the tensors whose parts the experts are

Gains: the experts are not copied for every gate (as in progressive layered extraction), forward or
for backward; mixtures over the same experts are merged. Costs: none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

import torch
from torch.fx import Node

from optimus.affine import HALF
from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.merging import call_again, input_of
from optimus.ops import arguments, name_of
from optimus.pattern import Example, GroupPattern, Miss
from optimus.stacking import Track, plan_stack, rank_of
from optimus.values import static_size


@dataclass(frozen=True)
class MixExpertsWhereTheyLie(GroupPattern):
    """See the module's text."""

    anchors = ("sum",)
    family = "horizontal"
    misfit = "the experts are parts of one tensor, or of many"

    def key(self, node: Node) -> Hashable | Miss:
        values = arguments(node) or {}
        mixed: Node = values["input"]
        if name_of(mixed) != "mul" or len(mixed.users) != 1:
            return Miss("its input is no product, or one that is used elsewhere, too")
        if _single(values["dim"]) is None or values["dtype"] is not None:
            return Miss("sums over several dimensions, or in a type of its own")
        mixture = _mixture(node)
        if mixture is None:
            return Miss("sums no product with a stack over the members of the stack")
        return (mixture.at, len(mixture.experts))

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        return [group] if _parts(group) else [[node] for node in group]

    def also(self, node: Node) -> Sequence[Node]:
        mixture = _mixture(node)
        assert mixture is not None
        return (input_of(node), mixture.stack)

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        cuts = _parts(group)
        assert cuts is not None
        for node in group:
            edit.replace(node, _mix(edit, node, cuts))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, gates = torch.randn(3, 24), torch.randn(2, 3, 4)
        return (
            Example("shared and own experts", lambda: (_Mix(2), (x, gates)), fires=1),
            Example("own experts", lambda: (_Mix(0), (x, gates)), fires=0),
        )


def _single(dims: Any) -> int | None:
    if isinstance(dims, tuple | list) and len(dims) == 1:
        dims = dims[0]
    return dims if isinstance(dims, int) else None


def _factors(product: Node) -> tuple[Node, ...]:
    values = arguments(product) or {}
    pair = (values["input"], values["other"])
    return pair if all(tensor_of(factor) is not None for factor in pair) else ()


@dataclass(frozen=True)
class _Mixture:
    """A gate and a stack of experts along dimension `at`, counted from the end."""

    gate: Node
    stack: Node
    at: int

    @property
    def experts(self) -> Sequence[Node]:
        found: Sequence[Node] = (arguments(self.stack) or {})["tensors"]
        return found


def _mixture(node: Node) -> _Mixture | None:
    """What a sum of a product sums, if that is the members of a stack with a weight for each."""
    dim, product = _single((arguments(node) or {})["dim"]), input_of(node)
    assert dim is not None
    if not rank_of(product):
        return None
    at = dim % rank_of(product) - rank_of(product)
    for stack, gate in permutations(_factors(product)):
        weights = tensor_of(gate)
        if weights is None or name_of(stack) != "stack" or len(stack.users) != 1:
            continue
        values, rank = arguments(stack) or {}, rank_of(stack)
        has_weights = weights.dim() >= -at and static_size(weights, at) == len(values["tensors"])
        if has_weights and values["dim"] % rank - rank == at:
            return _Mixture(gate, stack, at)
    return None


def _parts(group: Sequence[Node]) -> list[tuple[int, int]] | None:
    """Ranges of experts that are a view of one tensor in each mixture; None if that is all of them,
    or if they are more than half as many as the experts."""
    cuts: set[int] = set()
    mixtures = [mixture for node in group if (mixture := _mixture(node)) is not None]
    for mixture in mixtures:
        at = 0
        for part in plan_stack(mixture.experts).parts:
            cuts.add(at)
            at += part.count if isinstance(part, Track) else 1
    count = len(mixtures[0].experts)
    if len(mixtures) < len(group) or not 1 < len(cuts) <= count / 2:
        return None
    return list(pairwise([*sorted(cuts), count]))


def _mix(edit: Editor, node: Node, parts: Sequence[tuple[int, int]]) -> Node:
    out, mixture = tensor_of(node), _mixture(node)
    assert out is not None and mixture is not None
    dtype = torch.float32 if out.dtype in HALF else None
    gate, at = mixture.gate, mixture.at
    total: Node | None = None
    for start, stop in parts:
        weights = edit.call("narrow", gate, rank_of(gate) + at, start, stop - start)
        run = plan_stack(mixture.experts[start:stop]).build(edit)
        product = edit.call("mul", weights, run.at(edit, rank_of(run.node) + at))
        term = call_again(edit, node, input=product, dim=rank_of(product) + at, dtype=dtype)
        total = term if total is None else edit.call("add", total, term)
    assert total is not None
    return total if dtype is None else edit.call("to", total, dtype=out.dtype)


class _Mix(torch.nn.Module):
    """Two mixtures, each of two experts of its own and some that both use."""

    def __init__(self, shared: int) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        experts, own = x.view(-1, 8, 3).unbind(1), 4 - self.shared
        mixed: list[torch.Tensor] = []
        for i, gate in enumerate(gates.unbind(0)):
            first = self.shared + i * own
            used = [*experts[: self.shared], *experts[first : first + own]]
            mixed.append((gate.unsqueeze(2) * torch.stack(used, 1)).sum(1))
        return torch.cat(mixed, 1)
