"""A trace of a few training steps, for chrome://tracing and Perfetto; and no profile at no cost."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler


class NoProfiler(PassThroughProfiler):
    """Lightning's profiler that records nothing, and makes no generator for it 70 times a step."""

    _nothing = contextlib.nullcontext()

    def profile(self, action_name: str) -> Any:
        """A context that does nothing, the same each time."""
        return self._nothing


class ProfileSteps(Callback):
    """Profile training steps [first_step, first_step + num_steps) and write `folder`/trace.json.

    `num_steps` 0 profiles nothing. One file a rank past the first: trace-rank1.json and so on.
    Raises ValueError for negative numbers.
    """

    def __init__(self, folder: str | Path, first_step: int = 100, num_steps: int = 0) -> None:
        if first_step < 0 or num_steps < 0:
            raise ValueError(
                f"first_step is {first_step} and num_steps {num_steps}, must be at least 0"
            )
        self.folder = Path(folder)
        self.first_step = first_step
        self.num_steps = num_steps
        self._profiler: torch.profiler.profile | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.num_steps and self._profiler is None and trainer.global_step == self.first_step:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step >= self.first_step + self.num_steps:
            self._finish(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    def _finish(self, trainer: Trainer) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self.num_steps = 0
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = f"-rank{trainer.global_rank}" if trainer.global_rank else ""
        profiler.export_chrome_trace(str(self.folder / f"trace{rank}.json"))
