"""Training metrics over a window of steps, at the cost of one small copy a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from recsys.metrics import RecMetrics

# Labels kept before they are counted: bounds the memory of long windows of large batches.
_MAX_PENDING = 1 << 20


class TrainWindow(nn.Module):
    """Keeps the steps since the last `reset` and computes their metrics on demand.

    Updating metrics costs about fifteen kernels, which a launch-bound training step would feel;
    so steps are only collected here and counted together when somebody asks.
    """

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.metrics = RecMetrics(num_tasks)
        self._pending: list[Tensor] = []
        self._num_pending = 0
        self._losses: list[tuple[int, Tensor]] = []

    def __len__(self) -> int:
        """Steps in the window."""
        return len(self._losses)

    def add(self, step: int, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a step: its number, scalar loss, and logits and labels (B, num_tasks)."""
        self._losses.append((step, loss.detach()))
        # A copy: a compiled model that runs as a CUDA graph overwrites its outputs, and labels that
        # are a part of what a batch was moved in would keep all of it.
        self._pending.append(torch.stack((logits.detach().to(labels.dtype), labels)))
        self._num_pending += labels.numel()
        if self._num_pending >= _MAX_PENDING:
            self._count()

    def _count(self) -> None:
        if self._pending:
            self.metrics.update(*torch.cat(self._pending, 1))
        self._pending, self._num_pending = [], 0

    def compute(self) -> dict[str, Tensor]:
        """`RecMetrics.compute` over the window, summed over all ranks: to be called on each."""
        self._count()
        return self.metrics.compute()

    def reset(self) -> None:
        """Begin a new window."""
        self.metrics.reset()
        self._pending, self._num_pending, self._losses = [], 0, []

    def first_non_finite(self) -> tuple[int, float] | None:
        """Step and loss of this rank's first NaN or infinite loss in the window, if any."""
        for step, loss in self._losses:
            if not math.isfinite(loss):
                return step, float(loss)
        return None
