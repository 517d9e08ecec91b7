"""Let an optimizer step on packs instead of the parameters in them.

Host time is paid per leaf: the argument of the compiled graph, the accumulation of its gradient,
its place in the optimizer's loop. Where the update is elementwise, one tensor of N parameters is
updated exactly as the N are. Here a pack becomes the leaf and takes their place in the parameter
group; the optimizer's state is joined alike. State dicts are translated both ways, so that
checkpoints are what they were.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from optimus.packs import Pack, joined

_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
)

Group = dict[str, Any]


class PackedOptimizer:
    """Puts packs in the place of their parameters in one model's optimizers.

    An optimizer that joins others shows them as `optimizers` and shares their parameter groups.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(dict.fromkeys(_flatten(optimizers)))
        # By the list of a group: loading a state dict makes new groups, but keeps their lists.
        self._original: dict[int, list[nn.Parameter]] = {}
        self._packs: dict[torch.Tensor, Pack] = {}
        self._handles: list[Any] = []

    def adopt(self, pack: Pack) -> str | None:
        """Make `pack` a leaf of its optimizer (`pack.leaf`); None, or the reason why not."""
        found = self._home(pack)
        if isinstance(found, str):
            return found
        optimizer, group = found
        reason = _objection(optimizer, group, pack)
        if reason is not None:
            return reason
        state = _join_states(optimizer, pack)
        if isinstance(state, str):
            return state
        self._watch()
        leaf = pack.make_leaf()
        pack.give_back = functools.partial(self._give_back, pack, optimizer, group["params"])
        self._original.setdefault(id(group["params"]), list(group["params"]))
        self._packs[leaf] = pack
        self._arrange(group["params"])
        for parameter in pack.parameters:
            optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[leaf] = state
        return None

    def _arrange(self, params: list[Any]) -> None:
        """Put the leaf of each pack, in a group's list, in the place of its first parameter."""
        leaves = {p: leaf for leaf, pack in self._packs.items() for p in pack.parameters}
        params[:] = dict.fromkeys(leaves.get(p, p) for p in self._original[id(params)])

    def release(self) -> None:
        """Give every parameter its place and its state back."""
        for optimizer in self._optimizers:
            if type(optimizer) not in _ELEMENTWISE:
                continue
            for group in optimizer.param_groups:
                self._release_group(optimizer, group)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._original.clear()
        self._packs.clear()

    def _release_group(self, optimizer: Optimizer, group: Group) -> None:
        for leaf in [p for p in group["params"] if p in self._packs]:
            self._give_back(self._packs[leaf], optimizer, group["params"])

    def _give_back(self, pack: Pack, optimizer: Optimizer, params: list[Any]) -> None:
        """Have `optimizer`, in the group of the list `params`, step on the parameters of a pack."""
        leaf = pack.leaf
        if leaf is None or self._packs.pop(leaf, None) is None:
            return
        state = optimizer.state.pop(leaf, None)
        for i, parameter in enumerate(pack.parameters):
            if state:
                optimizer.state[parameter] = _state_of_part(state, pack, i, clone=True)
        pack.drop_leaf()
        self._arrange(params)

    def _home(self, pack: Pack) -> tuple[Optimizer, Group] | str:
        homes = {
            id(group): (optimizer, group)
            for optimizer in self._optimizers
            if not hasattr(optimizer, "optimizers")
            for group in optimizer.param_groups
            if any(p in set(pack.parameters) for p in group["params"])
        }
        if len(homes) != 1:
            return "its parameters are in no, or in several, parameter groups"
        optimizer, group = next(iter(homes.values()))
        if not set(pack.parameters) <= set(group["params"]):
            return "some of its parameters are in no parameter group"
        return optimizer, group

    # State dicts, as they would be without packs.

    def _watch(self) -> None:
        if not self._handles:
            for optimizer in self._optimizers:
                self._handles += [
                    optimizer.register_state_dict_post_hook(self._unpack_state_dict),
                    optimizer.register_load_state_dict_pre_hook(self._pack_state_dict),
                ]

    def _unpack_state_dict(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        states: dict[int, Any] = {}
        groups: list[Group] = []
        number = 0
        for group, entry in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            by_parameter = self._states_by_parameter(group, entry, saved["state"])
            original = self._original.get(id(group["params"]), group["params"])
            groups.append(entry | {"params": list(range(number, number + len(original)))})
            for parameter in original:
                if parameter in by_parameter:
                    states[number] = by_parameter[parameter]
                number += 1
        return saved | {"state": states, "param_groups": groups}

    def _states_by_parameter(
        self, group: Group, entry: Group, states: dict[int, Any]
    ) -> dict[torch.Tensor, Any]:
        found: dict[torch.Tensor, Any] = {}
        for tensor, number in zip(group["params"], entry["params"], strict=True):
            if number not in states:
                continue
            pack = self._packs.get(tensor)
            if pack is None:
                found[tensor] = states[number]
                continue
            for i, parameter in enumerate(pack.parameters):
                found[parameter] = _state_of_part(states[number], pack, i, clone=False)
        return found

    def _pack_state_dict(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        states: dict[int, Any] = {}
        groups: list[Group] = []
        number = 0
        for group, entry in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            original = self._original.get(id(group["params"]), group["params"])
            if len(original) != len(entry["params"]):
                return saved  # not of this optimizer: it says so itself
            numbers = dict(zip(original, entry["params"], strict=True))
            params = group["params"]
            groups.append(entry | {"params": list(range(number, number + len(params)))})
            for tensor in params:
                pack = self._packs.get(tensor)
                members = pack.parameters if pack is not None else (tensor,)
                parts = [saved["state"].get(numbers[p]) for p in members]
                if pack is not None and all(parts):
                    states[number] = _joined(parts, pack)
                elif pack is None and parts[0] is not None:
                    states[number] = parts[0]
                number += 1
        return saved | {"state": states, "param_groups": groups}


def _flatten(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    for optimizer in optimizers:
        yield optimizer
        yield from _flatten(getattr(optimizer, "optimizers", ()))


def _objection(optimizer: Optimizer, group: Group, pack: Pack) -> str | None:
    if type(optimizer) not in _ELEMENTWISE:
        return f"{type(optimizer).__name__} is not known to update element by element"
    if not pack.parameters[0].requires_grad:
        return "its parameters are frozen"
    if not pack.parameters[0].dim():
        return "its parameters are single numbers, as is some of the optimizer's state"
    eps = torch.tensor(group.get("eps", 1.0), dtype=pack.whole.dtype)
    if pack.is_padded and not eps:
        return "between its parameters 0 would be divided by eps, which is 0 in their type"
    for parameter in pack.parameters:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or hooks:
            return "a parameter has hooks"
    return None


def _join_states(optimizer: Optimizer, pack: Pack) -> dict[str, Any] | str:
    """The state of the whole pack; empty before the first step; or why there is none."""
    states = [optimizer.state.get(p) for p in pack.parameters]
    if not any(states):
        return {}
    if not all(states):
        return "some of its parameters have been updated and others not"
    present = [state for state in states if state]
    first = present[0]
    for name, value in first.items():
        per_element = isinstance(value, torch.Tensor) and value.shape == pack.parameters[0].shape
        if not per_element and any(not _equal(state.get(name), value) for state in present):
            return "its parameters have made different numbers of steps"
    return _joined(present, pack)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


def _joined(states: Sequence[Any], pack: Pack) -> dict[str, Any]:
    shape = pack.parameters[0].shape
    return {
        name: joined([state[name] for state in states], pack)
        if isinstance(value, torch.Tensor) and value.shape == shape
        else value
        for name, value in states[0].items()
    }


def _state_of_part(state: dict[str, Any], pack: Pack, index: int, clone: bool) -> dict[str, Any]:
    """One parameter's share; what all share, such as the number of steps, becomes its own copy."""

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape != pack.whole.shape:
            return value.clone()
        share = pack.parts[index].of(value)
        return share.clone() if clone else share

    return {name: part(value) for name, value in state.items()}
