"""Measure a training loop while it runs: samples a second, peak memory, kernels a step.

Only warm steps are measured, over windows of consecutive steps; a window in which anything was
compiled is thrown away. On a GPU the steps are timed with CUDA events that are read when they are
done: measuring never makes the host wait for the device inside a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from optimus.figures import Window

SETTLE_STEPS = 2
"""Steps left out after one that compiled: in them buffers are made and CUDA graphs recorded."""


class Clock(Protocol):
    """Marks points in time and tells the seconds between two of them."""

    def mark(self) -> Any:
        """A point in time: now, on the device's own time line where it has one."""
        ...

    def reached(self, mark: Any) -> bool:
        """Whether `mark` lies in the past, so that it can be read without waiting."""
        ...

    def wait(self, mark: Any) -> None:
        """Block until `mark` is reached."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds from `begin` to `end`, both reached."""
        ...


class HostClock:
    """Host time; right where the host does the work or waits for it."""

    def mark(self) -> float:
        """Now, in seconds of `time.perf_counter`."""
        return time.perf_counter()

    def reached(self, mark: float) -> bool:
        """Always: host time is read at once."""
        return True

    def wait(self, mark: float) -> None:
        """Nothing to wait for."""

    def seconds(self, begin: float, end: float) -> float:
        """Seconds from `begin` to `end`."""
        return end - begin


class CudaClock:
    """Device time, from events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        """An event that the device reaches after all work queued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has got there."""
        return mark.query()

    def wait(self, mark: torch.cuda.Event) -> None:
        """Block until the device has got there."""
        mark.synchronize()

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Seconds of device time between the two events."""
        return begin.elapsed_time(end) / 1e3


class PeakMemory(Protocol):
    """The peak memory since the last reset. `note` says how it is taken."""

    note: str

    def reset(self) -> None:
        """Begin anew from what is in use now."""
        ...

    def sample(self) -> None:
        """Called after every step, for a probe that cannot see peaks by itself."""
        ...

    def read(self) -> dict[str, int]:
        """Bytes by kind since the last reset; empty where it cannot be told."""
        ...


class CudaMemory:
    """The caching allocator's peaks on one device: bytes handed out and bytes held."""

    note = "peak of PyTorch's CUDA allocator in the window"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        """Reset the allocator's peak counters."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def sample(self) -> None:
        """Nothing to do: the allocator keeps its own peaks."""

    def read(self) -> dict[str, int]:
        """Peak bytes allocated and reserved since the last reset."""
        # As they are kept: to name some hundred figures one by one takes most of the time.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return {kind: stats[f"{kind}_bytes"]["all"]["peak"] for kind in ("allocated", "reserved")}


class HostMemory:
    """The process's peak resident size, which Linux lets a process reset for itself.

    Where it does not (no /proc, or not permitted) the resident size after each step is the next
    best figure; it misses peaks inside a step, and `note` says so.
    """

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self._sampled = 0
        self._resettable = self._try_reset() and self._field("VmHWM") > 0
        if self._resettable:
            self.note = "peak resident size of the process in the window"
        elif self._field("VmRSS"):
            self.note = (
                "resident size of the process after each step (its peak cannot be reset here, "
                "so peaks inside a step are not seen)"
            )
        else:
            self.note = "this system does not tell a process its resident size"

    def reset(self) -> None:
        """Begin a new peak."""
        self._sampled = 0
        if self._resettable:
            self._try_reset()

    def sample(self) -> None:
        """Look at the resident size, where the peak itself cannot be reset."""
        if not self._resettable:
            self._sampled = max(self._sampled, self._field("VmRSS"))

    def read(self) -> dict[str, int]:
        """Peak resident bytes since the last reset."""
        peak = self._field("VmHWM") if self._resettable else self._sampled
        return {"resident": peak} if peak else {}

    def _try_reset(self) -> bool:
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def _field(self, name: str) -> int:
        try:
            status = (self._proc / "status").read_text()
        except OSError:
            return 0
        kib = [line.split()[1] for line in status.splitlines() if line.startswith(name + ":")]
        return int(kib[0]) * 1024 if kib else 0


def clock_for(device: torch.device) -> Clock:
    """The clock that times steps on `device`."""
    return CudaClock() if device.type == "cuda" else HostClock()


def memory_for(device: torch.device) -> PeakMemory:
    """The probe of the memory that training on `device` uses."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


def device_name(device: torch.device) -> str:
    """What figures of this device are comparable with: its model name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def release_memory(device: torch.device) -> None:
    """Give back what an earlier phase left behind, so that the next peaks are of the next phase."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


@dataclasses.dataclass
class _Closed:
    """A full window whose marks the device may not have reached yet."""

    first_step: int
    marks: list[tuple[Any, Any]]
    samples: list[int]
    peak_memory: dict[str, int]


