"""Whether the settings of an optimizer's parameter groups are what they were, at little cost."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

_OTHER = ("params", "lr")
"""What a replay reads anew, or is told otherwise of."""


class GroupSettings:
    """The settings of parameter groups but the rates: in `words`, to compare them."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        named = [item for g in groups for item in g.items() if item[0] not in _OTHER]
        self.words = tuple(
            (name, id(value) if isinstance(value, torch.Tensor) else repr(value))
            for name, value in named
        )
        # What can change in place is put in words each time.
        self._is_frozen = all(map(_is_frozen, (value for _, value in named)))
        self._values = [value for _, value in named]

    def still_hold(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether these are the same settings; where in doubt, not."""
        if not self._is_frozen:
            return False
        now = [v for g in groups for n, v in g.items() if n not in _OTHER]
        return len(now) == len(self._values) and all(map(is_, now, self._values))


def _is_frozen(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_frozen, value))
    return value is None or type(value) in (bool, int, float, str)
