"""Strides and sharing of memory: what a caller or a consumer could notice is restored.

A rewrite may lay a value out differently, or make it a view of a larger one. Most operations do not
care. `settle` recomputes the fake values downstream and restores the layout in front of what does
care; `OutputContract` restores it for what the graph returns: eager's strides, and memory of its
own wherever eager gave that.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from optimus.affine import HALF
from optimus.axes import spell
from optimus.dropouts import kept_by_dropout
from optimus.editor import Editor, Refused
from optimus.facts import changed
from optimus.legality import Legality, storages_of, tensor_of, value_of
from optimus.ops import arguments, name_of, op_of, target_name
from optimus.values import (
    Unknown,
    is_fresh,
    is_positive,
    requires_grad,
    same_size,
    same_strides,
    same_type,
)


def settle(editor: Editor) -> None:
    """Carry changes of layout and memory downstream through the whole graph.

    Raises Refused when a value's layout can be neither kept nor restored.
    """
    if not editor.changed:
        return
    copies: _Copies = {}
    for node in list(editor.graph.nodes):
        moved = editor.changed.get(node)
        if moved and node.op != "output":
            _settle_node(editor, node, moved, copies)
            changed()
    editor.changed.clear()
    editor.legality.refresh_memory()


_Copies = dict[tuple[Node, bool], Node]
"""Restored inputs, by what they are copies of and the grad mode they were made under."""
_Moved = Sequence[tuple[Node, Any]]
"""Inputs of a node that were put in place of another, each with the value that stood there."""


def _settle_node(editor: Editor, node: Node, moved: _Moved, copies: _Copies) -> None:
    old_value = value_of(node)
    if _takes_part(node):
        node.meta["example_value"] = editor.evaluate(node)
        editor.note_change(node, node, old_value)
        return
    minds_order = _minds_order(node) and not all(map(_same_order, moved))
    if _minds_layout(node) or minds_order or _is_less_exact(node, moved):
        _restore_inputs(editor, node, moved, copies)
        return
    if not any(_reaches(old_value, source, before) for source, before in moved):
        return
    was_fresh = not storages_of(old_value) & storages_of(_inputs_before(node, moved))
    try:
        new_value = editor.evaluate(node)
    except Unknown:  # a view that the new strides do not allow
        new_value = None
    new_value = _as_traced(editor, node, new_value)
    if not same_type(old_value, new_value):  # sizes that depend on data are new ones each time
        _restore_inputs(editor, node, moved, copies)
        return
    node.meta["example_value"] = new_value
    if was_fresh and is_fresh(node) and same_strides(old_value, new_value):
        node.meta["example_value"] = old_value
    elif was_fresh and editor.legality.is_fixed(old_value):
        _own_memory(editor, node, old_value)
    else:
        editor.note_change(node, node, old_value)


def _as_traced(editor: Editor, node: Node, new: Any) -> Any:
    """`new`, requiring a gradient if `node` did when it was traced. Fake values of what is written
    to, and what is made of them anew, tell what it came to require later on."""
    old = value_of(node)
    if not (isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)):
        return new
    values = [old, *map(value_of, node.all_input_nodes)]
    if old.requires_grad == new.requires_grad or not editor.legality.writers(values):
        return new
    return new.detach().requires_grad_(old.requires_grad)


def _inputs_before(node: Node, moved: _Moved) -> list[Any]:
    """What a node's inputs were, those also that are what they were: a call may write to them."""
    return [before for _, before in moved] + [value_of(n) for n in node.all_input_nodes]


def _takes_part(node: Node) -> bool:
    """Whether `node` takes an item of several values that one call returned."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and isinstance(value_of(source), tuple | list)


def _reaches(value: Any, source: Node, before: Any) -> bool:
    """Whether a change of `source` can change `value`: it was a view of it, or strides differ."""
    return bool(storages_of(value) & storages_of(before)) or not same_strides(
        before, value_of(source)
    )


def _minds_layout(node: Node) -> bool:
    """Whether the node may see strides: anything but PyTorch's own functional operations, and a
    dropout that may drop nothing, whose result is the input as it is laid out."""
    if op_of(node) is not None:
        return kept_by_dropout(node) is not None
    if node.op == "call_method":
        return node.target in _LAYOUT_METHODS
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace not in _NAMESPACES or target._schema.name in _LAYOUT_ATEN
    return getattr(target, "__module__", None) not in (*_TORCH_HOMES, None) or (
        getattr(target, "__name__", "") in _LAYOUT_METHODS
    )


def _minds_order(node: Node) -> bool:
    """Whether the result is laid out by the order in memory of the inputs' dimensions, and its fake
    value does not say so."""
    if node.target is not operator.getitem:
        return target_name(node.target) in _ORDER_READERS
    indices: list[Node] = []
    torch.fx.map_arg(node.args[1], indices.append)
    return any(tensor_of(index) is not None for index in indices)


def _is_less_exact(node: Node, moved: _Moved) -> bool:
    """Whether it is a BatchNorm in training, of a half type on a CPU, whose rows were together: on
    rows that lie apart PyTorch's is several times less exact there."""
    values = arguments(node) if name_of(node) == "batch_norm" else None
    value = tensor_of(values["input"]) if values is not None else None
    if values is None or value is None or values["training"] is not True:
        return False
    if value.device.type != "cpu" or value.dtype not in HALF:
        return False
    befores = [before for _, before in moved]
    return all(isinstance(b, torch.Tensor) and _can_be_restored(b) for b in befores)