class ThroughputMeter:
    """Turns the begins and ends of training steps into windows.

    A step's duration runs from the end of the step before it, so loading and logging count; after
    an interruption (validation, a checkpoint, a new epoch) it runs from the step's own begin. The
    first `warmup_steps` steps are not measured. Windows are `window_steps` steps long and never
    contain a step that compiled.
    """

    def __init__(
        self, clock: Clock, memory: PeakMemory, warmup_steps: int, window_steps: int
    ) -> None:
        self.memory = memory
        self.discarded = 0
        self._clock = clock
        self._window_steps = window_steps
        self._skip = warmup_steps
        self._previous: Any = None
        self._first_step = 0
        self._marks: list[tuple[Any, Any]] = []
        self._samples: list[int] = []
        self._peaks: dict[str, int] = {}
        self._closed: list[_Closed] = []

    @property
    def steps_to_skip(self) -> int:
        """How many of the next steps are left out; 0 while a window is open."""
        return self._skip

    def begin_step(self) -> None:
        """Call before a training step."""
        if self._previous is None:
            self.memory.reset()
            self._previous = self._clock.mark()

    def end_step(self, step: int, samples: int, compiled: bool) -> None:
        """Call after training step number `step` on `samples` samples."""
        begin, self._previous = self._previous, self._clock.mark()
        self.memory.sample()
        if compiled:
            self.restart(SETTLE_STEPS)
        elif self._skip > 0:
            self._skip -= 1
            if self._skip == 0:
                self.memory.reset()
        elif begin is not None:
            self._add(step, samples, begin)

    def interrupt(self) -> None:
        """Something other than training happens next; the time and memory of it do not count."""
        if self._marks:
            self._peaks = self._peak_so_far()
        self._previous = None

    def restart(self, skip: int) -> None:
        """Throw the open window away and leave at least the next `skip` steps out."""
        self.discarded += bool(self._marks)
        self._skip = max(self._skip, skip)
        self._marks, self._samples, self._peaks = [], [], {}

    def finished(self, wait: bool = False) -> list[Window]:
        """Windows that can be read now, each once; with `wait` all full ones."""
        done: list[Window] = []
        while self._closed and (wait or self._clock.reached(self._closed[0].marks[-1][1])):
            done.append(self._read(self._closed.pop(0)))
        return done

    def _add(self, step: int, samples: int, begin: Any) -> None:
        if not self._marks:
            self._first_step = step
        self._marks.append((begin, self._previous))
        self._samples.append(samples)
        if len(self._marks) == self._window_steps:
            closed = _Closed(self._first_step, self._marks, self._samples, self._peak_so_far())
            self._closed.append(closed)
            self._marks, self._samples, self._peaks = [], [], {}
            self.memory.reset()

    def _peak_so_far(self) -> dict[str, int]:
        now = self.memory.read()
        return {kind: max(now.get(kind, 0), self._peaks.get(kind, 0)) for kind in now}

    def _read(self, closed: _Closed) -> Window:
        self._clock.wait(closed.marks[-1][1])
        seconds = [self._clock.seconds(begin, end) for begin, end in closed.marks]
        return Window.of(closed.first_step, closed.samples, seconds, closed.peak_memory)


class KernelProbe:
    """Counts the kernels that one training step launches on a CUDA device, with torch.profiler."""

    @staticmethod
    def unavailable(device: torch.device) -> str:
        """Why kernels cannot be counted now; empty when they can."""
        if device.type != "cuda":
            return "kernel launches are counted on CUDA devices only"
        if _profiler_running():
            return "another profiler was running"
        return ""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        torch.cuda.synchronize()
        self._profile.start()

    def stop(self) -> int:
        """End the profile; the number of kernels launched since the probe was made."""
        torch.cuda.synchronize()
        self._profile.stop()
        return count_kernels(cast("Iterable[Any]", self._profile.events()))


def count_kernels(events: Iterable[Any]) -> int:
    """Kernels among profiler events: device events without copies, fills and annotations."""
    return sum(_is_kernel(event) for event in events)


def _is_kernel(event: Any) -> bool:
    if event.device_type.name != "CUDA" or getattr(event, "is_user_annotation", False):
        return False
    return not event.name.startswith(("Memcpy", "Memset"))


def _profiler_running() -> bool:
    # A private name: where a release lacks it the probe is tried, and its failure is reported.
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", False))


def frames_compiled() -> int:
    """Frames that Dynamo compiled in this process so far, whoever asked for them."""
    # A private name: without it only Optimus's own compiles throw a window away.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["frames"]["total"]) if counters is not None else 0


def batch_size_of(batch: Any, depth: int = 6) -> int | None:
    """Samples in `batch`, or None when it does not tell.

    Dimension 0 of the first tensor found in nested containers and objects; an object's own
    `batch_size`, or the rows of its `dense`, or the stride of a KeyedJaggedTensor (its values have
    one row an id, not one a sample) come before its other attributes.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else None
    if depth == 0 or batch is None or isinstance(batch, (str, bytes, int, float, complex)):
        return None
    declared = _declared_batch_size(batch)
    if declared is not None:
        return declared
    found = (batch_size_of(part, depth - 1) for part in _parts(batch))
    return next((size for size in found if size is not None), None)


def _declared_batch_size(batch: Any) -> int | None:
    if all(callable(getattr(batch, name, None)) for name in ("stride", "lengths", "keys")):
        return int(batch.stride())
    size = getattr(batch, "batch_size", None)
    if isinstance(size, Sequence):
        sizes: Sequence[Any] = size
        size = sizes[0] if sizes else None
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    dense = getattr(batch, "dense", None)
    return batch_size_of(dense, 1) if isinstance(dense, torch.Tensor) else None


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        mapping: Mapping[Any, Any] = batch
        return mapping.values()
    if isinstance(batch, (list, tuple)):
        sequence: Sequence[Any] = batch
        return sequence
    if dataclasses.is_dataclass(batch):
        return [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    return list(cast("dict[str, Any]", getattr(batch, "__dict__", {})).values())
