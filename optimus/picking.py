"""Take some of many, in each step, without a line of Python for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any


def picker(at: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes those at these positions."""
    if len(at) > 1 and list(at) == list(range(at[0], at[-1] + 1)):
        return itemgetter(slice(at[0], at[-1] + 1))
    if len(at) > 1:
        return itemgetter(*at)
    return lambda values: [values[i] for i in at]
