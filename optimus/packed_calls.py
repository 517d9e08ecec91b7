"""Turn the arguments of a call with parameters into those of a call with packs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import TYPE_CHECKING, Any, cast

import torch

from optimus.call_recording import Compiled
from optimus.packs import Pack, joined, objection
from optimus.picking import picker

if TYPE_CHECKING:
    from optimus.packing import Packing

_LEARNS = attrgetter("requires_grad")

MANY_MODULES = 64
"""For so many modules that share one graph, packs are made; parameters of more are copied."""


class Slot:
    """One pack among a graph's inputs. `at`: where its members stand among the arguments of a call,
    None for those that the graph does not take; `learning`: which get a gradient from it, `all` of
    them, `any` or none.

    One graph may serve several modules, and a module's tensors may be others later: what a call is
    given counts.
    """

    def __init__(
        self, packing: Packing, pack: Pack, at: Sequence[int | None], learning: Sequence[bool]
    ) -> None:
        self._packing = packing
        self.pack = pack
        self._learning = list(learning)
        self.all_learn, self.any_learn = all(learning), any(learning)
        self.positions = [i for i in at if i is not None]
        self._taken_from = picker(self.positions)
        self._taken = [n for n, i in enumerate(at) if i is not None]
        self.expected = [pack.members[n] for n in self._taken]
        self._others: dict[tuple[int, ...], Pack] = {}

    def whole(self, args: Sequence[Any], afterwards: list[Callable[[], None]]) -> torch.Tensor:
        """What to call the graph with, and what to do afterwards."""
        members = self._taken_from(args)
        is_usual = all(map(is_, members, self.expected))
        pack = self.pack if is_usual else self._pack_of(members)
        if pack is not None:
            at_home = self._packing.is_at_home(pack)
            if self.any_learn and not (at_home and self._teaches_all_of(pack)):
                pack.release()  # an optimizer's update of the whole would be of all its members
            if at_home:
                return pack.as_input(self._learning)
        whole = self._copied(members)
        if self.pack.holds_buffers:
            afterwards.append(functools.partial(self._write_back, members, whole))
        return whole

    def _teaches_all_of(self, pack: Pack) -> bool:
        return self.all_learn and all(map(_LEARNS, pack.members))

    def _write_back(self, members: Sequence[Any], whole: torch.Tensor) -> None:
        """Give buffers what the graph made of their copies."""
        with torch.no_grad():
            for n, member in zip(self._taken, members, strict=True):
                member.copy_(self.pack.parts[n].of(whole))

    def _pack_of(self, members: Sequence[Any]) -> Pack | None:
        """The pack of other members, made if need be; None if they cannot be stored together."""
        key = tuple(map(id, members))
        if key not in self._others:
            pack = self._packing.find(members, self._taken, self.pack) or self._make(members)
            if pack is None:
                return None
            self._others[key] = pack
        return self._others[key]

    def _make(self, members: Sequence[Any]) -> Pack | None:
        whole = self.pack.whole
        if (
            len(members) < len(self.pack.members)
            or len(self._others) >= MANY_MODULES
            or any(map(self._packing.has, members))
            or objection(members) is not None
            or (members[0].dtype, members[0].device) != (whole.dtype, whole.device)
        ):
            return None
        return self._packing.make(members, self.pack.parts, whole.shape)

    def _copied(self, members: Sequence[Any]) -> torch.Tensor:
        everything = [part.of(self.pack.whole) for part in self.pack.parts]  # not read by it
        for n, member in zip(self._taken, members, strict=True):
            everything[n] = member if self._learning[n] else member.detach()
        return joined(everything, self.pack)


class Calls:
    """Turns the arguments of a call with parameters into those of a call with packs."""

    def __init__(self, slots: Sequence[Slot], kept: Sequence[int]) -> None:
        self._slots = list(slots)
        self._kept = picker(kept)
        self._packs = [(slot.pack, slot.all_learn) for slot in slots]
        self._by_member = any(slot.any_learn and not slot.all_learn for slot in slots)
        self._members = [m for slot in slots for m in slot.pack.members]
        # Not every release of Dynamo looks again whether parameters have been frozen.
        self._learners = [m for slot in slots if slot.all_learn for m in slot.pack.members]
        self._note_addresses()
        # In the order of a call, in which they mostly stand side by side.
        expected = {i: m for s in slots for i, m in zip(s.positions, s.expected, strict=True)}
        self._taken = picker(sorted(expected))
        self._expected = [expected[i] for i in sorted(expected)]

    def _note_addresses(self) -> None:
        """Packs get other memory when members come back to them."""
        self._memory = [slot.pack.whole for slot in self._slots]
        self._addresses = [a for slot in self._slots for a in slot.pack.addresses]

    def _usual_wholes(self, args: Sequence[Any]) -> list[torch.Tensor] | None:
        """The packs, if their own members are given, each in its place, and no pack has to hand
        its gradient to its members.

        Asked in each step, so without a line of Python for each member.
        """
        if self._by_member:
            return None
        if not all(map(is_, self._memory, [pack.whole for pack, _ in self._packs])):
            self._note_addresses()
        wholes = [pack.leaf if learns else pack.whole for pack, learns in self._packs]
        if (
            all(map(is_not, wholes, repeat(None)))
            and all(map(is_, self._taken(args), self._expected))
            and list(map(torch.Tensor.data_ptr, self._members)) == self._addresses
            and all(map(_LEARNS, self._learners))
        ):
            return cast("list[torch.Tensor]", wholes)
        return None

    def wrap(self, compiled: Compiled) -> Compiled:
        def call(*args: Any) -> Any:
            usual = self._usual_wholes(args)
            if usual is not None:
                return compiled(*usual, *self._kept(args))
            afterwards: list[Callable[[], None]] = []
            wholes = [slot.whole(args, afterwards) for slot in self._slots]
            result = compiled(*wholes, *self._kept(args))
            for act in afterwards:
                act()
            return result

        return call