def _same_order(moved: tuple[Node, Any]) -> bool:
    node, before = moved
    now = value_of(node)
    both_tensors = isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)
    return not both_tensors or _order(before) == _order(now)


_ORDER_READERS = {"batch_norm", "index", "index.Tensor"}
_LAYOUT_METHODS = {
    "as_strided",
    "stride",
    "is_contiguous",
    "storage_offset",
    "data_ptr",
    "untyped_storage",
    "view_as",
}
_STORAGE_READERS = ("as_strided", "as_strided_", "as_strided.default", "as_strided_.default")
_NAMESPACES = ("aten", "prims", "kernels")
"""Of operators that do not mind; our own kernels take tensors however they are laid out."""
_LAYOUT_ATEN = {"aten::as_strided", "aten::as_strided_"}
_TORCH_HOMES = ("torch", "torch._C._nn", "torch.functional", "torch.nn.functional", "_operator")


def _restore_inputs(editor: Editor, node: Node, moved: _Moved, copies: _Copies) -> None:
    """Have `node` read copies laid out as its inputs were; readers of one input share its copy."""
    old_value = value_of(node)
    for source, before in moved:
        if not isinstance(before, torch.Tensor) or _same_layout(before, value_of(source), node):
            continue
        key = (source, editor.legality.context(node).grad)
        if key not in copies or not same_strides(before, value_of(copies[key])):
            with editor.graph.inserting_before(node):
                copies[key] = restride(editor, source, before, place=node)
        node.replace_input_with(source, copies[key])
    if storages_of(old_value) & storages_of([before for _, before in moved]):
        try:
            node.meta["example_value"] = editor.evaluate(node)
        except Unknown as reason:
            raise Refused(str(reason)) from reason
        editor.note_change(node, node, old_value)


def _same_layout(before: torch.Tensor, now: Any, reader: Node) -> bool:
    """Whether `reader` sees no difference; only as_strided looks beyond a tensor's own elements."""
    if getattr(reader.target, "__name__", reader.target) in _STORAGE_READERS:
        return same_strides(before, now) and same_size(
            before.storage_offset(), now.storage_offset()
        )
    return same_strides(before, now)


def _own_memory(editor: Editor, node: Node, old_value: torch.Tensor) -> None:
    """`node` has become a view, but somebody writes to its memory: give it its own again."""
    users = list(node.users)
    with editor.graph.inserting_before(node.next):
        copy = restride(editor, node, old_value, place=node)
    copy.meta["example_value"] = old_value
    for user in users:
        user.replace_input_with(node, copy)


def restride(editor: Editor, node: Node, like: torch.Tensor, place: Node) -> Node:
    """A copy of `node` in fresh memory with the strides of `like`, at the insertion point.

    Raises Refused unless `like` is a dense permutation of its dimensions, some expanded.
    """
    core, core_like = node, like
    for dim in _expanded(like):
        core = editor.make("narrow", (core, dim, 0, 1), {}, node, place)
        core_like = core_like.narrow(dim, 0, 1)
    order = _dense_order(core_like)
    if order is None:
        raise Refused("a layout with gaps or overlaps cannot be restored")
    if order == list(range(like.dim())):
        copy = _clone(editor, core, place)
    else:
        inverse = tuple(order.index(dim) for dim in range(like.dim()))
        name, arguments = spell(tuple(order))
        copy = _clone(editor, editor.make(name, (core, *arguments), {}, node, place), place)
        name, arguments = spell(inverse)
        copy = editor.make(name, (copy, *arguments), {}, node, place)
    if core is node:
        return copy
    return editor.make(torch.Tensor.expand_as, (copy, node), {}, node, place)


def _clone(editor: Editor, node: Node, place: Node) -> Node:
    options = {"memory_format": torch.contiguous_format}
    return editor.make(torch.clone, (node,), options, node, place)


def _expanded(tensor: torch.Tensor) -> list[int]:
    """Dimensions whose indices all stand for the same elements."""
    if any(same_size(size, 0) for size in tensor.shape):
        return []
    return [
        dim
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if same_size(stride, 0) and not same_size(size, 1)
    ]


def _can_be_restored(tensor: torch.Tensor) -> bool:
    for dim in _expanded(tensor):
        if not is_positive(tensor.shape[dim]):  # a number of the caller's, not a tensor's size
            return False
        tensor = tensor.narrow(dim, 0, 1)
    return _dense_order(tensor) is not None


def _dense_order(tensor: torch.Tensor) -> list[int] | None:
    """Dimensions from outermost to innermost in memory; None if they do not tile it."""
    order = _order(tensor)
    return order if tensor.permute(order).is_contiguous() else None


