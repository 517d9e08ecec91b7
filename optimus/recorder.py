"""Measure the phases of a training run, step by step.

An error in here ends the measuring, not the training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from optimus.figures import Phase, Window
from optimus.measure import (
    KernelProbe,
    ThroughputMeter,
    batch_size_of,
    clock_for,
    device_name,
    frames_compiled,
    memory_for,
    release_memory,
)
from optimus.settings import PhaseName, Settings
from optimus.targets import CompiledTargets, describe

COUNTS = ("graphs", "recompiles", "compile_seconds")


@dataclass
class _Open:
    """The phase being measured; `before` holds counts from before its targets counted."""

    record: Phase
    meter: ThroughputMeter
    compiled: CompiledTargets | None
    before: dict[str, float]
    discarded_before: int
    probe: KernelProbe | None = None
    seen: tuple[int, int] = (0, 0)


def _made(compiled: CompiledTargets | None) -> tuple[int, int]:
    """Counts of what takes a step more time than it would: graphs compiled or recorded."""
    graphs = compiled.graphs + compiled.recordings() if compiled else 0
    return graphs, frames_compiled()


class Recorder:
    """Keeps one record a phase. `note` is told what the user should know.

    `process` counts the resumes before this one's windows.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        world_size: int,
        note: Callable[[str], None],
    ) -> None:
        self.phases: dict[PhaseName, Phase] = {}
        self.process = 0
        self._settings = settings
        self._device = device
        self._world_size = world_size
        self._note = note
        self._open: _Open | None = None
        self._failed = False

    def begin_step(self, phase: PhaseName, step: int, compiled: CompiledTargets | None) -> None:
        """Call before training step `step` of `phase`, with the targets that are in place."""
        self._safely(self._begin_step, phase, step, compiled)

    def end_step(self, step: int, batch: Any) -> list[Window]:
        """Call after training step `step` on `batch`; the windows that can be read now."""
        return self._safely(self._end_step, step, batch) or []

    def interrupt(self) -> None:
        """What happens next is no training step and is not measured."""
        if self._open is not None:
            self._open.meter.interrupt()

    def read(self) -> list[Window]:
        """The full windows not read before, once the device has finished them."""
        return self._safely(self._read, True) or []

    def finish(self) -> list[Window]:
        """End the open phase; the windows not read before."""
        windows = self.read()
        self._open = None
        return windows

    def _safely(self, measure: Callable[..., Any], *args: Any) -> Any:
        if self._failed:
            return None
        try:
            return measure(*args)
        except Exception as error:  # no figure is worth a run
            self._note(f"measuring stopped: {describe(error)}")
            self._failed = True
            self._open = None
            return None

    def _begin_step(self, phase: PhaseName, step: int, compiled: CompiledTargets | None) -> None:
        if self._open is None or self._open.record.name != phase:
            self._read(True)
            self._open = self._start(phase, step, compiled)
        now = self._open
        if now.compiled is not compiled:  # the targets were found in the phase's first step
            now.compiled = compiled
        now.meter.begin_step()
        now.seen = _made(compiled)
        self._stop_counting(now)  # where the step before never ended
        if now.meter.steps_to_skip == 1 and now.record.kernels_per_step is None:
            self._start_counting(now)

    def _end_step(self, step: int, batch: Any) -> list[Window]:
        now = self._open
        if now is None:
            return []
        kernels = self._stop_counting(now)
        compiled = now.seen != _made(now.compiled)
        if kernels is not None and not compiled:
            now.record.kernels_per_step = kernels
        now.record.steps += 1
        now.meter.end_step(step, self._samples(batch, now.record), compiled)
        return self._read(False)

    def _start_counting(self, now: _Open) -> None:
        """Count the kernels of this step; a profiler that does not work costs that figure only."""
        now.record.kernels_note = KernelProbe.unavailable(self._device)
        if now.record.kernels_note:
            return
        try:
            now.probe = KernelProbe()
        except Exception as error:  # whatever a profiler may raise
            now.record.kernels_note = f"not counted: {describe(error)}"

    def _stop_counting(self, now: _Open) -> int | None:
        probe, now.probe = now.probe, None
        if probe is None:
            return None
        try:
            return probe.stop()
        except Exception as error:  # whatever a profiler may raise
            now.record.kernels_note = f"not counted: {describe(error)}"
            return None

    def _start(self, phase: PhaseName, step: int, compiled: CompiledTargets | None) -> _Open:
        release_memory(self._device)
        memory = memory_for(self._device)
        record = self._continued(
            phase,
            Phase(
                phase,
                runs=self._settings.runs(phase),
                device=device_name(self._device),
                world_size=self._world_size,
                first_step=step,
                memory_note=memory.note,
            ),
        )
        self.phases[phase] = record
        before = {c: getattr(record, c) - getattr(compiled, c, 0) for c in COUNTS}
        meter = ThroughputMeter(
            clock_for(self._device),
            memory,
            self._settings.warmup_steps,
            self._settings.window,
        )
        return _Open(record, meter, compiled, before, record.windows_discarded)

    def _continued(self, phase: PhaseName, new: Phase) -> Phase:
        """The stored record of the same phase, if this run adds to it like for like; else `new`."""
        stored = self.phases.get(phase)
        if stored is None:
            return new
        for what in ("runs", "device", "world_size", "memory_note"):
            then, now = getattr(stored, what), getattr(new, what)
            if then != now:
                label = what.replace("_", " ")
                self._note(f"the {phase} figures begin anew: {label} was {then!r}, is {now!r}")
                return new
        if stored.source == "checkpoint":
            stored.source = "checkpoint and this process"
        return stored

    def _samples(self, batch: Any, record: Phase) -> int:
        """Samples of all ranks in this step; 1 where batches do not tell their size."""
        given = self._settings.batch_size
        if callable(given):
            size: int | None = given(batch)
        else:
            size = given or batch_size_of(batch)
        if size is not None:
            return size * self._world_size
        record.unit = "steps/s"
        self._note("the batch does not tell its size; give batch_size= to get samples a second")
        return 1

    def _read(self, wait: bool) -> list[Window]:
        """Move what the meter has finished, and the counts so far, to the phase's record."""
        now = self._open
        if now is None:
            return []
        windows = now.meter.finished(wait)
        for window in windows:
            now.record.add(replace(window, process=self.process))
        now.record.windows_discarded = now.discarded_before + now.meter.discarded
        if now.compiled is not None:
            for count, before in now.before.items():
                setattr(now.record, count, before + getattr(now.compiled, count))
        return windows
