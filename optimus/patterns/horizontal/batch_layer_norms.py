"""Run LayerNorms on parts of one tensor, or on one and the same tensor, as one LayerNorm.

Before: `[layer_norm(x_i, (D,), w_i, b_i) for x_i in x.split(D, 1)]`
After:  `(layer_norm(x.unflatten(1, (N, D)), (D,)) * stack(w_i) + stack(b_i)).unbind(1)`

What all read is normalized once, and then scaled and shifted for each. Gains: one kernel for N, and
one mean and variance of what is shared. Costs: a small copy of the scales and shifts where they
differ and are not stored together. Scale and shift are applied before the result is rounded to a
half type.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from optimus.affine import apply_affine, is_shared
from optimus.editor import Editor
from optimus.merging import Merged, arrange, call_again, input_of, merge
from optimus.ops import arguments
from optimus.pattern import Example, GroupPattern, Miss
from optimus.stacking import path_of, rank_of


@dataclass(frozen=True)
class BatchLayerNorms(GroupPattern):
    """See the module's text."""

    anchors = ("layer_norm",)
    family = "horizontal"

    def key(self, node: Node) -> Hashable | Miss:
        return rank_of(input_of(node))

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        """Those of parts of one tensor together; of the rest, those of one and the same."""
        runs = arrange(group, _inputs, _every_dim(group[0]))
        alone = [run[0] for run in runs if len(run) == 1]
        return [run for run in runs if len(run) > 1] + _on_one_input(alone)

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        behind = len((arguments(group[0]) or {})["normalized_shape"])
        if len({path_of(input_of(node)) for node in group}) == 1:
            x = input_of(group[0])
            merged = Merged((edit.call("unsqueeze", x, 0),), -1 - rank_of(x), len(group))
        else:
            merged = merge(edit, group, _inputs, _every_dim(group[0]), behind)
        if is_shared(group, "weight", "bias"):
            out = call_again(edit, group[0], input=merged.inputs[0])
        else:
            out = apply_affine(
                edit,
                group,
                merged,
                lambda x: call_again(edit, group[0], input=x, weight=None, bias=None),
            )
        for node, part in zip(group, merged.take_apart(edit, out), strict=True):
            edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 12)
        return (
            Example("features", lambda: (_Norms(3), (x,)), fires=1),
            Example("bf16", lambda: (_Norms(3).bfloat16(), (x.bfloat16(),)), fires=1),
            Example("one module", lambda: (_Norms(3, shared=True), (x,)), fires=1),
            Example("one input", lambda: (_Shared(3), (x,)), fires=1),
            Example("unequal eps", lambda: (_Norms(2, eps=(1e-5, 1e-3)), (x,)), fires=0),
        )


def _inputs(node: Node) -> list[Node]:
    return [input_of(node)]


def _on_one_input(nodes: Sequence[Node]) -> list[list[Node]]:
    """Members by input; alone what is only returned, and would have to be copied out again, and
    what uses a scale or shift of another one."""
    groups: dict[Hashable, list[Node]] = {}
    seen: set[Hashable] = set()
    for node in nodes:
        values = arguments(node) or {}
        own = {path_of(values[name]) for name in ("weight", "bias") if values[name] is not None}
        is_apart = not own or own & seen or all(user.op == "output" for user in node.users)
        groups.setdefault(node if is_apart else path_of(values["input"]), []).append(node)
        seen |= own
    return list(groups.values())


def _every_dim(node: Node) -> range:
    """No dimension is free: scale and shift tell members apart."""
    return range(-rank_of(input_of(node)), 0)


class _Norms(torch.nn.Module):
    def __init__(self, count: int, eps: Sequence[float] = (), shared: bool = False) -> None:
        super().__init__()
        every = eps or [1e-5] * count
        norms = [torch.nn.LayerNorm(12 // count, eps=e) for e in every]
        for i, norm in enumerate(norms):
            torch.nn.init.constant_(norm.weight, i + 0.7)
            torch.nn.init.constant_(norm.bias, 0.3 - i)
        self.norms = torch.nn.ModuleList(norms)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self.norms), 1)
        norms = [self.norms[0]] * len(parts) if self.shared else self.norms
        return torch.stack([norm(p) for norm, p in zip(norms, parts, strict=True)], 1)


class _Shared(torch.nn.Module):
    """Norms of one tensor, each with a scale and shift of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        norms = [torch.nn.LayerNorm(12) for _ in range(count)]
        for i, norm in enumerate(norms):
            torch.nn.init.constant_(norm.weight, i + 0.7)
        self.norms = torch.nn.ModuleList(norms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([norm(x).sin() for norm in self.norms], 1)
