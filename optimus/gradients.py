"""Which values receive a gradient in the backward pass.

A value may require a gradient and never get one: its only readers are detached, compared or run
under no_grad. In eager mode the parameters behind it then have no gradient at all (`grad is None`,
which an optimizer skips); merged with a value that gets one, they would have one of zeros (which
an optimizer with momentum or weight decay does not skip).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from optimus.effects import effects_of
from optimus.legality import storages_of, value_of


def differentiated(graph: Graph) -> set[Node]:
    """Nodes through which the backward pass goes if all that is returned gets a gradient."""
    found: set[Node] = set()
    memory: set[int] = set()  # what is read later on, and counts
    for node in reversed(graph.nodes):
        writes = effects_of(node).writes
        is_read = bool(writes) and not memory.isdisjoint(storages_of([*map(value_of, writes)]))
        if node.op == "output" or node in found or is_read:
            inputs = [n for n in node.all_input_nodes if _requires_grad(value_of(n))]
            found.update(inputs)
            memory |= storages_of([value_of(n) for n in inputs])
    return found


def _requires_grad(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_requires_grad, value))
    return isinstance(value, torch.Tensor) and value.requires_grad
