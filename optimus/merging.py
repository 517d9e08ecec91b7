"""Running one operation on many members at once, where that needs no copy of an activation.

Operations that cost memory traffic (pointwise, norms, softmax, reductions) are merged only if each
input of the members is one region of one tensor, one tensor that all of them read, or parameters.
Two forms: members that lie side by side along a dimension that the operation does not care for, of
whatever sizes, are that *region*; members of equal shape are *stacked* on a dimension of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.grouping import freeze
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.pieces import region_of, take
from optimus.stacking import (
    Path,
    Stacked,
    Track,
    is_parameter,
    move_between,
    path_of,
    plan_stack,
    rank_of,
)
from optimus.values import static_size

Inputs = Callable[[Node], Sequence[Node]]
"""Of a member, its tensor inputs that count, in a fixed order."""


@dataclass(frozen=True)
class Merged:
    """Inputs of all members together. Counted from the end, members lie along dimension `at`: as
    pieces of `sizes`, or, if there are none, each at one index."""

    inputs: tuple[Node, ...]
    at: int
    count: int
    sizes: tuple[int, ...] = ()

    def dim(self, dim: int, rank: int) -> int:
        """Where dimension `dim` of a member with `rank` dimensions lies."""
        dim %= rank
        return dim if self.sizes else dim + (dim >= rank + 1 + self.at)

    def take_apart(self, edit: Editor, out: Node, at: int | None = None) -> list[Node]:
        """Every member's part of `out`; `at` if the members lie elsewhere than in the inputs."""
        dim = rank_of(out) + (self.at if at is None else at)
        if self.sizes:
            parts = edit.call("split", out, list(self.sizes), dim)
        else:
            parts = edit.call("unbind", out, dim)
        return edit.items(parts, range(self.count))


class _Row(NamedTuple):
    """One member, with the paths of its inputs."""

    node: Node
    inputs: tuple[Node, ...]
    paths: tuple[Path, ...]
    starts: tuple[int, ...]
    """Where its inputs lie."""

    @property
    def kind(self) -> Hashable:
        """Equal for members whose inputs may lie side by side."""
        return tuple(map(_kind, self.inputs, self.paths))


def _rows(group: Sequence[Node], inputs: Inputs) -> list[_Row]:
    rows: list[_Row] = []
    for node in group:
        found = tuple(inputs(node))
        paths = tuple(map(path_of, found))
        rows.append(_Row(node, found, paths, tuple([at for path in paths for at in path.starts])))
    return rows


def _kind(node: Node, path: Path) -> Hashable:
    if not _is_own(path):
        return (path.root, path.views)
    tensor = tensor_of(node)
    return ("parameter", path.views, freeze(tensor.shape) if tensor is not None else None)


def _is_own(path: Path) -> bool:
    """Whether it leads to a whole parameter: these may be stacked at the cost of a small copy."""
    return is_parameter(path.root) and not path.starts


def arrange(group: Sequence[Node], inputs: Inputs, busy: Collection[int] = ()) -> list[list[Node]]:
    """Cut `group` into runs that `merge` can merge, and single members that it cannot.

    `busy`: dimensions of the first input, counted from the end, that the operation works along.
    """
    buckets: dict[Hashable, list[_Row]] = {}
    result: list[list[_Row]] = []
    for row in _rows(group, inputs):
        if all(user.op == "output" for user in row.node.users):
            result.append([row])  # it would have to be copied out again
        else:
            buckets.setdefault(row.kind, []).append(row)
    for rows in buckets.values():
        result += _fewest_runs(rows, busy)
    return [[row.node for row in run] for run in result]


def _fewest_runs(rows: Sequence[_Row], busy: Collection[int]) -> list[list[_Row]]:
    """The best way to cut rows of one kind. Where inputs have several pieces on their way, members
    may lie side by side in one or in another: each order is tried that runs along one of them."""
    best: list[list[_Row]] = []
    for last in reversed(range(max(1, len(rows[0].starts)))):
        runs = _runs(_sorted_along(rows, last), busy)
        if not best or len(runs) < len(best):
            best = runs
    return best


