"""Run BatchNorms on features of their own as one BatchNorm over all features.

Before: `[batch_norm(x_i, mean_i, var_i, w_i, b_i) for x_i in x.split(widths, 1)]`
After:  `batch_norm(x, cat(mean_i), cat(var_i), cat(w_i), cat(b_i)).split(widths, 1)`

Every feature has statistics of its own, so this is the same computation; in training the running
statistics are updated together and written back. Gains: one kernel for N, two for the statistics.
Costs: a small copy of statistics, scales and shifts, and of the inputs where they are stacked in
front of the batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from optimus.editor import Editor
from optimus.legality import tensor_of
from optimus.merging import Merged, arrange, call_again, input_of, merge
from optimus.ops import arguments
from optimus.pattern import Example, GroupPattern, Miss
from optimus.pieces import concat, split
from optimus.stacking import rank_of
from optimus.values import static_size

_VECTORS = ("running_mean", "running_var", "weight", "bias")


@dataclass(frozen=True)
class BatchBatchNorms(GroupPattern):
    """See the module's text."""

    anchors = ("batch_norm",)
    family = "horizontal"
    replaces_effects = True

    def key(self, node: Node) -> Hashable | Miss:
        x = tensor_of(input_of(node))
        if x is None or x.dim() < 2 or static_size(x, 1) is None:
            return Miss("its number of features is dynamic")
        return x.dim()

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        """No vector twice in one part: statistics that are shared are updated in turn."""
        seen: set[Node] = set()
        alone: list[list[Node]] = []
        apart: list[Node] = []
        for node in group:
            vectors = set(_vectors(node))
            if vectors & seen:
                alone.append([node])
            else:
                apart.append(node)
            seen |= vectors
        return arrange(apart, _inputs, _other_dims(group[0])) + alone

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        merged = merge(edit, group, _inputs, _other_dims(group[0]))
        x = _features_of_all(edit, merged, rank_of(input_of(group[0])))
        calls = [arguments(node) or {} for node in group]
        vectors = {
            name: concat(edit, [call[name] for call in calls], 0)
            for name in _VECTORS
            if calls[0][name] is not None
        }
        out = call_again(edit, group[0], input=x, **vectors)
        if calls[0]["training"]:
            _write_back(edit, calls, vectors)
        if not merged.sizes:
            out = edit.call("unflatten", out, 1, (len(group), _num_features(group[0])))
        parts = merged.take_apart(edit, out, None if merged.sizes else 1 - rank_of(out))
        for node, part in zip(group, parts, strict=True):
            edit.replace(node, part)

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(6, 9)
        return (
            Example("unequal widths", lambda: (_Norms([2, 3, 4]), (x,)), fires=1),
            Example("in eval mode", lambda: (_Norms([2, 3, 4]), (x,)), fires=1, train=False),
            Example("stacked", lambda: (_Stacked(3), (x,)), fires=1),
            Example("one module", lambda: (_Norms([3, 3, 3], shared=True), (x,)), fires=0),
        )


def _inputs(node: Node) -> list[Node]:
    return [input_of(node)]


def _num_features(node: Node) -> int:
    tensor = tensor_of(node)
    assert tensor is not None
    return int(tensor.shape[1])


def _vectors(node: Node) -> list[Node]:
    values = arguments(node) or {}
    return [values[name] for name in _VECTORS if values[name] is not None]


def _other_dims(node: Node) -> set[int]:
    """All dimensions but that of the features: statistics are taken over them."""
    rank = rank_of(input_of(node))
    return set(range(-rank, 0)) - {1 - rank}


def _features_of_all(edit: Editor, merged: Merged, rank: int) -> Node:
    """The merged input with the features of all members, in their order, on dimension 1."""
    x = merged.inputs[0]
    if merged.sizes:
        return x
    members = rank + 1 + merged.at
    if members != 1:
        x = edit.call("movedim", x, members, 1)
    return edit.call("flatten", x, 1, 2)


def _write_back(edit: Editor, calls: Sequence[dict[str, Any]], vectors: dict[str, Node]) -> None:
    """Give every member its part of the statistics that were updated together."""
    for name in ("running_mean", "running_var"):
        if name in vectors:
            sizes = [len(tensor) for call in calls if (tensor := tensor_of(call[name])) is not None]
            parts = split(edit, vectors[name], sizes, 0)
            for call, part in zip(calls, parts, strict=True):
                edit.call(torch.Tensor.copy_, call[name], part)


class _Norms(torch.nn.Module):
    def __init__(self, widths: Sequence[int], shared: bool = False) -> None:
        super().__init__()
        self.widths = list(widths)
        self.shared = shared
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(width) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(self.widths, 1)
        norms = [self.norms[0]] * len(parts) if self.shared else self.norms
        return torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], 1)


class _Stacked(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(
            torch.nn.BatchNorm1d(3, affine=False) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(1, (3, 3)).movedim(1, 0).unbind(0)
        return torch.stack([norm(part) for norm, part in zip(self.norms, parts, strict=True)], 1)
