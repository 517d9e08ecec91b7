"""Indices that a model keeps in a buffer, looked at once instead of in each step.

`dot_interaction_at` is told its pairs by index tensors, and to look at them it has to be an
operator that runs on the host. In most models they are views of a buffer that never changes. Then
the graph is compiled for the pairs that the buffer holds, with `dot_interaction`, which the
compiler sees into; and each call makes sure, without waiting for the GPU, that the buffer has not
been written to. If it has, and holds other pairs now, the graph runs uncompiled, as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from kernels.dot_interaction.by_index import order_of
from optimus.call_recording import Compiled
from optimus.driver import copy_graph_module
from optimus.graphed_call import fixed_inputs
from optimus.legality import storages_of, tensor_of
from optimus.ops import op_of

log = logging.getLogger(__name__)

MOST_LOOKS = 16
"""In how many calls one after another a buffer that was written to is compared with what it held,
which waits for the GPU. Loading a checkpoint is one such time; what is written in every step is
left alone."""

KNOWN = 8
"""How many buffers that were compared are remembered: several modules may share a graph."""

_LOOKS = torch.ops.kernels.dot_interaction_at.default
_KNOWS = torch.ops.kernels.dot_interaction.default
_VIEWS = ("getitem", "select", "unbind", "narrow", "split", "chunk")


def settled(
    module: GraphModule,
    inputs: Sequence[Any],
    compiler: Callable[[GraphModule, Sequence[Any]], Compiled],
) -> Compiled:
    """`compiler`'s result for a graph whose index buffers are taken for what they hold now."""
    if not any(node.target is _LOOKS for node in module.graph.nodes) or _is_distributed():
        return compiler(module, inputs)
    special = copy_graph_module(module)
    looks = [_Look(at, inputs[at]) for at in _settle(special, inputs)]
    if not looks:
        return compiler(module, inputs)
    compiled = compiler(special, inputs)
    warned = False

    def call(*args: Any) -> Any:
        nonlocal warned
        if all(look.holds(args) for look in looks):
            return compiled(*args)
        if not warned:
            warned = True
            log.warning("an index buffer has changed: the graph compiled for it runs uncompiled")
        return module(*args)

    return call


def _is_distributed() -> bool:
    """Whether several processes train: DistributedDataParallel writes to all buffers before each
    step."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    return torch.distributed.get_world_size() > 1


class _Look:
    """What the buffer at one position of a graph's inputs held when it was looked at."""

    def __init__(self, at: int, buffer: torch.Tensor) -> None:
        self._at = at
        self._content = buffer.clone()
        # The buffers are kept: another one cannot be taken for one of them.
        self._known = {id(buffer): (buffer, buffer._version)}
        self._in_a_row = 0

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether a call with `args` finds the same there."""
        buffer: torch.Tensor = args[self._at]
        known = self._known.get(id(buffer))
        if known is not None and known[1] == buffer._version:
            self._in_a_row = 0
            return True
        if self._in_a_row == MOST_LOOKS or buffer.is_inference():
            return False
        self._in_a_row += 1
        if buffer.device != self._content.device or not torch.equal(buffer, self._content):
            return False
        self._known.pop(id(buffer), None)
        if len(self._known) == KNOWN:
            del self._known[next(iter(self._known))]
        self._known[id(buffer)] = buffer, buffer._version
        return True


def _settle(module: GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Replace the operators that look at buffers; the positions of the buffers among the inputs."""
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, inputs, strict=True))
    own = [node for node, fixed in zip(placeholders, fixed_inputs(module), strict=True) if fixed]
    found: dict[Node, None] = {}
    for node in list(graph.nodes):
        if node.target is not _LOOKS:
            continue
        dense, embedded, *pairs = cast("tuple[Node, ...]", node.args)
        sources = [_source(index, given, own) for index in pairs]
        upper = None if None in sources else _order(node, given)
        if upper is None:
            continue
        with graph.inserting_before(node):
            new = graph.call_function(_KNOWS, (dense, embedded, upper))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        found |= dict.fromkeys(cast("list[Node]", sources))
    module.recompile()
    return [placeholders.index(buffer) for buffer in found]


def _order(node: Node, given: dict[Node, Any]) -> bool | None:
    """Which triangle the pairs are that the buffers hold now."""
    embedded = tensor_of(cast(Node, node.args[1]))
    num_features = None if embedded is None else embedded.shape[1]
    if not isinstance(num_features, int):
        return None
    with torch.no_grad():
        rows, columns = (_value(index, given) for index in node.args[2:])
        return order_of(rows, columns, num_features + 1)


def _source(index: Node, given: dict[Node, Any], own: Sequence[Node]) -> Node | None:
    """The model's own buffer that `index` is a view of, if nothing in the graph can write to it."""
    source = index
    while source.op != "placeholder":
        if not _is_view(source):
            return None
        source = cast(Node, source.args[0])
    buffer = given[source]
    if source not in own or type(buffer) is not torch.Tensor or buffer.is_inference():
        return None
    sharing = [x for x in given.values() if storages_of(x) & storages_of(buffer)]
    reads = all(user.target is _LOOKS for user in _uses(source))
    return source if len(sharing) == 1 and reads else None


def _is_view(node: Node) -> bool:
    op = op_of(node)
    is_view = op is not None and op.name in _VIEWS and len(node.all_input_nodes) == 1
    return is_view and bool(node.args) and isinstance(node.args[0], Node)


def _uses(source: Node) -> Iterator[Node]:
    """What takes `source` or a view of it."""
    for user in source.users:
        if _is_view(user):
            yield from _uses(user)
        else:
            yield user


def _value(node: Any, given: dict[Node, Any]) -> Any:
    """What a view of an input is now."""
    if node in given:
        return given[node]
    source, *rest = node.args
    if node.op == "call_method":
        return getattr(_value(source, given), node.target)(*rest, **node.kwargs)
    return node.target(_value(source, given), *rest, **node.kwargs)
