"""What a run tells while it goes on: figures to loggers and progress bar, lines to the console."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from optimus import summary
from optimus.figures import Window
from optimus.heartbeat import Heartbeat
from optimus.takeover import Takeover

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

ON_PROGRESS_BAR = ("qps", "optimus/qps_gain")

SAID = logging.getLogger("optimus.said")
"""What is printed, for whoever wants it in a file: attach a handler."""
SAID.setLevel(logging.INFO)
SAID.propagate = False  # it is on the console already
SAID.addHandler(logging.NullHandler())


def say(trainer: Trainer, line: str) -> None:
    """Print a line on rank 0, above the progress bar, at once."""
    if not trainer.is_global_zero:
        return
    trainer.print(f"Optimus: {line}")
    sys.stdout.flush()  # what takes minutes is announced before it begins, also into a pipe
    SAID.info("Optimus: %s", line)


class Logbook:
    """Tells of one takeover. `told`: remarks that need not be repeated."""

    def __init__(self, takeover: Takeover, told: Iterable[str] = ()) -> None:
        self._takeover = takeover
        self._told = set(told)
        self._logged_step = takeover.step
        self._unlogged: Window | None = None
        self._heartbeat = Heartbeat()

    def begin_step(self, trainer: Trainer) -> None:
        """Before a training step: say so when it compiles something for the first time."""
        self._compiles(trainer, summary.compiling(self._takeover, self._told))

    def begin_evaluation(self, trainer: Trainer) -> None:
        """Before a validation, test or prediction, or its second batch: the same."""
        self._compiles(trainer, summary.compiling_evaluation(self._takeover, self._told))

    def end_wait(self) -> None:
        """What was announced is done, or will never be."""
        self._heartbeat.end()

    def _compiles(self, trainer: Trainer, lines: Sequence[str]) -> None:
        for line in lines:
            say(trainer, line)
        if lines:
            self._heartbeat.begin("compiling", functools.partial(say, trainer))

    def end_step(self, trainer: Trainer, windows: Sequence[Window]) -> None:
        """After a training step with new `windows`: say what is new, log if that is due."""
        self.end_wait()
        self._keep(windows)
        knew_gain = "gain" in self._told
        self.tell(trainer, bool(windows))
        tells_gain = "gain" in self._told and not knew_gain
        if windows and (self._is_due(trainer) or tells_gain):
            self._show(trainer, self._metrics())

    def end_epoch(self, trainer: Trainer, windows: Sequence[Window]) -> None:
        """Log the figures as they stand, wherever the last step of the epoch left them."""
        self._keep(windows)
        metrics = self._metrics()
        if not metrics:
            return
        self._show(trainer, metrics)

    def tell(self, trainer: Trainer, measured: bool) -> None:
        """Print what is new: the pattern table at the take-over, the gain, and remarks.

        `measured` says whether there are new windows.
        """
        takeover = self._takeover
        lines = summary.announcements(takeover, self._told, measured)
        if measured or lines or any(note not in self._told for note in takeover.notes):
            lines += [r for r in takeover.remarks() if r not in self._told]
            self._told.update(takeover.remarks())
        for line in lines:
            say(trainer, line)

    def _keep(self, windows: Sequence[Window]) -> None:
        if windows:
            self._unlogged = windows[-1]

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether to log: logging more often than asked for may cost more than a step."""
        since = self._takeover.step - self._logged_step
        every = getattr(trainer, "log_every_n_steps", 50)
        return since >= every or self._logged_step <= self._takeover.takeover_step

    def _metrics(self) -> dict[str, float]:
        """Of the last window that was not logged, which then is; empty if there is none."""
        window, self._unlogged = self._unlogged, None
        if window is None:
            return {}
        self._logged_step = self._takeover.step
        return summary.window_metrics(self._takeover, window)

    def _show(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """To the loggers at once, and to the progress bar and `callback_metrics`."""
        self._to_loggers(trainer, metrics)
        # Not by `log`, which takes half a millisecond for each number, more than a step may take
        # for all; and between epochs it has means over ranks and steps only.
        trainer.callback_metrics.update({n: torch.tensor(v) for n, v in metrics.items()})
        shown = {name: value for name, value in metrics.items() if name in ON_PROGRESS_BAR}
        trainer.progress_bar_metrics.update(shown)

    @staticmethod
    def _to_loggers(trainer: Trainer, metrics: dict[str, float]) -> None:
        # Lightning's own step for metrics; a private name, so with a public one to fall back on.
        step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
