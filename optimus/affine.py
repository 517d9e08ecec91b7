"""Scale and shift of norms that are merged: each member brings its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.merging import Merged
from optimus.ops import arguments
from optimus.stacking import path_of, plan_stack, rank_of

HALF = (torch.float16, torch.bfloat16)


def is_shared(group: Sequence[Node], *names: str) -> bool:
    """Whether all members are given the same tensors (or none) by these names."""
    first = arguments(group[0]) or {}
    for node in group[1:]:
        values = arguments(node) or {}
        for name in names:
            one, other = first[name], values[name]
            if one is not other and path_of(one) != path_of(other):
                return False
    return True


def apply_affine(
    edit: Editor,
    group: Sequence[Node],
    merged: Merged,
    normalize: Callable[[Node], Node],
) -> Node:
    """The members' norms with scale and shift of their own: `normalize` of the merged input, times
    stacked "weight", plus stacked "bias".

    Where the result is a half type the norm is computed in float32 and rounded once at the end, as
    the fused kernel does it.
    """
    first = tensor_of(group[0])
    assert first is not None
    rounds = first.dtype in HALF
    x = merged.inputs[0]
    out = normalize(edit.call("to", x, dtype=torch.float32) if rounds else x)
    for name, combine in (("weight", "mul"), ("bias", "add")):
        given = [v for node in group if (v := (arguments(node) or {}).get(name)) is not None]
        if given:
            out = edit.call(combine, out, _in_line(edit, given, merged))
    return edit.call("to", out, dtype=first.dtype) if rounds else out


def _in_line(edit: Editor, given: Sequence[Node], merged: Merged) -> Node:
    """One vector for each member, stacked so that they broadcast to the members."""
    node = plan_stack(given).build(edit).at(edit, 0)
    for _ in range(-1 - merged.at - rank_of(given[0])):
        node = edit.call("unsqueeze", node, 1)
    return node
