"""Putting equal tensors side by side on one new dimension, by views as far as that goes.

`path_of` reads how a node is got from the tensor it is a view of: pieces, transposes, reshapes.
Members whose paths differ in the place of one piece only, which moves on by the same distance from
each to the next, are on a `Track`: that region of the source, seen through the same views, is their
stack. `plan_stack` joins several tracks, and copies what is on none.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from optimus.editor import Editor, is_view
from optimus.facts import until_change
from optimus.grouping import freeze
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.pieces import Piece, piece_of, take
from optimus.values import static_size


@dataclass(frozen=True)
class Step:
    """One view on a path. A piece has a `size` and its place, `start`; `dim` is its dimension.

    `name` and `args` call the same view when a dimension in front has been added; `key` stands for
    `args` in comparisons. `node` is the value after the step, `source` the one before it.
    """

    name: str
    args: tuple[Any, ...] = field(compare=False)
    node: Node = field(compare=False)
    source: Node = field(compare=False)
    key: Hashable = None
    dim: int = 0
    start: int = 0
    size: int = 0

    @property
    def dropped(self) -> bool:
        """Whether the step removes the dimension it takes a piece of."""
        return self.name == "select"


class Path(NamedTuple):
    """How a value is got from `root` by views. Nodes with equal paths have equal values."""

    root: Node
    steps: tuple[Step, ...] = ()

    @property
    def views(self) -> Hashable:
        """The steps without the places of pieces."""
        return tuple([(step.name, step.key, step.dim) for step in self.steps])

    @property
    def starts(self) -> tuple[int, ...]:
        """The places of pieces."""
        return tuple([step.start for step in self.steps if step.size])


@until_change
def path_of(node: Node) -> Path:
    """The path of `node`, as far back as known views go."""
    steps: list[Step] = []
    while (step := _piece(node) or _view(node)) is not None:
        steps.append(step)
        node = step.source
    return Path(node, tuple(reversed(steps)))


def _piece(node: Node) -> Step | None:
    piece = piece_of(node)
    if piece is None or not piece.size:
        return None
    if piece.dropped:
        args: tuple[Any, ...] = (piece.dim + 1, piece.start)
        return Step("select", args, node, piece.source, None, piece.dim, piece.start, 1)
    args = (piece.dim + 1, piece.start, piece.size)
    return Step("narrow", args, node, piece.source, None, piece.dim, piece.start, piece.size)


def _view(node: Node) -> Step | None:
    op = op_of(node)
    if op is None or op.name not in _WITH_DIMENSION or not is_view(node):
        return None
    values = arguments(node)
    if values is None:
        return None
    source = values["input"]
    if not rank_of(source):  # a scalar has dimensions 0 and -1, which count none
        return None
    try:
        call = _WITH_DIMENSION[op.name](values, rank_of(source))
        return Step(call[0], call[1:], node, source, freeze(call[1:])) if call else None
    except TypeError:  # a dimension that is computed in the graph
        return None


_Values = dict[str, Any]


def _transpose(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return ("transpose", values["dim0"] % rank + 1, values["dim1"] % rank + 1)


def _t(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return ("transpose", 1, 2) if rank == 2 else None


def _permute(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return ("permute", (0, *(dim % rank + 1 for dim in values["dims"])))


def _movedim(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return ("movedim", *(_behind(values[name], rank) for name in ("source", "destination")))


def _squeeze(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return None if values["dim"] is None else ("squeeze", _behind(values["dim"], rank))


def _unsqueeze(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return ("unsqueeze", values["dim"] % (rank + 1) + 1)


def _flatten(values: _Values, rank: int) -> tuple[Any, ...] | None:
    if not rank:
        return None
    return ("flatten", values["start_dim"] % rank + 1, values["end_dim"] % rank + 1)


def _unflatten(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return ("unflatten", values["dim"] % rank + 1, tuple(values["sizes"]))


def _reshape(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return ("reshape", tuple(values["shape"]))


def _expand(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return ("expand", tuple(values["size"])) if len(values["size"]) == rank else None


def _contiguous(values: _Values, rank: int) -> tuple[Any, ...] | None:
    return ("contiguous",)


def _behind(dims: int | Sequence[int], rank: int) -> int | tuple[int, ...]:
    """Dimensions of a member, counted when there is one more in front."""
    if isinstance(dims, int):
        return dims % rank + 1
    return tuple(dim % rank + 1 for dim in dims)


_WITH_DIMENSION: dict[str, Callable[[_Values, int], tuple[Any, ...] | None]] = {
    "transpose": _transpose,
    "t": _t,
    "permute": _permute,
    "movedim": _movedim,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "reshape": _reshape,
    "expand": _expand,
    "contiguous": _contiguous,
}
"""For a view's arguments and its input's rank: name and arguments of the same view on a tensor with
one more dimension in front; None where there is none."""


def rank_of(node: Node) -> int:
    """Number of dimensions of the node's value."""
    tensor = tensor_of(node)
    assert tensor is not None
    return tensor.dim()


