"""Layers of a network side by side in one tensor (T, B, sum of widths)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor


def active_widths(weights: Sequence[Tensor], last: bool) -> list[int]:
    """Widths of the layers (T, Sl, Sl-1) that have an activation; `last`: the last one does."""
    widths = [w.shape[1] for w in weights]
    return widths if last else widths[:-1]


def starts(widths: Sequence[int]) -> list[int]:
    """The first column of each layer, and where the last one ends."""
    return [0, *accumulate(widths)]


def columns(side_by_side: Tensor, widths: Sequence[int], layer: int) -> Tensor:
    """The columns of one layer, a view."""
    return side_by_side.narrow(2, starts(widths)[layer], widths[layer])
