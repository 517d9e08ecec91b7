"""Gradients of leaves behind a replayed graph: what autograd would do with them, in less time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from optimus.capture import Results
from optimus.packs import is_leaf_of_pack

_will_run = getattr(torch._C, "_will_engine_execute_node", None)  # a private name


def will_set(edges: Sequence[Any], at: Sequence[int], stand_in: int | None = None) -> list[bool]:
    """Of the leaves behind the edges `at`, whether this backward is to set their gradients.

    It is not where gradients are asked for by name. Behind the edge `stand_in` is a leaf that
    nobody can name: if it is to be set, all are.
    """
    if _will_run is None:
        return [False] * len(at)
    try:
        if stand_in is not None and _will_run(edges[stand_in][0]):
            return [True] * len(at)
        nodes = [edges[n][0] for n in at]  # none behind what was frozen meanwhile
        return [node is not None and _will_run(node) for node in nodes]
    except RuntimeError:  # in torch.autograd.grad
        return [False] * len(at)


def hidden(args: Sequence[Any], own: Sequence[bool], by_name: bool) -> set[int]:
    """Leaves that autograd is not told of, by position: of packs, which nobody can name, and
    beside them biases and scales of the model's `own`, unless gradients are asked for `by_name`.
    One tensor stands in for all, and takes a tenth of the time that each of them would.

    Where it cannot be told whether gradients are asked for by name, autograd has to know all.
    """
    packed = {i for i, a in enumerate(args) if is_leaf_of_pack(a)}
    if _will_run is None or not packed:
        return set()
    return packed if by_name else packed | set(small_leaves(args, own))


def small_leaves(args: Sequence[Any], own: Sequence[bool]) -> dict[int, nn.Parameter]:
    """Biases and scales that learn and have no hooks, by position."""
    return {i: a for i, a in enumerate(args) if own[i] and _is_small(a)}


def _is_small(value: Any) -> bool:
    if not isinstance(value, nn.Parameter) or value.dim() > 1:
        return False
    hooks = value._backward_hooks or value._post_accumulate_grad_hooks
    return value.is_leaf and value.requires_grad and not hooks


def hand_over(leaves: Sequence[torch.Tensor], gradients: Results) -> None:
    """What autograd would do, by autograd itself where it is more than to set a gradient."""
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None or not leaf.requires_grad:
            continue
        if is_bare(leaf):
            leaf.grad = gradient.data
        else:
            others.append((leaf, gradient.data))
    if others:
        torch.autograd.backward([leaf for leaf, _ in others], [given for _, given in others])


def is_bare(leaf: torch.Tensor) -> bool:
    """Whether autograd would set the gradient of `leaf` and do no more.

    Then it is set here: for each leaf that takes a tenth of the time that the engine takes.
    """
    return leaf.grad is None and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks


def move_out(parameters: Sequence[torch.Tensor], static: set[int]) -> None:
    """Gradients to be added to must not be where the next ones are written."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.data_ptr() in static:
            parameter.grad = parameter.grad.clone()
