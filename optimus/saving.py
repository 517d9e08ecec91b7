"""What autograd keeps for the backward pass in eager mode, read off a call run on fake values."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Node

from optimus.legality import Legality, storages_of, value_of
from optimus.ops import name_of
from optimus.values import Unknown, evaluate, fake_mode_of, requires_grad


def is_saved(node: Node, legality: Legality, ignoring: tuple[str, ...] = ()) -> bool:
    """Whether the backward pass of a reader, or of one of a view of it, reads this memory.

    `ignoring`: operations of readers that do not count.
    """
    memory, pending = storages_of(value_of(node)), [node]
    while pending:
        for user in pending.pop().users:
            if memory & storages_of(value_of(user)):
                pending.append(user)
            elif name_of(user) not in ignoring and memory & storages_of(kept_by(user, legality)[0]):
                return True
    return False


def keeps_its_result(node: Node, legality: Legality) -> bool:
    """Whether a call's backward pass reads what the call returned."""
    kept, result = kept_by(node, legality)
    return bool(storages_of(kept) & storages_of(result))


def kept_by(node: Node, legality: Legality) -> tuple[list[Any], Any]:
    """What autograd keeps of a call, and the value that the call returned then."""
    kept: list[Any] = []
    mode = fake_mode_of(node.graph)
    if node.op != "call_function" or not callable(node.target) or mode is None:
        return kept, None
    if not requires_grad(value_of(node)):
        return kept, None

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            args, kwargs = node.args, dict(node.kwargs)
            value = evaluate(mode, legality.context(node), node.target, args, kwargs)
    except Unknown:  # then it is left as it is
        return [], None
    return kept, value
