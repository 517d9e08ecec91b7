"""Store parameters that a rewritten graph stacks as one tensor, so that the stack is no copy.

A horizontal rewrite reads `stack([W_1, ..., W_N])`: N copies on every step, saved again for
backward. Here the parameters are moved into one contiguous tensor once, each module keeping its own
`nn.Parameter` as a view of it: the same objects, names, shapes and values as before, for the state
dict, the optimizer, hooks and everybody else. The compiled graph takes the whole tensor instead of
its parts, and the gradient of the whole is handed to the parts as views, without a copy.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from optimus.legality import Legality, storages_of, tensor_of, value_of
from optimus.ops import arguments, op_of
from optimus.values import fake_mode_of

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """Where a parameter lies in its pack: rows `start` to `stop`, or row `start` if `stacked`."""

    start: int
    stop: int
    stacked: bool

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a tensor laid out as the pack."""
        return whole[self.start] if self.stacked else whole[self.start : self.stop]


@dataclass(eq=False)
class Pack:
    """Parameters stored in `whole`, in order.

    The gradient goes to the parameters, as views; or, once an optimizer has adopted the pack, to
    `leaf`, which is `whole` as a parameter of its own.
    """

    whole: torch.Tensor
    parameters: tuple[nn.Parameter, ...]
    parts: tuple[Part, ...]
    leaf: nn.Parameter | None = None

    def is_intact(self) -> bool:
        """Whether every parameter still is its part of `whole` (`module.to()` moves it away)."""
        return all(p.data_ptr() == a for p, a in zip(self.parameters, self._addresses, strict=True))

    def restore(self) -> None:
        """Move parameters that have left back into the pack, with the values they have now."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            place = part.of(self.whole)
            if parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter.detach())
                parameter.data = place

    def make_leaf(self) -> nn.Parameter:
        """Let gradients gather in `leaf`, together with those that the parameters have already.

        A parameter that is used outside the graphs compiled with this pack still receives its
        gradient there; it is added to the leaf's at once.
        """
        leaf = self.leaf = nn.Parameter(self.whole)
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            self._move_gradient(parameter, part)
            hook = functools.partial(self._move_gradient, part=part)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        return leaf

    def drop_leaf(self) -> None:
        """Let gradients go to the parameters again."""
        leaf, self.leaf = self.leaf, None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if leaf is not None and leaf.grad is not None:
            for parameter, part in zip(self.parameters, self.parts, strict=True):
                parameter.grad = part.of(leaf.grad).clone()

    def _move_gradient(self, parameter: torch.Tensor, part: Part) -> None:
        if self.leaf is None or parameter.grad is None:
            return
        if self.leaf.grad is None:
            self.leaf.grad = torch.zeros_like(self.whole)
        part.of(self.leaf.grad).add_(parameter.grad)
        parameter.grad = None

    def dissolve(self) -> None:
        """Give every parameter memory of its own again."""
        for parameter in self.parameters:
            parameter.data = parameter.detach().clone()

    def __post_init__(self) -> None:
        self._addresses = [part.of(self.whole).data_ptr() for part in self.parts]
        self._hooks: list[Any] = []


@dataclass
class Packing:
    """The packs of one model; graphs compiled later reuse them.

    `adopt` is asked to have an optimizer step on a new pack (optimus.packed_optimizer); it returns
    None, or the reason why it does not. `declined` counts, by reason, stacks of parameters that
    could not be stored together, and packs that were not adopted.
    """

    packs: list[Pack] = field(default_factory=list[Pack])
    adopt: Callable[[Pack], str | None] | None = None
    declined: dict[str, int] = field(default_factory=dict[str, int])

    def pack_graph(
        self, module: GraphModule, inputs: Sequence[Any]
    ) -> tuple[GraphModule, list[Any], Callable[[Compiled], Compiled]]:
        """Have `module` take packs instead of the parameters in them.

        Makes packs for stacks and cats of parameters first. Returns the module (changed in place),
        its new inputs, and what to wrap its compiled form in so that it takes the old inputs.
        """
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        given = dict(zip(placeholders, inputs, strict=True))
        self._drop_moved()
        exposed = _exposed_storages(module.graph)
        for join in list(module.graph.nodes):
            if not storages_of(value_of(join)) & exposed:
                self._consider(join, given)
        used = [p for p in self.packs if any(id(x) in _ids(p.parameters) for x in inputs)]
        if not used:
            return module, list(inputs), lambda compiled: compiled
        wholes, kept = _substitute(module.graph, used, given)
        module.recompile()
        return module, [*wholes, *(inputs[i] for i in kept)], _Calls(used, kept).wrap

    def dissolve(self) -> None:
        """Undo all packing."""
        for pack in self.packs:
            pack.dissolve()
        self.packs.clear()

    def _drop_moved(self) -> None:
        """Forget packs whose parameters have been moved to another device or type for good."""
        stays = [p for p in self.packs if p.parameters[0].device == p.whole.device]
        self.packs = [p for p in stays if p.parameters[0].dtype == p.whole.dtype]

    def _consider(self, join: Node, given: dict[Node, Any]) -> None:
        stacked = _joined_placeholders(join, given)
        if stacked is None:
            return
        parameters = [given[node] for node in stacked]
        owners = {id(owner) for p in parameters if (owner := self._pack_of(p)) is not None}
        if owners:
            if len(owners) > 1 or self._pack_of(parameters[0]) is None:
                self._decline("parameters are in packs already, grouped otherwise")
            return
        reason = _objection(parameters)
        if reason is not None:
            self._decline(reason)
            return
        op = op_of(join)
        pack = _make_pack(parameters, op is not None and op.name == "stack")
        self.packs.append(pack)
        reason = self.adopt(pack) if self.adopt is not None else None
        if reason is not None:
            self._decline(f"not one leaf to the optimizer: {reason}")

    def _pack_of(self, parameter: nn.Parameter) -> Pack | None:
        return next((p for p in self.packs if id(parameter) in _ids(p.parameters)), None)

    def _decline(self, reason: str) -> None:
        self.declined[reason] = self.declined.get(reason, 0) + 1


def _exposed_storages(graph: Graph) -> frozenset[int]:
    """Memory that is written or returned: there a join must stay the copy that it is."""
    legality = Legality(graph)
    returned = storages_of([value_of(node) for node in graph.output_node().all_input_nodes])
    return returned | frozenset(legality.written_storages)


def _ids(parameters: Iterable[nn.Parameter]) -> set[int]:
    return {id(p) for p in parameters}


def _joined_placeholders(join: Node, given: dict[Node, Any]) -> list[Node] | None:
    """The inputs of a stack or cat along the first dimension, if all are parameters."""
    op, values = op_of(join), arguments(join)
    if op is None or values is None or op.name not in ("stack", "cat") or values["dim"] != 0:
        return None
    nodes: Any = values["tensors"]
    if not isinstance(nodes, list | tuple) or len(nodes) < 2:
        return None
    if not all(isinstance(given.get(node), nn.Parameter) for node in nodes):
        return None
    return list(nodes)


def _objection(parameters: Sequence[nn.Parameter]) -> str | None:
    first = parameters[0]
    if len(_ids(parameters)) < len(parameters):
        return "a parameter stands twice in the stack"
    for p in parameters:
        if type(p) is not nn.Parameter or not p.is_leaf:
            return "a parameter of a special class"
        if (p.dtype, p.device, p.requires_grad) != (first.dtype, first.device, first.requires_grad):
            return "parameters differ in type, device or requires_grad"
        if not p.is_contiguous() or p.untyped_storage().nbytes() != p.numel() * p.element_size():
            return "a parameter is a view or not contiguous"
    return None


def _make_pack(parameters: Sequence[nn.Parameter], stacked: bool) -> Pack:
    """Copy the parameters side by side and make each a view of its part."""
    with torch.no_grad():
        whole = (torch.stack if stacked else torch.cat)([p.detach() for p in parameters])
    ends = list(itertools.accumulate(1 if stacked else p.shape[0] for p in parameters))
    parts = tuple(Part(a, b, stacked) for a, b in zip([0, *ends], ends, strict=False))
    pack = Pack(whole, tuple(parameters), parts)
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.of(whole)
    return pack


def _substitute(
    graph: Graph, packs: Sequence[Pack], given: dict[Node, Any]
) -> tuple[list[torch.Tensor], list[int]]:
    """Replace placeholders of packed parameters by placeholders of packs.

    Returns example inputs for the packs, which come first, and the positions of the placeholders
    that stay, in order.
    """
    by_id = {id(x): node for node, x in given.items()}
    placeholders = _whole_placeholders(graph, packs)
    for pack, whole in zip(packs, placeholders, strict=True):
        _use_whole(graph, whole, [by_id.get(id(p)) for p in pack.parameters], pack)
    gone = {node for node, x in given.items() if any(id(x) in _ids(p.parameters) for p in packs)}
    for node in gone:
        graph.erase_node(node)
    wholes = [whole.meta["example_value"] for whole in placeholders]
    return wholes, [i for i, node in enumerate(given) if node not in gone]


def _whole_placeholders(graph: Graph, packs: Sequence[Pack]) -> list[Node]:
    mode = fake_mode_of(graph)
    made: list[Node] = []
    with graph.inserting_before(next(iter(graph.nodes))):
        for position, pack in enumerate(packs):
            node = graph.placeholder(f"optimus_pack_{position}")
            value = pack.whole.detach().requires_grad_(pack.parameters[0].requires_grad)
            # Fake with static sizes, as those of parameters are: given the data, the compiler would
            # make the sizes dynamic, and could not tell by which input to guard them.
            fake = mode.from_tensor(value, static_shapes=True) if mode is not None else value
            node.meta["example_value"] = fake
            # As Dynamo marks parameters: the address stays, so CUDA graphs need not copy it.
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
            made.append(node)
    return made


def _use_whole(graph: Graph, whole: Node, nodes: Sequence[Node | None], pack: Pack) -> None:
    """Joins of exactly the pack become `whole`; any other use of a parameter becomes a view."""
    for join in [user for node in nodes[:1] if node is not None for user in node.users]:
        values, op = arguments(join), op_of(join)
        if op is not None and values is not None and _is_pack(op.name, values, nodes, pack):
            join.replace_all_uses_with(whole)
            graph.erase_node(join)
    body = next(node for node in graph.nodes if node.op != "placeholder")
    for node, part in zip(nodes, pack.parts, strict=True):
        if node is None or not node.users:
            continue
        with graph.inserting_before(body):
            view = (
                graph.call_function(torch.select, (whole, 0, part.start))
                if part.stacked
                else graph.call_function(
                    torch.narrow, (whole, 0, part.start, part.stop - part.start)
                )
            )
        view.meta["example_value"] = tensor_of(node)
        node.replace_all_uses_with(view)


def _is_pack(name: str, values: dict[str, Any], nodes: Sequence[Node | None], pack: Pack) -> bool:
    wanted = "stack" if pack.parts[0].stacked else "cat"
    return name == wanted and values["dim"] == 0 and list(values["tensors"]) == list(nodes)


class _Calls:
    """Turns the arguments of a call with parameters into those of a call with packs."""

    def __init__(self, packs: Sequence[Pack], kept: Sequence[int]) -> None:
        self._packs = list(packs)
        self._kept = list(kept)

    def wrap(self, compiled: Compiled) -> Compiled:
        def call(*args: Any) -> Any:
            return compiled(*map(_whole, self._packs), *(args[i] for i in self._kept))

        return call


def _whole(pack: Pack) -> torch.Tensor:
    """The pack as an input whose gradient reaches the parameters in it."""
    if not pack.is_intact():
        pack.restore()
    if pack.leaf is not None:
        return pack.leaf
    if not (torch.is_grad_enabled() and pack.parameters[0].requires_grad):
        return pack.whole
    return cast(torch.Tensor, _Gather.apply(pack, *pack.parameters))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Forward: the parameters side by side, as they lie. Backward: each its part, as a view."""

    @staticmethod
    def forward(ctx: Any, pack: Pack, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parts = pack.parts
        return pack.whole.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        # A batched GEMM's weight gradient comes transposed; one copy here saves one a parameter.
        whole = gradients[0].contiguous()
        return (None, *(part.of(whole) for part in ctx.parts))
