"""Run linears of unequal shapes on slices of one tensor as one kernel.

Before: `[linear(x[:, start_i : start_i + K_i], W_i, b_i) for i in range(N)]`
After:  `grouped_linear(x, [W_i], [b_i], starts, "none").split(widths, 1)`

Gains: one launch for all shapes, one for all gradients of x and one for those of all weights; no
copy of a weight or an input. Costs: a Triton kernel in place of the library's GEMMs.
Needs: a matrix x and slices that do not overlap, of at least two shapes; that the kernel is
measured to be faster than one batched GEMM for each shape (knob `gate`: measure, always, never).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from kernels.grouped_linear import grouped_linear
from optimus.editor import Editor, Refused
from optimus.kernel_gate import GATES, Form, verdict
from optimus.legality import tensor_of
from optimus.merging import has_plain_parameters, input_of
from optimus.ops import arguments
from optimus.pattern import Example, GroupPattern, Miss
from optimus.pieces import Piece, piece_of, split, take


@dataclass(frozen=True)
class GroupLinears(GroupPattern):
    """See the module's text."""

    gate: str = "measure"

    anchors = ("linear",)
    family = "kernels"
    misfit = "no linear of another shape reads a slice beside its own"

    def __post_init__(self) -> None:
        if self.gate not in GATES:
            raise ValueError(f"unknown gate {self.gate!r}; valid: {', '.join(GATES)}")

    def key(self, node: Node) -> Hashable | Miss:
        piece = piece_of(input_of(node))
        source = None if piece is None else tensor_of(piece.source)
        if piece is None or source is None or source.dim() != 2 or piece.dim != 1 or piece.dropped:
            return Miss("its input is no slice of the columns of a matrix")
        if not piece.size or not has_plain_parameters(node):
            return Miss("its weight is no matrix of static height, or its bias no vector")
        # Said here, and not when a group stands: other patterns are then asked in the same pass.
        if self.gate == "never" or (self.gate == "measure" and not source.is_cuda):
            return Miss("switched off, or there is no GPU to run a kernel on")
        return (piece.source,)

    def arrange(self, group: Sequence[Node]) -> Sequence[Sequence[Node]]:
        """Slices in their order; those that overlap the one in front stay out."""
        end, apart, rest = 0, list[Node](), list[Node]()
        for node in sorted(group, key=lambda n: _slice(n).start):
            piece = _slice(node)
            (apart if piece.start >= end else rest).append(node)
            end = max(end, piece.stop)
        if len({_shape(node) for node in apart}) < 2:
            return [[node] for node in group]
        return [apart, *([node] for node in rest)]

    def rewrite(self, group: Sequence[Node], edit: Editor) -> None:
        pieces = [_slice(node) for node in group]
        calls = [arguments(node) or {} for node in group]
        weights = [call["weight"] for call in calls]
        biases = [call["bias"] for call in calls if call["bias"] is not None]
        starts = [piece.start for piece in pieces]
        source, first = pieces[0].source, starts[0]
        slower = verdict(self.gate, forms, starts, [source, *weights, *biases])
        if slower is not None:
            raise Refused(slower.reason)
        x = take(edit, Piece(source, 1, first, pieces[-1].stop - first))
        starts = [start - first for start in starts]
        target = torch.ops.kernels.grouped_linear.default
        out = edit.call(target, x, weights, biases, starts, "none")
        parts = split(edit, out, [_shape(node)[0] for node in group], 1)
        for node, part in zip(group, parts, strict=True):
            edit.replace(node, part)

    def ungated(self) -> GroupLinears:
        return replace(self, gate="always")

    @classmethod
    def examples(cls) -> Sequence[Example]:
        x = torch.randn(3, 12)
        return (
            Example("three shapes", lambda: (_Features([2, 6, 4]), (x,)), fires=1),
            Example("equal shapes", lambda: (_Features([4, 4, 4]), (x,)), fires=0),
            Example("3-D", lambda: (_Features([2, 6, 4]), (x[None].clone(),)), fires=0),
        )


def _slice(node: Node) -> Piece:
    piece = piece_of(input_of(node))
    assert piece is not None
    return piece


def _shape(node: Node) -> tuple[int, int]:
    """Height and width of the weight."""
    weight = tensor_of((arguments(node) or {})["weight"])
    assert weight is not None
    return weight.shape[0], _slice(node).size


def forms(*starts: int) -> tuple[Form, Form]:
    """The kernel, and a batched GEMM for each shape."""
    num = len(starts)

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return grouped_linear(x, parameters[:num], parameters[num:], offsets=starts)

    def plain(x: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:num], parameters[num:]
        places: dict[tuple[int, ...], list[int]] = {}
        for i, weight in enumerate(weights):
            places.setdefault(tuple(weight.shape), []).append(i)
        outs: dict[int, Tensor] = {}
        for (_, width), members in places.items():
            parts = torch.stack([x.narrow(1, starts[i], width) for i in members])
            out = parts @ torch.stack([weights[i] for i in members]).mT
            if biases:
                out = out + torch.stack([biases[i] for i in members])[:, None]
            outs |= dict(zip(members, out.unbind(), strict=True))
        return torch.cat([outs[i] for i in range(num)], 1)

    return ours, plain


class _Features(torch.nn.Module):
    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.widths = list(widths)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, 3) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.layers, x.split(self.widths, -1), strict=True)
        return torch.cat([layer(part).tanh() for layer, part in parts], -1)
