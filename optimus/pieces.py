"""Tensors that are parts of one tensor, and putting parts together without copying.

`piece_of` reads what a node is a part of through any chain of splits, chunks, narrows, slices,
unbinds and selects; `parting_of` reads how one call cuts a tensor. `stack` and `concat` build what
their names say from the shortest description: parts that lie side by side in their order are that
region of the source, whatever produced them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch.fx import Node

from optimus.axes import moved, permute
from optimus.editor import Editor
from optimus.facts import Facts, until_change
from optimus.legality import tensor_of
from optimus.ops import arguments, op_of
from optimus.values import static_size


class Piece(NamedTuple):
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


@until_change
def piece_of(node: Node) -> Piece | None:
    """The outermost tensor that `node` is one range of along one dimension; None if it is none."""
    piece = direct_piece(node)
    while piece is not None:
        outer = direct_piece(piece.source)
        if outer is None or outer.dropped or outer.dim != piece.dim:
            break
        piece = piece._replace(source=outer.source, start=outer.start + piece.start)
    return piece


def direct_piece(node: Node) -> Piece | None:
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
    """An item of split, chunk, tensor_split or unbind."""
    parting = parting_of(parts)
    if parting is None or type(index) is not int:
        return None
    return parting.piece(index % parting.count)


@dataclass(frozen=True)
class Parting:
    """How a split (chunk, unbind ...) cuts `source` along `dim`: part i is
    `source[bounds[i] : bounds[i + 1]]`; of an unbind, `dropped`, it has no `dim`."""

    source: Node
    dim: int
    bounds: tuple[int, ...]
    dropped: bool

    @property
    def count(self) -> int:
        """The number of parts."""
        return len(self.bounds) - 1

    @property
    def sizes(self) -> list[int]:
        """Sizes of all parts along `dim`."""
        return [after - before for before, after in pairwise(self.bounds)]

    def piece(self, index: int) -> Piece:
        """Part `index`."""
        start, stop = self.bounds[index : index + 2]
        return Piece(self.source, self.dim, start, stop - start, self.dropped)


_PARTING = ("split", "chunk", "tensor_split", "unbind", "hsplit", "vsplit", "dsplit")


@until_change
def parting_of(parts: Node) -> Parting | None:
    """How the call `parts` cuts a tensor along one dimension; None if it does not, or into sizes
    that are dynamic. Sizes are read off the values."""
    op = op_of(parts)
    values = arguments(parts) if op is not None and op.name in _PARTING else None
    if op is None or values is None:
        return None
    source = values.get("tensor", values.get("input"))
    tensor = tensor_of(source)
    if not isinstance(source, Node) or tensor is None or not tensor.dim():
        return None
    dim = _parted_dim(op.name, values.get("dim"), tensor.dim())
    bounds = _bounds(parts, None if op.name == "unbind" else dim)
    return Parting(source, dim, bounds, op.name == "unbind") if bounds is not None else None


def _parted_dim(name: str, dim: int | None, rank: int) -> int:
    """hsplit cuts the second dimension, or the only one; vsplit the first; dsplit the third."""
    if dim is not None:
        return dim % rank
    return {"hsplit": min(1, rank - 1), "vsplit": 0, "dsplit": 2}[name]


# The parts of one call are looked at one by one: what they all have in common is read once.
_KNOWN_BOUNDS = Facts[tuple[int, ...]]()


def _bounds(parts: Node, dim: int | None) -> tuple[int, ...] | None:
    if parts in _KNOWN_BOUNDS.of:
        return _KNOWN_BOUNDS.of[parts]
    items: Any = parts.meta.get("example_value")
    if not isinstance(items, tuple | list) or not items:
        return None
    sizes = [1 if dim is None else static_size(item, dim) for item in items]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    bounds = _KNOWN_BOUNDS.of[parts] = (0, *accumulate(known))
    return bounds


def items_of(parts: Node) -> dict[int, list[Node]] | None:
    """The users of `parts` by the index of the part that they take; None if one takes no part."""
    count = len(parts.meta["example_value"])
    taken: dict[int, list[Node]] = {}
    for user in parts.users:
        if user.target is not operator.getitem or type(user.args[1]) is not int:
            return None
        taken.setdefault(user.args[1] % count, []).append(user)
    return taken


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
    return before._replace(start=before.stop) == after


def region_of(nodes: Sequence[Node], dim: int) -> Piece | None:
    """The range along `dim` that `nodes`, in this order, tile with any sizes; None if not."""
    regions = list(regions_of(nodes, dim))
    return regions[0][0] if len(regions) == 1 else None


def regions_of(nodes: Sequence[Node], dim: int) -> Iterator[tuple[Piece | None, Sequence[Node]]]:
    """Cut `nodes` into the longest runs that tile a range along `dim` of one tensor, each with that
    range; a node that is no such part is alone, with None."""
    start, run = 0, None
    for at, node in enumerate(nodes):
        piece = piece_of(node)
        if piece is not None and (piece.dim != dim or piece.dropped):
            piece = None
        if run is not None and piece is not None and _continues(run, piece):
            run = run._replace(size=run.size + piece.size)
            continue
        if at:
            yield (run, nodes[start:at])
        start, run = at, piece
    if nodes:
        yield (run, nodes[start:])


def _continues(run: Piece, piece: Piece) -> bool:
    return run.source is piece.source and piece.start == run.stop


def runs_of(nodes: Sequence[Node]) -> Iterator[tuple[Run | None, Sequence[Node]]]:
    """Cut `nodes` into the longest runs of pieces of equal size (see run_of), each with its region;
    a node that is no piece is alone, with None."""
    start, before = 0, None
    for at, node in enumerate(nodes):
        piece = piece_of(node)
        if piece is not None and not piece.size:
            piece = None
        if at and (before is None or piece is None or not _follows(before, piece)):
            yield (run_of(nodes[start:at]), nodes[start:at])
            start = at
        before = piece
    if nodes:
        yield (run_of(nodes[start:]), nodes[start:])


def take(edit: Editor, piece: Piece) -> Node:
    """The node for `piece` (its dimension kept): the source itself when it covers all of it."""
    tensor = tensor_of(piece.source)
    assert tensor is not None
    if piece.start == 0 and static_size(tensor, piece.dim) == piece.size:
        return piece.source
    return edit.call("narrow", piece.source, piece.dim, piece.start, piece.size)


def stack(edit: Editor, nodes: Sequence[Node], dim: int = 0) -> Node:
    """`torch.stack(nodes, dim)`; a view where they are a run of one source, or all the same."""
    if len(set(nodes)) == 1 and len(nodes) > 1:
        tensor = tensor_of(nodes[0])
        assert tensor is not None
        sizes = [-1] * tensor.dim()
        sizes.insert(dim, len(nodes))
        return edit.call("expand", edit.call("unsqueeze", nodes[0], dim), tuple(sizes))
    run = run_of(nodes)
    if run is None:
        return edit.call("stack", list(nodes), dim)
    whole = open_run(edit, run)
    tensor = tensor_of(whole)
    assert tensor is not None
    return permute(edit, whole, moved(tensor.dim(), run.dim, dim))


def open_run(edit: Editor, run: Run) -> Node:
    """The run's region with its pieces counted along `run.dim`, their own dimensions behind it."""
    whole = take(edit, Piece(run.source, run.dim, run.start, run.length))
    return whole if run.dropped else edit.call("unflatten", whole, run.dim, (run.count, run.size))


