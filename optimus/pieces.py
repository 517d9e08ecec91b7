"""Tensors that are parts of one tensor, and putting parts together without copying.

`piece_of` reads what a node is a part of through any chain of splits, chunks, narrows, slices,
unbinds and selects. `stack` and `concat` build what their names say from the shortest description:
parts that lie side by side in their order are that region of the source, whatever produced them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.values import static_size


@dataclass(frozen=True)
class Piece:
    """`source[start : start + size]` along `dim`; with `dropped`, size is 1 and `dim` is gone."""

    source: Node
    dim: int
    start: int
    size: int
    dropped: bool = False

    @property
    def stop(self) -> int:
        """One past its last index."""
        return self.start + self.size


def piece_of(node: Node) -> Piece | None:
    """The outermost tensor that `node` is one range of along one dimension; None if it is none."""
    piece = _step(node)
    while piece is not None:
        outer = _step(piece.source)
        if outer is None or outer.dropped or outer.dim != piece.dim:
            break
        piece = replace(piece, source=outer.source, start=outer.start + piece.start)
    return piece


def _step(node: Node) -> Piece | None:
    """As `piece_of`, but only one operation deep."""
    op = op_of(node)
    if op is None:
        return None
    if op.name == "getitem":
        source = node.args[0]
        if isinstance(source, Node) and isinstance(source.meta.get("example_value"), tuple | list):
            return _item(source, node.args[1])
        return _index(node)
    if op.name in ("narrow", "select"):
        return _range(node, op.name)
    return None


def _item(parts: Node, index: Any) -> Piece | None:
    """An item of split, chunk, tensor_split or unbind: sizes are read off the values."""
    op, values = op_of(parts), arguments(parts)
    if op is None or values is None or op.name not in _PARTING:
        return None
    source = values.get("tensor", values.get("input"))
    sizes = part_sizes(parts)
    tensor = tensor_of(source)
    if not isinstance(source, Node) or tensor is None or sizes is None or type(index) is not int:
        return None
    index %= len(sizes)
    dim = values["dim"] % tensor.dim()
    return Piece(source, dim, sum(sizes[:index]), sizes[index], op.name == "unbind")


_PARTING = ("split", "chunk", "tensor_split", "unbind")


def part_sizes(parts: Node) -> list[int] | None:
    """Sizes along the parted dimension of a split's (chunk's, unbind's) items; None if dynamic."""
    op, values = op_of(parts), arguments(parts)
    items: Any = parts.meta.get("example_value")
    if op is None or values is None or not isinstance(items, tuple | list) or not items:
        return None
    if op.name == "unbind":
        return [1] * len(items)
    dim = values["dim"] % items[0].dim()
    sizes = [static_size(item, dim) for item in items]
    return None if any(size is None for size in sizes) else [s for s in sizes if s is not None]


def _range(node: Node, name: str) -> Piece | None:
    values = arguments(node)
    tensor = tensor_of(values["input"]) if values is not None else None
    if values is None or tensor is None:
        return None
    dim, start = values["dim"], values.get("start", values.get("index"))
    if not isinstance(dim, int) or not isinstance(start, int):
        return None
    extent = static_size(tensor, dim)
    size = 1 if name == "select" else values["length"]
    if extent is None or not isinstance(size, int):
        return None
    dim %= tensor.dim()
    return Piece(
        values["input"], dim, start % extent if start < 0 else start, size, name == "select"
    )


def _index(node: Node) -> Piece | None:
    """`x[:, a:b]`, `x[..., i]`: an index that restricts one dimension to a range."""
    source, index = node.args
    tensor = tensor_of(source)
    if tensor is None or not isinstance(source, Node):
        return None
    picked = [
        (dim, part)
        for dim, part in enumerate(full_index(index, tensor.dim()) or ())
        if part != _ALL
    ]
    if len(picked) != 1:
        return None
    dim, part = picked[0]
    extent = static_size(tensor, dim)
    if extent is None:
        return None
    if isinstance(part, slice):
        bounds = slice_bounds(part, extent)
        return None if bounds is None else Piece(source, dim, bounds[0], bounds[1] - bounds[0])
    return Piece(source, dim, part % extent, 1, dropped=True)


_ALL = slice(None)