def is_parameter(node: Node) -> bool:
    """Whether `node` is a parameter of the module that the graph was traced from."""
    is_input = node.op in ("placeholder", "get_attr")
    return is_input and isinstance(tensor_of(node), torch.nn.Parameter)


@dataclass(frozen=True)
class Stacked:
    """A tensor whose dimension `dim` runs over the members."""

    node: Node
    dim: int

    def at(self, edit: Editor, dim: int) -> Node:
        """The tensor with its members on dimension `dim`."""
        if dim == self.dim:
            return self.node
        return edit.call("movedim", self.node, self.dim, dim)


class Move(NamedTuple):
    """From one path to the next, step number `at` takes a piece that lies `by` further on."""

    at: int
    by: int


def move_between(before: Path, after: Path) -> Move | None:
    """How `after` differs from `before`; by 0 if they are equal, None if in more than one place."""
    if before.root is not after.root or len(before.steps) != len(after.steps):
        return None
    place = by = 0
    for at, (one, other) in enumerate(zip(before.steps, after.steps, strict=True)):
        if one is other:
            continue
        if (one.name, one.key, one.dim, one.size) != (other.name, other.key, other.dim, other.size):
            return None
        if one.start != other.start:
            if by:
                return None
            place, by = at, other.start - one.start
    return Move(place, by)


@dataclass(frozen=True)
class Track:
    """`count` members from `first` on, each by `move` further than the one before."""

    first: Path
    move: Move
    count: int

    @property
    def step(self) -> Step:
        """The piece that moves."""
        return self.first.steps[self.move.at]

    @property
    def dim(self) -> int:
        """Where `build` puts the members."""
        return self.step.dim if self.move.at == len(self.first.steps) - 1 else 0

    @property
    def is_view(self) -> bool:
        """Whether the members are a region that can be told by sizes and strides."""
        if self.move.by < self.step.size:
            return False
        return (self.step.dropped and self.move.by > 1) or self._lead() is not None

    def build(self, edit: Editor) -> Stacked:
        """All members, as one view."""
        stacked = self._region(edit)
        for step in self.first.steps[self.move.at + 1 :]:
            stacked = Stacked(with_dimension(edit, step, stacked.at(edit, 0), self.count), 0)
        return stacked

    def _region(self, edit: Editor) -> Stacked:
        step, period = self.step, self.move.by
        if step.dropped and period > 1:
            picked = slice(step.start, step.start + (self.count - 1) * period + 1, period)
            index = (*[slice(None)] * step.dim, picked)
            return Stacked(edit.call(operator.getitem, step.source, index), step.dim)
        lead = self._lead() or 0
        whole = Piece(step.source, step.dim, step.start - lead, self.count * period)
        region = take(edit, whole)
        if not step.dropped:
            region = edit.call("unflatten", region, step.dim, (self.count, period))
            if step.size < period:
                region = edit.call("narrow", region, step.dim + 1, lead, step.size)
        return Stacked(region, step.dim)

    def _lead(self) -> int | None:
        """How far before the first member a region of whole periods begins; None if none fits."""
        step, period = self.step, self.move.by
        tensor = tensor_of(self.step.source)
        extent = static_size(tensor, step.dim) if tensor is not None else None
        if extent is None:
            return None
        lead = max(0, step.start + self.count * period - extent)
        return lead if lead <= min(step.start, period - step.size) else None