def _sorted_along(rows: Sequence[_Row], last: int) -> list[_Row]:
    """By the places of all pieces, number `last` counting least."""
    return sorted(rows, key=lambda r: (r.starts[:last], r.starts[last + 1 :], r.starts[last:]))


def _runs(rows: Sequence[_Row], busy: Collection[int]) -> list[list[_Row]]:
    """Regions first; of what is on none, stacks."""
    regions = _cut(rows, lambda one, other: _region(one, other, busy))
    single = [run[0] for run in regions if len(run) == 1]
    stacks = [part for run in _cut(single, _moves) for part in _stackable(run)]
    return [run for run in regions if len(run) > 1] + stacks


def _cut(
    rows: Sequence[_Row], relation: Callable[[_Row, _Row], Hashable | None]
) -> list[list[_Row]]:
    """Runs of rows that all stand in one relation to the row before."""
    runs: list[list[_Row]] = []
    last: Hashable | None = None
    for row in rows:
        found = relation(runs[-1][-1], row) if runs else None
        if found is not None and (found == last or len(runs[-1]) == 1):
            runs[-1].append(row)
        else:
            runs.append([row])
        last = found
    return runs


def _region(one: _Row, other: _Row, busy: Collection[int]) -> tuple[int, tuple[int, ...]] | None:
    """Of which inputs `other` takes the next piece, and along which dimension; None if it does not,
    or if the inputs that stay would not broadcast to both pieces together."""
    found: set[tuple[int, int, int]] = set()
    moved: list[int] = []
    for i, (before, after) in enumerate(zip(one.paths, other.paths, strict=True)):
        if before == after:
            continue
        if not _follows(before, after):
            return None
        at = after.steps[-1].dim - rank_of(other.inputs[i])
        found.add((at, before.steps[-1].size, after.steps[-1].size))
        moved.append(i)
    if len(found) != 1:
        return None
    at = found.pop()[0]
    still = (node for i, node in enumerate(other.inputs) if i not in moved)
    if at in busy or not all(_broadcasts(node, at) for node in still):
        return None
    return (at, tuple(moved))


def _follows(before: Path, after: Path) -> bool:
    if len(before.steps) != len(after.steps) or not after.steps or before.root is not after.root:
        return False
    one, other = before.steps[-1], after.steps[-1]
    return (
        before.steps[:-1] == after.steps[:-1]
        and (one.name, one.dim) == (other.name, other.dim) == ("narrow", other.dim)
        and one.start + one.size == other.start
    )


def _broadcasts(node: Node, at: int) -> bool:
    """Whether `node` says the same for every index of dimension `at`, counted from the end."""
    tensor = tensor_of(node)
    assert tensor is not None
    return tensor.dim() < -at or static_size(tensor, at) == 1


def _moves(one: _Row, other: _Row) -> Hashable | None:
    """How each input moves on, for members to be stacked; None if they cannot be, or are equal."""
    moves: list[Hashable] = []
    differ = False
    for before, after in zip(one.paths, other.paths, strict=True):
        if _is_own(before):
            moves.append(before.root is after.root)
            differ |= before.root is not after.root
            continue
        move = move_between(before, after)
        if move is None or 0 < move.by < after.steps[move.at].size or move.by < 0:
            return None
        differ |= move.by > 0
        moves.append(move)
    return tuple(moves) if differ else None


def _stackable(run: Sequence[_Row]) -> list[list[_Row]]:
    """Parts of a run of equal moves whose inputs are views on every track, and that stack no
    parameter twice."""
    parts: list[list[_Row]] = []
    rest = list(run)
    while rest:
        size = min(map(_num_distinct, _paths(rest))) if len(rest) > 1 else 1
        while size > 1 and not all(_is_view(column[:size]) for column in _paths(rest)):
            size -= 1
        parts.append(rest[:size])
        rest = rest[size:]
    return parts


def _paths(rows: Sequence[_Row]) -> list[tuple[Path, ...]]:
    """For each input its paths in all members."""
    return list(zip(*(row.paths for row in rows), strict=True))


def _num_distinct(column: Sequence[Path]) -> int:
    """How many lead to different parameters, from the first on; all where that does not matter."""
    if not _is_own(column[0]) or column[0].root is column[1].root:
        return len(column)
    seen: set[Node] = set()
    for path in column:
        if path.root in seen:
            break
        seen.add(path.root)
    return len(seen)


