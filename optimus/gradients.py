"""Which values receive a gradient in the backward pass.

A value may require a gradient and never get one: its only readers are detached, compared or run
under no_grad. In eager mode the parameters behind it then have no gradient at all (`grad is None`,
which an optimizer skips); merged with a value that gets one, they would have one of zeros (which
an optimizer with momentum or weight decay does not skip).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Set
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from optimus.bases import Base, bases_in, stops_gradients, written_bases
from optimus.dropouts import kept_by_dropout
from optimus.editor import Editor, Refused
from optimus.effects import effects_of
from optimus.legality import Legality, memory_of_one, storages_of, value_of
from optimus.ops import target_name
from optimus.values import requires_grad


class GradientContract:
    """Which inputs of the graph receive a gradient, to be kept by all rewrites."""

    def __init__(self, graph: Graph, legality: Legality) -> None:
        self._leaves = _leaves(graph, legality)

    def enforce(self, editor: Editor) -> None:
        """Give a gradient of zeros to what had one and is read no more.

        Raises Refused when that cannot be done, or when an input would get one that had none.
        """
        now = _leaves(editor.graph, editor.legality)
        if gained := now - self._leaves:
            raise Refused(f"{min(gained).name} would get a gradient")
        lost = sorted(self._leaves - now)
        if lost:
            _add_nothing_of(lost, editor)


def leaves_no_grad(graph: Graph) -> bool:
    """Whether a view of an input is returned that requires a gradient though the caller runs under
    no_grad: whether AOTAutograd gives it one depends on the calls that made it."""
    if torch.is_grad_enabled():
        return False
    given = storages_of([value_of(node) for node in graph.nodes if node.op == "placeholder"])
    returned = [node for node in graph.output_node().all_input_nodes if node.op != "placeholder"]
    return any(requires_grad(value_of(n)) and storages_of(value_of(n)) & given for n in returned)


def keeps_grad_under_no_grad(graph: Graph, legality: Legality) -> bool:
    """Whether a dropout under no_grad may give back its input, with the gradient that this has in
    eager mode: its fake value, which a compiler's copy is like, has none."""
    kept = [kept_by_dropout(n) for n in graph.nodes if not legality.context(n).grad]
    return any(n is not None and requires_grad(value_of(n)) for n in kept)


def _leaves(graph: Graph, legality: Legality) -> set[Node]:
    return {n for n in differentiated(graph, legality) if n.op in ("placeholder", "get_attr")}


def _add_nothing_of(leaves: Sequence[Node], editor: Editor) -> None:
    """Add the sum of no element of each leaf, which is 0, to something that is returned."""
    end = editor.graph.output_node()
    host = next((n for n in end.all_input_nodes if _can_be_replaced(n, editor)), None)
    if host is None or not editor.legality.context(end).grad:
        raise Refused(f"{leaves[0].name} would get no gradient")
    with editor.graph.inserting_before(end):
        result = host
        for leaf in leaves:
            flat = editor.make("flatten", (leaf,), {}, host, end)
            nothing = editor.make("narrow", (flat, 0, 0, 0), {}, host, end)
            zero = editor.make("sum", (nothing,), {"dtype": value_of(host).dtype}, host, end)
            result = editor.make("add", (result, zero), {}, host, end)
    end.replace_input_with(host, result)


def _can_be_replaced(node: Node, editor: Editor) -> bool:
    value = value_of(node)
    if not requires_grad(value) or not isinstance(value, torch.Tensor):
        return False
    context = editor.legality.context(node)
    return (
        context.grad
        and node.op not in ("placeholder", "get_attr")
        and not editor.legality.is_pinned(value)
    )


def differentiated(graph: Graph, legality: Legality) -> set[Node]:
    """Nodes through which the backward pass goes if all that is returned gets a gradient."""
    found: set[Node] = set()
    read: set[Base] = set()  # what is read later on, and counts
    bases = {} if legality.is_functional else written_bases(graph, legality)

    def is_read(node: Node) -> bool:
        return node in bases and not read.isdisjoint(bases[node])

    for node in reversed(graph.nodes):
        counts = node in found or node.op == "output"
        if bases and not counts:
            counts = any(map(is_read, legality.effects(node).writes))
        if counts and not stops_gradients(node):
            # A view made under no_grad requires a gradient, too, but passes none on.
            grad = node.op == "output" or legality.context(node).grad
            sources = _sources(node, found, is_read) if grad else _given_back(node, found, legality)
            inputs = [n for n in sources if n in found or requires_grad(value_of(n))]
            found.update(inputs)
            read |= bases_in(inputs, bases)
    return found


def _given_back(node: Node, found: Set[Node], legality: Legality) -> list[Node]:
    """What a call under no_grad gives back if this counts, for it has written to it or had nothing
    to do (contiguous): the tensor that it was, with the gradient that it had."""
    if node not in found:
        return []
    own, value = memory_of_one(node), value_of(node)
    written = [n for n in legality.effects(node).writes if not own.isdisjoint(memory_of_one(n))]
    return written or [n for n in node.all_input_nodes if value_of(n) is value]


def _sources(node: Node, found: Set[Node], is_read: Callable[[Node], bool]) -> list[Node]:
    """Inputs of which the value, not the shape alone, is read for what counts."""
    inputs = node.all_input_nodes
    if len(inputs) < 2:
        return inputs
    if _is_each_for_itself(node.target):
        return _sources_of_each(node, found, is_read)
    return inputs[:1] if _reads_one(node.target) else inputs


@cache
def _reads_one(target: Callable[..., Any] | str) -> bool:
    name = target_name(target)
    return name == "to" or name.endswith(("_as", "_like"))


@cache
def _is_each_for_itself(target: Callable[..., Any] | str) -> bool:
    name = target_name(target)
    return name.startswith("_foreach_") or name in _EACH_FOR_ITSELF


_EACH_FOR_ITSELF = ("broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "meshgrid")
"""Besides PyTorch's calls on lists, those whose i-th result comes from their i-th tensor."""


def _sources_of_each(node: Node, found: Set[Node], is_read: Callable[[Node], bool]) -> list[Node]:
    """Inputs at the places that count: their results do, or they are written to, and that counts.

    Any other input counts for all places.
    """
    given: list[Any] = [*node.args, *node.kwargs.values()]
    lists = [each for each in given if isinstance(each, tuple | list)] or [given]
    count, places = len(lists[0]), set[int]()
    for user in node.users:
        if user in found:
            if user.target is not operator.getitem or not isinstance(user.args[1], int):
                return node.all_input_nodes
            places.add(user.args[1] % count)
    written = lists[0] if effects_of(node).writes else ()
    places |= {i for i, n in enumerate(written) if is_read(n)}
    idle = {each[i] for each in lists if len(each) == count for i in {*range(count)} - places}
    busy = {each[i] for each in lists if len(each) == count for i in places}
    return [n for n in node.all_input_nodes if n in busy or n not in idle]
