"""Which inputs of a graph are the same tensors in each call: a recording reads them in place."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch


class ConstantInputs:
    """Watches the inputs of calls, before these are recorded.

    Any other tensor, or one that was written to in between, makes a position one to copy from, for
    good: such tensors come from an allocator that gives their memory to others, or from a loader.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[weakref.ref[torch.Tensor], int]] | None = None

    def see(self, inputs: Mapping[int, torch.Tensor]) -> None:
        """A call with these `inputs` at their positions."""
        self._last = {
            i: (weakref.ref(tensor), tensor._version)
            for i, tensor in inputs.items()
            if self._last is None or self._was_given(i, tensor)
        }

    def positions(self) -> frozenset[int]:
        """Where all calls gave one tensor."""
        return frozenset(self._last or ())

    def _was_given(self, i: int, tensor: torch.Tensor) -> bool:
        last = (self._last or {}).get(i)
        return last is not None and last[0]() is tensor and last[1] == tensor._version
