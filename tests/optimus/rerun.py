"""A recording for devices without CUDA graphs: the work itself, run again on the same memory."""

from __future__ import annotations

from typing import Any

import torch

from optimus.capture import CaptureError, Recorded, Results, Work


class Rerun:
    """Records on the CPU. Like a CUDA graph, it executes nothing when it records, and gives its
    results in the same memory each time, overwriting those before.

    `fails` is what the recording with that number raises.
    """

    device = torch.device("cpu")
    rate_type = torch.float64  # Python's numbers, so that results are equal to the last bit
    capturable = False  # a form that PyTorch has on accelerators only

    def __init__(self, fails: dict[int, str] | None = None) -> None:
        self.recorded = 0
        self._fails = fails or {}

    def pool(self) -> Any:
        """Not needed."""
        return None

    def record(self, work: Work, pool: Any) -> Recorded:
        """Keep the work for later."""
        self.recorded += 1
        if self.recorded in self._fails:
            raise CaptureError(self._fails[self.recorded])
        return _Rerun(work)


class _Rerun:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._results: Results | None = None

    def replay(self) -> Results:
        """Run the work, and put its results where the first ones are."""
        found = self._work()
        if self._results is None:
            self._results = _copies(found)
        else:
            for place, result in zip(self._results, found, strict=True):
                if isinstance(place, torch.Tensor):
                    place.copy_(result)
        return self._results


def _copies(results: Results) -> Results:
    """Copies that share memory with one another as the results do: a recording hands out these."""
    storages: dict[int, torch.UntypedStorage] = {}
    return [_copy(r, storages) if isinstance(r, torch.Tensor) else r for r in results]


def _copy(result: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    storage = result.untyped_storage()
    copied = storages.setdefault(storage._cdata, storage.clone())
    empty = torch.empty(0, dtype=result.dtype, device=result.device)
    return empty.set_(copied, result.storage_offset(), result.shape, result.stride())