def with_dimension(edit: Editor, step: Step, node: Node, count: int) -> Node:
    """The view of `step` on a stack of `count` members along dimension 0."""
    if step.name in ("reshape", "expand"):
        return edit.call(step.name, node, (count, *step.args[0]))
    return node if step.name == "contiguous" else edit.call(step.name, node, *step.args)


@dataclass(frozen=True)
class StackPlan:
    """How members get side by side: `parts` are tracks, or nodes to be copied; `views` are then
    taken of the whole."""

    count: int
    parts: tuple[Track | Node, ...]
    views: tuple[Step, ...] = ()

    @property
    def copies(self) -> bool:
        """Whether activations are copied (parameters may be stored together beforehand)."""
        parameters = (isinstance(p, Node) and is_parameter(p) for p in self.parts)
        return len(self.parts) > 1 and not all(parameters)

    def build(self, edit: Editor) -> Stacked:
        """The stack."""
        first = self.parts[0]
        if isinstance(first, Track) and len(self.parts) == 1:
            return first.build(edit)
        if any(isinstance(part, Track) for part in self.parts):
            return Stacked(edit.call("cat", [_rows(edit, part) for part in self.parts]), 0)
        node = edit.call("stack", list(self.parts))
        for step in self.views:
            node = with_dimension(edit, step, node, self.count)
        return Stacked(node, 0)


def _rows(edit: Editor, part: Track | Node) -> Node:
    if isinstance(part, Track):
        return part.build(edit).at(edit, 0)
    return edit.call("unsqueeze", part, 0)


def plan_stack(nodes: Sequence[Node]) -> StackPlan:
    """How to stack `nodes`, two or more of equal shapes, in their order."""
    paths = [path_of(node) for node in nodes]
    first = paths[0]
    apart = len({path.root for path in paths}) == len(paths)
    if apart and not first.starts and all(path.views == first.views for path in paths):
        return StackPlan(len(nodes), tuple(path.root for path in paths), first.steps)
    parts: list[Track | Node] = []
    at = 0
    while at < len(nodes):
        track = _longest_track(paths, at)
        parts.append(track or nodes[at])
        at += track.count if track is not None else 1
    return StackPlan(len(nodes), tuple(parts))


def _longest_track(paths: Sequence[Path], at: int) -> Track | None:
    """The track of two or more members that begins at path number `at`."""
    move = move_between(paths[at], paths[at + 1]) if at + 1 < len(paths) else None
    if not move or not move.by or move.by < paths[at].steps[move.at].size:
        return None
    stop = at + 2
    while stop < len(paths) and move_between(paths[stop - 1], paths[stop]) == move:
        stop += 1
    tracks = (Track(paths[at], move, count) for count in range(stop - at, 1, -1))
    return next((track for track in tracks if track.is_view), None)


def in_order(nodes: Sequence[Node], *inputs: Sequence[Node]) -> list[Node]:
    """`nodes` in the order in which their inputs lie in memory. Each of `inputs` holds one input of
    every node; the first counts most."""
    ranks: list[dict[Hashable, int]] = [{} for _ in inputs]
    places: list[tuple[Any, ...]] = []
    for at in range(len(nodes)):
        paths = [path_of(column[at]) for column in inputs]
        places.append(
            tuple(
                (rank.setdefault((path.root, path.views), len(rank)), path.starts)
                for rank, path in zip(ranks, paths, strict=True)
            )
        )
    return [nodes[at] for at in sorted(range(len(nodes)), key=places.__getitem__)]