def _order(tensor: torch.Tensor) -> list[int]:
    """Dimensions by the distance between neighbours in memory, the farthest first."""
    hints = [_hint(stride) for stride in tensor.stride()]
    return sorted(range(tensor.dim()), key=lambda dim: (-hints[dim], dim))


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 0)


@dataclass(frozen=True)
class _Promise:
    value: Any
    partners: frozenset[int]
    fresh: bool


class OutputContract:
    """What the graph's outputs were before any rewrite, to be kept after all of them.

    A node that is returned several times counts once, at its first position.
    """

    def __init__(self, graph: Graph) -> None:
        nodes = _returned(graph)
        first = {node: position for position, node in reversed(list(enumerate(nodes)))}
        self._first = [first[node] for node in nodes]
        self._promises = {
            position: _Promise(value_of(nodes[position]), partners, is_fresh(nodes[position]))
            for position, partners in self._partners(graph).items()
        }
        self._restored: set[Node] = set()

    def pinned(self, graph: Graph, legality: Legality) -> frozenset[int]:
        """Storages that can be neither copied nor become part of a larger one: several outputs
        share them, or an output and an input, or a layout in them could not be restored, or what
        no_grad has made of them would be of another type, or a dropout gives them to a writer."""
        nodes, partners = _returned(graph), self._partners(graph)
        shared = [value_of(nodes[position]) for position in partners if partners[position]]
        minded = [n for node in graph.nodes if _minds_layout(node) for n in node.all_input_nodes]
        seen = (tensor_of(node) for node in (*nodes, *minded))
        strided = [v for v in seen if v is not None and v.layout is torch.strided]
        lost = [v for v in strided if not _can_be_restored(v)]
        written = _written_behind_dropouts(graph, legality)
        return storages_of([*shared, *lost, *written, *_left_by_no_grad(graph, legality)])

    def enforce(self, editor: Editor) -> None:
        """Restore strides and memory of the outputs where a rewrite has changed them; what is as it
        was, by an earlier call also, stays.

        Raises Refused when an output cannot be what it was.
        """
        graph, restored = editor.graph, dict[int, Node]()
        nodes, partners = _returned(graph), self._partners(graph)
        # First memory of its own where that was promised: a view that shares it needs none then.
        for position, promise in sorted(self._promises.items(), key=lambda item: not item[1].fresh):
            node, now = nodes[position], partners[position] - restored.keys()
            if not same_type(promise.value, value_of(node)):
                raise Refused(f"output {position} would change its type")
            fresh = is_fresh(node) or node in self._restored  # a view of a copy that was made here
            same = same_strides(promise.value, value_of(node)) and promise.fresh <= fresh
            if not promise.partners and (now or not same):
                with graph.inserting_before(node.next):
                    restored[position] = restride(editor, node, promise.value, place=node)
                    self._restored.add(restored[position])
        for position, promise in self._promises.items():
            if promise.partners and (
                partners[position] - restored.keys() != promise.partners
                or not same_strides(promise.value, value_of(nodes[position]))
            ):
                raise Refused(f"output {position} is a view whose memory or layout changed")
        _set_outputs(graph.output_node(), [restored.get(position) for position in self._first])

    def _partners(self, graph: Graph) -> dict[int, frozenset[int]]:
        """By first position, whose memory an output shares: of inputs (-1 - i), outputs (i)."""
        inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        named = {-1 - i: node for i, node in enumerate(inputs)}
        nodes = _returned(graph)
        returned = {position: nodes[position] for position in dict.fromkeys(self._first)}
        owners: dict[int, set[int]] = {}
        for name, node in (named | returned).items():
            for storage in storages_of(value_of(node)):
                owners.setdefault(storage, set()).add(name)
        return {
            name: frozenset[int]().union(*(owners[s] for s in storages_of(value_of(node)))) - {name}
            for name, node in returned.items()
        }


def _written_behind_dropouts(graph: Graph, legality: Legality) -> list[Any]:
    """Inputs that a dropout may give back as they are, to be written to."""
    found: list[Node] = []
    for node in [n for n in graph.nodes if legality.writers(value_of(n))]:
        while (kept := kept_by_dropout(node)) is not None:
            node = kept  # noqa: PLW2901
            found.append(node)
    return [value_of(node) for node in found]


def _left_by_no_grad(graph: Graph, legality: Legality) -> list[Any]:
    """What no_grad takes from memory of something else, read where it ends. It requires a gradient
    if its source does; of another layout it might have to be a copy, which would require none."""
    return [
        value_of(node)
        for node in graph.nodes
        if not legality.context(node).grad
        and requires_grad(value_of(node))
        and not is_fresh(node)
        and any(user.op == "output" or legality.context(user).grad for user in node.users)
    ]


def _returned(graph: Graph) -> list[Node]:
    nodes: list[Node] = []
    torch.fx.map_arg(graph.output_node().args, nodes.append)
    return nodes


def _set_outputs(end: Node, restored: Sequence[Node | None]) -> None:
    position = -1

    def pick(node: Node) -> Node:
        nonlocal position
        position += 1
        return restored[position] or node

    end.args = torch.fx.map_arg(end.args, pick)
