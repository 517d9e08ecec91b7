"""Sum what is mixed over each run of experts where it lies, instead of joining the runs first.

Before: `(gate * stack([*shared, *own], 1)).sum(1)`, or `gate @ stack([*shared, *own], 1)`
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
from optimus.editor import Editor, Refused
from optimus.legality import tensor_of
from optimus.merging import call_again, input_of
from optimus.ops import arguments, name_of
from optimus.pattern import Example, GroupPattern, Miss
from optimus.patterns.horizontal.sum_matrix_vector_products import factors_of
from optimus.stacking import Stacked, Track, plan_stack, rank_of
from optimus.values import static_size


@dataclass(frozen=True)
class MixExpertsWhereTheyLie(GroupPattern):
    """See the module's text."""

    anchors = ("sum", "bmm", "matmul")
    family = "horizontal"
    smallest_group = 1
    misfit = "the experts are parts of one tensor, or of many"

    def key(self, node: Node) -> Hashable | Miss:
        mixture = _mixture(node)
        if isinstance(mixture, Miss):
            return mixture
        return (mixture.at, len(mixture.experts))

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        return [group] if _parts(group) else [[node] for node in group]

    def also(self, node: Node) -> Sequence[Node]:
        mixture = _mixture(node)
        assert not isinstance(mixture, Miss)
        return (mixture.stack,) if mixture.is_product else (input_of(node), mixture.stack)

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        cuts = _parts(group)
        if cuts is None:
            raise Refused(self.misfit)
        for node in group:
            edit.replace(node, _mix(edit, node, cuts))

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x, gates = torch.randn(3, 24), torch.randn(2, 3, 4)
        return (
            Example("shared and own experts", lambda: (_Mix(2), (x, gates)), fires=1),
            Example("by a product", lambda: (_Mix(2, product=True), (x, gates)), fires=1),
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
    """A gate and a stack of experts along dimension `at`, counted from the end. `is_product`: the
    gate is a row of weights that multiplies the stack, not a factor of what is summed."""

    gate: Node
    stack: Node
    at: int
    is_product: bool = False

    @property
    def experts(self) -> Sequence[Node]:
        found: Sequence[Node] = (arguments(self.stack) or {})["tensors"]
        return found


def _mixture(node: Node) -> _Mixture | Miss:
    """What a sum of a product sums, or a row multiplies, if that is the members of a stack with a
    weight for each."""
    if name_of(node) != "sum":
        return _product(node)
    values = arguments(node) or {}
    dim, mixed = _single(values["dim"]), input_of(node)
    if name_of(mixed) != "mul" or len(mixed.users) != 1:
        return Miss("its input is no product, or one that is used elsewhere, too")
    if dim is None or values["dtype"] is not None:
        return Miss("sums over several dimensions, or in a type of its own")
    at = dim % rank_of(mixed) - rank_of(mixed) if rank_of(mixed) else 0
    for stack, gate in permutations(_factors(mixed)):
        weights = tensor_of(gate)
        if weights is None or not weights.dim() >= -at > 0:
            continue
        if _stacks(stack, at, static_size(weights, at)):
            return _Mixture(gate, stack, at)
    return Miss("sums no product with a stack over the members of the stack")


def _product(node: Node) -> _Mixture | Miss:
    factors = factors_of(node)
    if factors is None:
        return Miss("its factors are not two floating-point matrices or stacks of them")
    gate, stack, _ = factors
    row, experts = tensor_of(gate), tensor_of(stack)
    assert row is not None and experts is not None
    if row.dim() < 3 or row.dim() != experts.dim() or static_size(row, -2) != 1:
        return Miss("more than one row")
    if not _stacks(stack, -2, static_size(row, -1)):
        return Miss("multiplies no stack of what it mixes")
    return _Mixture(gate, stack, -2, is_product=True)


def _stacks(node: Node, at: int, count: int | None) -> bool:
    """Whether `node` stacks `count` tensors along dimension `at`, for one reader."""
    if name_of(node) != "stack" or len(node.users) != 1:
        return False
    values, rank = arguments(node), rank_of(node)
    if values is None:
        return False
    return values["dim"] % rank - rank == at and len(values["tensors"]) == count


def _parts(group: Sequence[Node]) -> list[tuple[int, int]] | None:
    """Ranges of experts that are a view of one tensor in each mixture; None if that is all of them,
    or if they are more than half as many as the experts."""
    cuts: set[int] = set()
    mixtures = [m for node in group if not isinstance(m := _mixture(node), Miss)]
    for mixture in mixtures:
        at = 0
        for part in plan_stack(mixture.experts).parts:
            cuts.add(at)
            at += part.count if isinstance(part, Track) else 1
    count = len(mixtures[0].experts) if mixtures else 0
    if len(mixtures) < len(group) or not 1 < len(cuts) <= count / 2:
        return None
    return list(pairwise([*sorted(cuts), count]))


def _mix(edit: Editor, node: Node, parts: Sequence[tuple[int, int]]) -> Node:
    out, mixture = tensor_of(node), _mixture(node)
    assert out is not None and not isinstance(mixture, Miss)
    term = _multiplied if mixture.is_product else _summed
    total: Node | None = None
    for start, stop in parts:
        run = plan_stack(mixture.experts[start:stop]).build(edit)
        part = term(edit, node, mixture, run, (start, stop - start))
        total = part if total is None else edit.call("add", total, part)
    assert total is not None
    return edit.call("to", total, dtype=out.dtype) if out.dtype in HALF else total


Range = tuple[int, int]
"""The first of some experts, and how many they are."""


def _summed(edit: Editor, node: Node, mixture: _Mixture, run: Stacked, experts: Range) -> Node:
    """The sum over a run of experts, in float32 if the result is rounded to a half type."""
    out, gate, at = tensor_of(node), mixture.gate, mixture.at
    assert out is not None
    weights = edit.call("narrow", gate, rank_of(gate) + at, *experts)
    product = edit.call("mul", weights, run.at(edit, rank_of(run.node) + at))
    dtype = torch.float32 if out.dtype in HALF else None
    return call_again(edit, node, input=product, dim=rank_of(product) + at, dtype=dtype)


def _multiplied(edit: Editor, node: Node, mixture: _Mixture, run: Stacked, experts: Range) -> Node:
    """As `_summed`, of factors as a GEMM with this result would read them."""
    out, rank = tensor_of(node), rank_of(mixture.gate)
    assert out is not None
    row = edit.call("narrow", _as(edit, mixture.gate, out.dtype), rank - 1, *experts)
    if out.dtype in HALF:  # then the product is float32, whatever the experts are
        row = edit.call("to", row, dtype=torch.float32)
    weights = edit.call("transpose", row, rank - 2, rank - 1)
    product = edit.call("mul", weights, _as(edit, run.at(edit, rank - 2), out.dtype))
    return edit.call("sum", product, rank - 2, True)


def _as(edit: Editor, node: Node, dtype: torch.dtype) -> Node:
    tensor = tensor_of(node)
    assert tensor is not None
    return node if tensor.dtype == dtype else edit.call("to", node, dtype=dtype)


class _Mix(torch.nn.Module):
    """Two mixtures, each of two experts of its own and some that both use."""

    def __init__(self, shared: int, product: bool = False) -> None:
        super().__init__()
        self.shared, self.product = shared, product

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        experts, own = x.view(-1, 8, 3).unbind(1), 4 - self.shared
        mixed: list[torch.Tensor] = []
        for i, gate in enumerate(gates.unbind(0)):
            first = self.shared + i * own
            used = [*experts[: self.shared], *experts[first : first + own]]
            stack = torch.stack(used, 1)
            if self.product:
                mixed.append((gate.unsqueeze(1) @ stack).squeeze(1))
            else:
                mixed.append((gate.unsqueeze(2) * stack).sum(1))
        return torch.cat(mixed, 1)