def unstack(edit: Editor, stacked: Node, count: int) -> list[Node]:
    """The `count` items of a tensor along its first dimension."""
    return edit.items(edit.call("unbind", stacked), range(count))


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
    return edit.items(edit.call("split", node, list(sizes), dim), range(len(sizes)))


def cut(
    edit: Editor, node: Node, dim: int, ranges: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], Node]:
    """Ranges of `node` along `dim` that do not overlap, none empty: by one split, what lies between
    them being parts unused; a single one by a narrow."""
    parts = sorted(set(ranges))
    if len(parts) == 1:
        start, stop = parts[0]
        return {parts[0]: take(edit, Piece(node, dim, start, stop - start))}
    tensor = tensor_of(node)
    extent = static_size(tensor, dim) if tensor is not None else None
    bounds = sorted({0, *(bound for part in parts for bound in part), extent or 0})
    parting = edit.call("split", node, [stop - start for start, stop in pairwise(bounds)], dim)
    places = {start: place for place, start in enumerate(bounds)}
    items = edit.items(parting, [places[start] for start, _ in parts])
    return dict(zip(parts, items, strict=True))


def joined_by(node: Node) -> tuple[list[Node], int] | None:
    """What a cat or a stack puts together, and along which dimension of the result (not negative);
    None if that is not a list of tensors."""
    values, out = arguments(node), tensor_of(node)
    if values is None or out is None or not isinstance(values["tensors"], list | tuple):
        return None
    return list(values["tensors"]), values["dim"] % out.dim()


def sizes_of(nodes: Sequence[Node], dim: int) -> list[int] | None:
    """Static sizes of all nodes along `dim`; None if one is dynamic or no tensor."""
    tensors = [tensor_of(node) for node in nodes]
    sizes = [static_size(t, dim) if t is not None and dim < t.dim() else None for t in tensors]
    return None if any(s is None for s in sizes) else [s for s in sizes if s is not None]