def _is_view(column: Sequence[Path]) -> bool:
    move = move_between(column[0], column[1])
    return not move or not move.by or Track(column[0], move, len(column)).is_view


def merge(
    edit: Editor, group: Sequence[Node], inputs: Inputs, busy: Collection[int] = (), behind: int = 0
) -> Merged:
    """The inputs of a run that `arrange` has found, together.

    `behind`: how many trailing dimensions of the first input must stay behind the members.
    """
    rows = _rows(group, inputs)
    relations = {_region(one, other, busy) for one, other in pairwise(rows)}
    if len(relations) == 1 and (relation := relations.pop()) is not None:
        return _merge_region(edit, rows, *relation)
    return _merge_stack(edit, rows, behind)


def _merge_region(edit: Editor, rows: Sequence[_Row], at: int, moved: Sequence[int]) -> Merged:
    merged = list(rows[0].inputs)
    for i in moved:
        nodes = [row.inputs[i] for row in rows]
        region = region_of(nodes, rank_of(nodes[0]) + at)
        assert region is not None
        merged[i] = take(edit, region)
    sizes = tuple(row.paths[moved[0]].steps[-1].size for row in rows)
    return Merged(tuple(merged), at, len(rows), sizes)


def _merge_stack(edit: Editor, rows: Sequence[_Row], behind: int) -> Merged:
    columns = _paths(rows)
    inputs = rows[0].inputs
    stacks = [_stack(edit, rows, i) for i in range(len(inputs))]
    right = max(map(rank_of, inputs))
    for column, stack, node in zip(columns, stacks, inputs, strict=True):
        if stack is not None and not _is_own(column[0]):
            natural = rank_of(node) - stack.dim
            right = natural if natural >= behind else rank_of(node)
            break
    merged = (_in_line(edit, n, s, right) for n, s in zip(inputs, stacks, strict=True))
    return Merged(tuple(merged), -1 - right, len(rows))


def _stack(edit: Editor, rows: Sequence[_Row], i: int) -> Stacked | None:
    """Input number `i` of all members; None if it is one value for all."""
    if all(row.paths[i] == rows[0].paths[i] for row in rows):
        return None
    return plan_stack([row.inputs[i] for row in rows]).build(edit)


def _in_line(edit: Editor, member: Node, stack: Stacked | None, right: int) -> Node:
    """The stack with `right` dimensions behind that of the members; a value that all share such
    that it broadcasts with it."""
    rank = rank_of(member)
    if stack is None:
        return member if rank <= right else edit.call("unsqueeze", member, rank - right)
    node = stack.at(edit, max(0, rank - right))
    for _ in range(right - rank):
        node = edit.call("unsqueeze", node, 1)
    return node


def call_again(edit: Editor, node: Node, **changed: Any) -> Node:
    """The operation of `node` with some of its arguments changed."""
    op, values = op_of(node), arguments(node)
    assert op is not None and values is not None
    args, kwargs = op.build(values | changed)
    return edit.call(op.name, *args, **kwargs)


def input_of(node: Node) -> Node:
    """The input of an operation that has one."""
    found = (arguments(node) or {})["input"]
    assert isinstance(found, Node)
    return found


def has_plain_parameters(linear: Node) -> bool:
    """Whether a linear's weight is a matrix of static height and its bias, if any, a vector of that
    size."""
    values = arguments(linear) or {}
    weight, bias = tensor_of(values["weight"]), tensor_of(values["bias"])
    if weight is None or weight.dim() != 2 or static_size(weight, 0) is None:
        return False
    return bias is None or (bias.dim() == 1 and static_size(bias, 0) == static_size(weight, 0))


def row_sizes(x: torch.Tensor) -> list[int] | None:
    """Sizes in front of the last dimension, a dynamic one as -1, as `unflatten` takes them; None if
    it could not tell them apart."""
    sizes = [size if isinstance(size, int) else -1 for size in x.shape[:-1]]
    dynamic = sizes.count(-1)
    return None if dynamic > 1 or (dynamic and 0 in sizes) else sizes