def full_index(index: Any, num_dims: int) -> list[Any] | None:
    """A basic index with one slice or int for every dimension; None for any other index."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not _is_basic(part) for part in parts):
        return None
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [_ALL] * (num_dims - len(parts) + 1)
    return parts + [_ALL] * (num_dims - len(parts))


def _is_basic(part: Any) -> bool:
    if isinstance(part, slice):
        return all(b is None or type(b) is int for b in (part.start, part.stop, part.step))
    return part is Ellipsis or type(part) is int


def slice_bounds(part: slice, extent: int) -> tuple[int, int] | None:
    """Start and stop of a slice of step 1 within `extent`; None for another step."""
    start, stop, step = part.indices(extent)
    return (start, max(start, stop)) if step == 1 else None


@dataclass(frozen=True)
class Run:
    """Pieces of equal size that lie side by side, in order: `count` from `start` on."""

    source: Node
    dim: int
    start: int
    size: int
    count: int
    dropped: bool

    @property
    def length(self) -> int:
        """Extent of the whole run along `dim`."""
        return self.size * self.count


def run_of(nodes: Sequence[Node]) -> Run | None:
    """The region that `nodes`, in this order, tile with equal sizes; None if they do not."""
    pieces = [piece_of(node) for node in nodes]
    first = pieces[0] if pieces else None
    if first is None or not first.size:
        return None
    for before, after in pairwise(pieces):
        if before is None or after is None or not _follows(before, after):
            return None
    return Run(first.source, first.dim, first.start, first.size, len(nodes), first.dropped)


def _follows(before: Piece, after: Piece) -> bool:
    return replace(before, start=before.stop) == after


def region_of(nodes: Sequence[Node], dim: int) -> Piece | None:
    """The range along `dim` that `nodes`, in this order, tile with any sizes; None if not."""
    pieces = [piece_of(node) for node in nodes]
    first, last = pieces[0], pieces[-1]
    if first is None or last is None or first.dim != dim or first.dropped:
        return None
    for before, after in pairwise(pieces):
        if before is None or after is None or after.start != before.stop:
            return None
        if (after.source, after.dim, after.dropped) != (first.source, dim, False):
            return None
    return replace(first, size=last.stop - first.start)


def take(edit: Editor, piece: Piece) -> Node:
    """The node for `piece` (its dimension kept): the source itself when it covers all of it."""
    tensor = tensor_of(piece.source)
    assert tensor is not None
    if piece.start == 0 and static_size(tensor, piece.dim) == piece.size:
        return piece.source
    return edit.call("narrow", piece.source, piece.dim, piece.start, piece.size)


def stack(edit: Editor, nodes: Sequence[Node]) -> Node:
    """`torch.stack(nodes)`, on a new first dimension; a view where they are a run of one source."""
    if len(set(nodes)) == 1 and len(nodes) > 1:
        tensor = tensor_of(nodes[0])
        assert tensor is not None
        row = edit.call("unsqueeze", nodes[0], 0)
        return edit.call("expand", row, (len(nodes), *[-1] * tensor.dim()))
    run = run_of(nodes)
    if run is None:
        return edit.call("stack", list(nodes))
    whole = take(edit, Piece(run.source, run.dim, run.start, run.length))
    if not run.dropped:
        whole = edit.call("unflatten", whole, run.dim, (run.count, run.size))
    return whole if run.dim == 0 else edit.call("movedim", whole, run.dim, 0)


def unstack(edit: Editor, stacked: Node, count: int) -> list[Node]:
    """The `count` items of a tensor along its first dimension."""
    parts = edit.call("unbind", stacked)
    return [edit.call(operator.getitem, parts, i) for i in range(count)]


def concat(edit: Editor, nodes: Sequence[Node], dim: int) -> Node:
    """`torch.cat(nodes, dim)`, `dim` not negative; a view of their source where they tile one."""
    region = region_of(nodes, dim)
    if region is not None:
        return take(edit, region)
    if len(nodes) == 1:
        return nodes[0]
    return edit.call("cat", list(nodes), dim)


def split(edit: Editor, node: Node, sizes: Sequence[int], dim: int) -> list[Node]:
    """The parts of `node` of these sizes along `dim`."""
    parts = edit.call("split", node, list(sizes), dim)
    return [edit.call(operator.getitem, parts, i) for i in range(len(sizes))]


def is_piece_source(node: Node) -> bool:
    """Whether some user takes pieces of `node`."""
    return any(piece_of(user) is not None for user in node.users) or any(
        (op := op_of(user)) is not None and op.name in _PARTING for user in node.users
    )


def sizes_of(nodes: Sequence[Node], dim: int) -> list[int] | None:
    """Static sizes of all nodes along `dim`; None if one is dynamic or no tensor."""
    tensors = [tensor_of(node) for node in nodes]
    sizes = [static_size(t, dim) if isinstance(t, torch.Tensor) else None for t in tensors]
    return None if any(s is None for s in sizes) else [s for s in sizes if s is not None]
