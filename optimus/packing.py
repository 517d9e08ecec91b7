"""Store parameters that a rewritten graph stacks as one tensor, so that the stack is no copy.

A horizontal rewrite reads `stack([W_1, ..., W_N])`: N copies on every step, saved again for
backward. Here the parameters are moved into one contiguous tensor once (optimus.packs). The
compiled graph takes the whole tensor instead of its parts, and the gradient of the whole is handed
to the parts as views, without a copy. Buffers that the graph updates are stored alike
(optimus.updates).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from optimus.call_recording import Compiled
from optimus.driver import DYNAMO_SOURCE
from optimus.gradients import differentiated
from optimus.joins import Join, read_join
from optimus.legality import Legality, storages_of, tensor_of, value_of
from optimus.packed_calls import Calls, Slot
from optimus.packs import Pack, Part, View, alignment_of, ids, misplaced, objection, padded
from optimus.updates import Counters, counters_of, drop_write_backs, is_buffer, is_written_back
from optimus.values import fake_mode_of, requires_grad


@dataclass
class Packing:
    """The packs of one model; graphs compiled later reuse them.

    `adopt` is asked to have an optimizer step on a new pack (optimus.packed_optimizer); it returns
    None, or the reason why it does not. `declined` counts, by reason, stacks of parameters that
    could not be stored together, and packs that were not adopted. At multiples of `alignment` bytes
    members begin; if it is None, at those of their device.
    """

    packs: list[Pack] = field(default_factory=list[Pack])
    adopt: Callable[[Pack], str | None] | None = None
    declined: dict[str, int] = field(default_factory=dict[str, int])
    alignment: int | None = None

    def pack_graph(
        self, module: GraphModule, inputs: Sequence[Any]
    ) -> tuple[GraphModule, list[Any], Callable[[Compiled], Compiled]]:
        """Have `module` take packs instead of the parameters in them.

        Makes packs for stacks and cats of parameters first. Returns the module (changed in place),
        its new inputs, and what to wrap its compiled form in so that it takes the old inputs.
        """
        graph = module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        given = dict(zip(placeholders, inputs, strict=True))
        self._drop_moved()
        legality = Legality(graph)
        learners = differentiated(graph, legality)
        unpacked = module, list(inputs), _as_it_is
        # Packs are taken apart where the graph begins: that is no place for it under no_grad.
        if not torch.is_grad_enabled() and any(n.op == "placeholder" for n in learners):
            return unpacked
        for join in _joins(graph, legality, given):
            self._consider(join.members, join.parts, join.node, given)
        counters = counters_of(graph, given)
        for counter in counters:
            self._consider(counter.members, counter.parts, None, given)
        used = [p for p in self.packs if any(id(x) in ids(p.members) for x in inputs)]
        if not used:
            return unpacked
        substitution = _Substitution(graph, used, given, learners)
        places, wholes, kept = substitution.run(legality, counters)
        module.recompile()
        slots = zip(used, places, substitution.learning, strict=True)
        calls = Calls([Slot(self, *slot) for slot in slots], kept)
        return module, [*wholes, *(inputs[i] for i in kept)], calls.wrap

    def dissolve(self) -> None:
        """Undo all packing."""
        for pack in self.packs:
            pack.dissolve()
        self.packs.clear()

    def make(self, members: Sequence[Any], parts: Sequence[Part], shape: Sequence[int]) -> Pack:
        """A new pack of `members`, stepped on by their optimizer where it can."""
        pack = Pack.of(members, parts, shape)
        self.packs.append(pack)
        if self.adopt is not None and not pack.holds_buffers:
            reason = self.adopt(pack)
            if reason is not None:
                self._decline(f"not one leaf to the optimizer: {reason}")
        return pack

    def find(self, members: Sequence[Any], at: Sequence[int], like: Pack) -> Pack | None:
        """The pack laid out as `like` whose members number `at` are `members`."""
        alike = [
            p for p in self.packs if (p.parts, p.whole.shape) == (like.parts, like.whole.shape)
        ]
        for pack in alike:
            if all(pack.members[i] is m for i, m in zip(at, members, strict=True)):
                return pack
        return None

    def has(self, tensor: Any) -> bool:
        """Whether `tensor` is in a pack."""
        return any(id(tensor) in ids(pack.members) for pack in self.packs)

    def is_at_home(self, pack: Pack) -> bool:
        """Whether the members of `pack` live in it, those that have left it being taken back where
        nobody could tell."""
        if pack.is_intact():
            return True
        if not pack.may_restore():
            return False
        for other in [p for p in self.packs if not ids(p.members).isdisjoint(ids(pack.members))]:
            if other is not pack:  # of another type: the model was converted, and is back
                other.release()
                self.packs.remove(other)
        if pack not in self.packs:
            self.packs.append(pack)
        pack.restore()
        return True

    def _drop_moved(self) -> None:
        """Forget packs whose members have been moved to another device or type for good."""
        for pack in self.packs:
            member = pack.members[0]
            if (member.device, member.dtype) != (pack.whole.device, pack.whole.dtype):
                pack.release()
                self.packs = [p for p in self.packs if p is not pack]

    def _consider(
        self,
        nodes: Sequence[Node],
        parts: Sequence[Part],
        join: Node | None,
        given: dict[Node, Any],
    ) -> None:
        members = [given[node] for node in nodes]
        if any(map(self.has, members)):
            if not any(_place(pack, members, parts) is not None for pack in self.packs):
                self._decline("parameters are in packs already, grouped otherwise")
            return
        reason = objection(members)
        if reason is not None:
            self._decline(reason)
            return
        tensor, first = tensor_of(join), members[0]
        shape = tensor.shape if tensor is not None else (len(members),)
        alignment = self.alignment or alignment_of(first.device)
        if not misplaced(first, parts, shape, alignment):
            self.make(members, parts, shape)
        elif not isinstance(first, nn.Parameter):
            self._decline(f"buffers would not begin at multiples of {alignment} bytes")
        elif (room := padded(first, parts, shape, alignment)) is not None:
            self.make(members, *room)
        else:
            self._decline(f"parameters in a cat would not begin at multiples of {alignment} bytes")

    def _decline(self, reason: str) -> None:
        self.declined[reason] = self.declined.get(reason, 0) + 1


def _as_it_is(compiled: Compiled) -> Compiled:
    return compiled


def _joins(graph: Graph, legality: Legality, given: dict[Node, Any]) -> list[Join]:
    """Joins of parameters, or of buffers, that may be stored as such; the outermost first."""
    returned = storages_of([value_of(node) for node in graph.output_node().all_input_nodes])
    found: list[Join] = []
    for node in reversed(list(graph.nodes)):
        memory = storages_of(value_of(node))
        if memory & returned:
            continue
        if not memory & legality.written_storages:  # else it must stay the copy that it is
            join = read_join(node, lambda n: isinstance(given.get(n), nn.Parameter))
            if join is not None:
                found += [join] if _may_come_first(join, legality) else []
                continue
        join = read_join(node, lambda n: is_buffer(n, given))
        if join is not None and is_written_back(join, legality):
            found.append(join)
    return found


def _may_come_first(join: Join, legality: Legality) -> bool:
    """Whether it would be the same join, and have the same gradient, where the graph begins."""
    if legality.writers([value_of(node) for node in join.members]):
        return False
    grad = legality.context(join.members[0]).grad
    return all(legality.context(node).grad == grad for node in join.nodes)


def _place(pack: Pack, members: Sequence[Any], parts: Sequence[Part]) -> tuple[View, ...] | None:
    """The views of `pack` that show a join of `members`, as its `parts`; None if none do."""
    places = {id(m): part.views for m, part in zip(pack.members, pack.parts, strict=True)}
    first = places.get(id(members[0]))
    if first is None:
        return None
    front = first[: len(first) - len(parts[0].views)]
    inside = [views for views in places.values() if views[: len(front)] == front]
    if len(inside) != len(members):
        return None
    for member, part in zip(members, parts, strict=True):
        if places.get(id(member)) != (*front, *part.views):
            return None
    return front


class _Substitution:
    """Puts packs as inputs in the place of the members that a graph takes.

    `learning` tells, for each pack, which of its members get a gradient from the graph.
    """

    def __init__(
        self,
        graph: Graph,
        packs: Sequence[Pack],
        given: dict[Node, Any],
        differentiated: Set[Node],
    ) -> None:
        self._graph = graph
        self._packs = packs
        self._given = given
        self._erased: set[Node] = set()
        nodes = {id(x): node for node, x in given.items()}
        self._found = [[nodes.get(id(m)) for m in pack.members] for pack in packs]
        self.learning = [[n in differentiated for n in found] for found in self._found]

    def run(
        self, legality: Legality, counters: Sequence[Counters]
    ) -> tuple[list[list[int | None]], list[torch.Tensor], list[int]]:
        """Returns, for each pack, where its members stand among the old inputs; example inputs for
        the packs, which come first among the new ones; and the positions of the inputs that stay.
        """
        wholes = self._placeholders()
        position = {node: i for i, node in enumerate(self._given)}
        found = self._found
        slots = [[None if n is None else position[n] for n in nodes] for nodes in found]
        for join in _joins(self._graph, legality, self._given):
            if join.node not in self._erased:
                self._replace_join(join, wholes)
        for counter in counters:
            self._replace_counters(counter, wholes)
        gone: set[Node] = set()
        for pack, whole, nodes in zip(self._packs, wholes, found, strict=True):
            for node, part in zip(nodes, pack.parts, strict=True):
                if node is not None:
                    gone.add(node)
                    if node.users:
                        node.replace_all_uses_with(self._view(whole, part.views, node))
        for node in gone:
            self._graph.erase_node(node)
        kept = [i for node, i in position.items() if node not in gone]
        return slots, [whole.meta["example_value"] for whole in wholes], kept

    def _placeholders(self) -> list[Node]:
        mode = fake_mode_of(self._graph)
        made: list[Node] = []
        with self._graph.inserting_before(next(iter(self._graph.nodes))):
            for position, (pack, learning) in enumerate(
                zip(self._packs, self.learning, strict=True)
            ):
                node = self._graph.placeholder(f"optimus_pack_{position}")
                value = pack.whole.detach().requires_grad_(any(learning))
                # Fake with static sizes, as those of parameters are: given the data, the compiler
                # would make them dynamic, and could not tell by which input to guard them.
                fake = mode.from_tensor(value, static_shapes=True) if mode is not None else value
                node.meta["example_value"] = fake
                # As Dynamo marks parameters: the address stays, so CUDA graphs need not copy it.
                node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
                setattr(node, DYNAMO_SOURCE, None)  # none of the user's variables
                made.append(node)
        return made

    def _replace_join(self, join: Join, wholes: Sequence[Node]) -> None:
        """A join of exactly a pack, or of a part of it, becomes a view of that."""
        members = [self._given[node] for node in join.members]
        for pack, whole in zip(self._packs, wholes, strict=True):
            views = _place(pack, members, join.parts)
            if views is not None:
                drop_write_backs(join)
                join.node.replace_all_uses_with(_as_joined(self._view(whole, views, join.node)))
                self._erase_unused(join.node)
                return

    def _replace_counters(self, counters: Counters, wholes: Sequence[Node]) -> None:
        members = [self._given[node] for node in counters.members]
        for pack, whole in zip(self._packs, wholes, strict=True):
            if _place(pack, members, counters.parts) == ():
                counters.update_at_once(whole)
                return

    def _view(self, whole: Node, views: Sequence[View], like: Node) -> Node:
        """What stands for `like`; frozen, it lets no gradient through to what others learn."""
        if requires_grad(tensor_of(whole)) and not requires_grad(tensor_of(like)):
            views = (("detach", ()), *views)
        body = next(node for node in self._graph.nodes if node.op != "placeholder")
        with self._graph.inserting_before(body):
            for name, arguments in views:
                function, value = getattr(torch, name), tensor_of(whole)
                whole = self._graph.call_function(function, (whole, *arguments))
                whole.meta["example_value"] = function(value, *arguments)
        return whole

    def _erase_unused(self, node: Node) -> None:
        if node.op != "placeholder" and not node.users and node not in self._erased:
            sources = node.all_input_nodes
            self._graph.erase_node(node)
            self._erased.add(node)
            for source in sources:
                self._erase_unused(source)


def _as_joined(place: Node) -> Node:
    """What `place` shows, laid out as a stack is; of a padded pack, a copy.

    Everything behind it, views and kernels, was made for a stack. Compilers read the parts where
    they lie in place of making such a copy, unless it is needed.
    """
    value = tensor_of(place)
    if value is None or value.is_contiguous():
        return place
    with place.graph.inserting_after(place):
        copy = place.graph.call_method("contiguous", (place,))
    copy.meta["example_value"] = value.contiguous()
    return copy
