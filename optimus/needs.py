"""What a pattern that never fires on a graph would have needed: found by trying.

One pattern's input form is often what another makes, so a selection without that other starves it.
Which others those are depends on the graph; it is found here by rewriting copies of the graph with
more patterns selected, and with fewer again until none of them can be spared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Fires = Callable[[Sequence[str]], int]
"""How often the pattern in question fires when the patterns named here are selected, too."""

SECONDS = 20.0
"""How long to go on looking, for each pattern and graph."""


def needed(fires: Fires, others: Sequence[str]) -> tuple[str, ...] | None:
    """Those of `others`, in order, without any of which the pattern would not fire at all.

    None when it does not fire with all of them either. When the time is up, those that are left may
    be more than are needed.
    """
    end = time.monotonic() + SECONDS

    def fires_with(names: Sequence[str]) -> bool:
        return fires(sorted(names, key=list(others).index)) > 0

    def least(base: Sequence[str], rest: Sequence[str], was_split: bool) -> tuple[str, ...]:
        """A smallest part of `rest` that makes it fire with `base` (the QuickXplain algorithm)."""
        if time.monotonic() > end:
            return tuple(rest)
        if was_split and fires_with(base):
            return ()
        if len(rest) == 1:
            return tuple(rest)
        half = len(rest) // 2
        first, second = rest[:half], rest[half:]
        from_second = least([*base, *first], second, True)
        from_first = least([*base, *from_second], first, bool(from_second))
        return (*from_first, *from_second)

    if not others or not fires_with(others):
        return None
    return tuple(sorted(least((), others, False), key=list(others).index))
