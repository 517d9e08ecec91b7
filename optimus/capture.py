"""Record work on a GPU as a CUDA graph, and leave the GPU as it was where that fails.

Recording executes nothing: it draws no random numbers and changes no weight. What was recorded
reads and writes the same memory in each replay; its results lie in memory of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from optimus.targets import describe

Results = list[torch.Tensor | None]
Work = Callable[[], Results]

WARM_UP = 3
"""How often the same must have run before it is recorded: by then all is compiled and made."""

MOST_RECORDINGS = 16
"""How often something is recorded anew, because it has changed, before it is left alone."""

MOST_CHANGES = 12
"""How many changes are waited for it to settle."""


class CaptureError(RuntimeError):
    """Work could not be recorded; the message says why. Nothing of it has been executed."""


class Recorded(Protocol):
    """Work that was recorded."""

    def replay(self) -> Results:
        """Run it again; the results are in the same memory each time."""
        ...


class Capture(Protocol):
    """Records work on one device.

    `rate_type` is the type of a learning rate on the device, and `capturable` whether optimizers
    are to be run in the form that PyTorch calls so.
    """

    device: torch.device
    rate_type: torch.dtype
    capturable: bool

    def pool(self) -> Any:
        """Memory for work that is replayed in the order it was recorded in."""
        ...

    def record(self, work: Work, pool: Any) -> Recorded:
        """Record `work`. Raises CaptureError."""
        ...


class CudaCapture:
    """Records CUDA graphs on `device`."""

    rate_type = torch.float32  # the type that PyTorch's fused kernels read
    capturable = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pool(self) -> Any:
        """A memory pool of PyTorch's allocator."""
        return torch.cuda.graph_pool_handle()

    def record(self, work: Work, pool: Any) -> Recorded:
        """Record on the side stream that PyTorch keeps for this. Raises CaptureError."""
        state = _DeviceState(self.device, pool)
        graph = torch.cuda.CUDAGraph()
        reason = ""
        try:
            # Other threads, such as one that pins batches, may go on allocating.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    results = work()
                except Exception as error:
                    # What ends the recording after it says less than this.
                    reason = describe(error)
                    raise
        except Exception as error:  # whatever it is: nothing has been executed
            state.restore()
            raise CaptureError(reason or describe(error)) from error
        return _CudaRecorded(graph, results)


class _CudaRecorded:
    def __init__(self, graph: torch.cuda.CUDAGraph, results: Results) -> None:
        self._graph = graph
        self._results = results

    def replay(self) -> Results:
        self._graph.replay()
        return self._results


class _DeviceState:
    """What a recording that fails midway would leave behind."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = pool
        self._stream = torch.cuda.current_stream(device)
        self._random = torch.cuda.get_rng_state(device)

    def restore(self) -> None:
        # PyTorch leaves its side stream only where the recording ended well.
        torch.cuda.set_stream(self._stream)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        # The allocator would go on putting off what waits for the end of recordings.
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(index, self._pool)  # a private name
        # A generator that believes to be recorded refuses to draw numbers: begin with a new state.
        with contextlib.suppress(Exception):
            generator = torch.cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())
        torch.cuda.set_rng_state(self._random, self._device)
        torch.cuda.synchronize(self._device)


def capture_for(device: torch.device) -> Capture | str:
    """What records work on `device`, or why nothing does."""
    if device.type != "cuda":
        return f"there are no CUDA graphs on {device.type}"
    return CudaCapture(device)


class Graphs(Protocol):
    """What runs as CUDA graphs of one model: optimus.step_graphs or optimus.model_graphs.

    `recordings` counts what has been recorded so far.
    """

    @property
    def recordings(self) -> int: ...

    def wrap(self, compiled: Callable[..., Any], fixed: Sequence[bool]) -> Callable[..., Any]:
        """What to call in place of a compiled graph; `fixed` marks the model's own inputs."""
        ...

    def install(self, optimizers: Iterable[Optimizer]) -> None:
        """Training with these optimizers begins."""
        ...

    def release(self) -> None:
        """Take everything out again."""
        ...

    def begin_step(self) -> None:
        """A training step begins."""
        ...

    def end_step(self) -> None:
        """It has ended: what runs now belongs to no training step."""
        ...

    def remarks(self) -> Iterator[str]:
        """What the user should know."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """What came of it, as plain data."""
        ...


class Part(Protocol):
    """Something of the training step that is recorded; `last_step` is when it was last replayed."""

    last_step: int

    def drop(self) -> None:
        """Forget what was recorded, and free its memory."""
        ...


class Settling:
    """Tells when something has run often enough in one way to be recorded.

    `changes` counts those since it was last replayed.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._seen: dict[Hashable, int] = {}
        self._last: Hashable = None
        self._row = 0

    def see(self, key: Hashable) -> None:
        """It ran as `key` says."""
        if key != self._last or not self._row:
            self.changes += 1
            self._last, self._row = key, 0
        self._row += 1
        self._seen[key] = self._seen.get(key, 0) + 1

    def is_settled(self, key: Hashable, instead: bool) -> bool:
        """Whether it has run like this `WARM_UP` times; in a row, if `instead` of a recording."""
        if instead:
            return self._row >= WARM_UP and key == self._last
        return self._seen.get(key, 0) >= WARM_UP

    def replayed(self) -> None:
        """What was recorded before is still in use."""
        self._row = self.changes = 0
        self._seen.clear()


class Session:
    """What all recordings of one model share.

    `active` is true within training steps. `failure` says why nothing is recorded or replayed any
    more. `notes` are reasons for which a part stays outside. `step` counts training steps, `parts`
    are what is recorded.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.active = False
        self.failure = ""
        self.recordings = 0
        self.notes: list[str] = []
        self.step = 0
        self.parts: list[Part] = []
        self.static: set[int] = set()
        """Addresses of gradients that lie in the memory of a recording."""

    def note(self, text: str) -> None:
        """Remember why a part stays outside."""
        if text not in self.notes:
            self.notes.append(text)

    def record(self, work: Sequence[Work]) -> list[Recorded]:
        """Record works that are replayed one after another. Raises CaptureError.

        What is not in use any more gives its memory back first.
        """
        for part in self.parts:
            if part.last_step < self.step - WARM_UP:
                part.drop()
        pool = self.capture.pool()
        recorded = [self.capture.record(each, pool) for each in work]
        self.recordings += 1
        return recorded

    def fail(self, reason: str) -> None:
        """Stop: what can be recorded and what not is known too badly by now."""
        self.failure = self.failure or reason
        self.active = False
