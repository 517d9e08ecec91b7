"""AUC, logloss, normalized entropy and calibration of binary tasks, from logits.

Everything is accumulated on the device in states of fixed size, so an update never waits for a
GPU, and a distributed sum of the states gives what one process with all samples would have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import Metric

NAMES = ("auc", "logloss", "ne", "calibration", "num_samples")

# Logits beyond +-16 (probabilities within 1.2e-7 of 0 or 1) share the outermost bins.
_LOGIT_RANGE = 16.0
_NUM_BINS = 1 << 18


class RecMetrics(Metric):
    """Metrics of `num_tasks` binary tasks over all samples given to `update`.

    `compute` gives, each of shape (num_tasks,) and float64:

    - `auc`: ties count one half. Not exact but binned: logits fall into `num_bins` equal bins over
      +-16 (1.2e-4 wide by default) and logits of one bin count as ties, so
      |binned - exact| <= sum over bins of p_b * n_b / (2 * P * N), with p_b of P positives and n_b
      of N negatives in bin b. That is some 1e-8 for a trained model; torchmetrics' exact AUROC
      would keep every prediction, and its binned one compares each of them with each threshold.
    - `logloss`: mean binary cross-entropy in nats.
    - `ne`: normalized entropy, logloss over the entropy of the base rate (He et al., ADKDD 2014,
      https://doi.org/10.1145/2648584.2648589); below 1 is better than the base rate.
    - `calibration`: sum of predictions over sum of labels, 1 is ideal.
    - `num_samples`.

    AUC and NE are NaN while there is one class only, calibration while there is no positive.
    """

    higher_is_better = None
    is_differentiable = False
    full_state_update = False

    histogram: Tensor
    sums: Tensor
    count: Tensor

    def __init__(self, num_tasks: int, num_bins: int = _NUM_BINS) -> None:
        super().__init__()
        self.num_tasks = num_tasks
        self.num_bins = num_bins
        counts = torch.zeros(2, num_tasks, num_bins, dtype=torch.int64)
        self.add_state("histogram", counts, dist_reduce_fx="sum")
        # Rows: cross-entropy, predictions, labels.
        sums = torch.zeros(3, num_tasks, dtype=torch.float64)
        self.add_state("sums", sums, dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: `logits` of any float type and `labels` in {0, 1}, both (B, num_tasks)."""
        if logits.shape != labels.shape or logits.shape[1:] != (self.num_tasks,):
            raise ValueError(
                f"logits are {tuple(logits.shape)} and labels {tuple(labels.shape)}, "
                f"both must be (batch, {self.num_tasks})"
            )
        logits, labels = logits.detach().float(), labels.float()
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        rows = torch.stack([losses, logits.sigmoid(), labels])
        self.sums += rows.sum(dim=1, dtype=torch.float64)
        self.count += labels.shape[0]
        index = self._bins(logits, labels).view(-1)
        self.histogram.view(-1).index_add_(0, index, torch.ones_like(index))

    def _bins(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Position of each sample's counter in the flat histogram, int64 (B, num_tasks)."""
        scaled = (logits + _LOGIT_RANGE) * (self.num_bins / (2 * _LOGIT_RANGE))
        # A NaN has no bin; it shows up as a NaN logloss.
        bins = scaled.nan_to_num(0.0).clamp(0, self.num_bins - 1).long()
        task = torch.arange(self.num_tasks, device=logits.device)
        return ((labels > 0.5).long() * self.num_tasks + task) * self.num_bins + bins

    def compute(self) -> dict[str, Tensor]:
        """Metrics by name, see the class."""
        loss, predictions, positives = self.sums
        total = self.count.double().expand(self.num_tasks)
        logloss = loss / total
        rate = positives / total
        entropy = -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate))
        nan = torch.full_like(rate, math.nan)
        return {
            "auc": self._auc(),
            "logloss": logloss,
            "ne": torch.where(entropy > 0, logloss / entropy, nan),
            "calibration": torch.where(positives > 0, predictions / positives, nan),
            "num_samples": total,
        }

    def _auc(self) -> Tensor:
        negatives, positives = self.histogram
        # Of integers, because CUDA has no deterministic cumsum of floats.
        below = negatives.cumsum(dim=1) - negatives
        pairs = negatives.sum(dim=1).double() * positives.sum(dim=1)
        return (positives * (below + negatives.double() / 2)).sum(dim=1) / pairs


def flatten(
    values: Mapping[str, Tensor], stage: str, tasks: Sequence[str], per_task: bool
) -> dict[str, Tensor]:
    """`RecMetrics.compute()` under the names they are logged by, float32 scalars on the CPU.

    `stage/auc` is the mean over tasks; with `per_task` and more than one task, `stage/auc/task`
    follows for each. On the CPU, because a logger or progress bar that reads a GPU tensor waits
    for the GPU each time. One device synchronisation.
    """
    names = [name for name in NAMES if name in values]
    table = torch.stack([values[name] for name in names]).cpu()
    flat = {f"{stage}/{name}": row.mean().float() for name, row in zip(names, table, strict=True)}
    if per_task and len(tasks) > 1:
        for name, row in zip(names, table, strict=True):
            if name != "num_samples":
                pairs = zip(tasks, row, strict=True)
                flat |= {f"{stage}/{name}/{task}": value.float() for task, value in pairs}
    return flat
