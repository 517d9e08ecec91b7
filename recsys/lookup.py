"""How a run looks its embedding tables up: fused or one by one, with sparse or dense gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info

from recsys.fused import objection
from recsys.optim import OptimizerConfig

CHOICES = ("auto", "tables", "fused")
# Numbers in a table from which a step on sparse gradients is faster than one on dense ones. CPU:
# measured, one core, 4096 ids, D=16 (100k rows 4.0 against 9.1 ms, 1M rows 5.9 against 162 ms).
# CUDA: from its bandwidth, and because sparse gradients make the host wait for the GPU.
_SPARSE_FROM = {"cpu": 1 << 20, "cuda": 1 << 28}


class NotFusible(ValueError):
    """Fused tables were asked for in a run that they would not train as separate ones."""


class LookupChoice:
    """ "auto", "tables" or "fused", see `RecModule`. Raises ValueError for anything else."""

    def __init__(self, choice: str) -> None:
        if choice not in CHOICES:
            near = get_close_matches(str(choice), CHOICES, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"sparse_arch={choice!r} is unknown{hint} (one of {', '.join(CHOICES)})"
            )
        self.choice = choice

    def fuses(self, config: OptimizerConfig, embedding_dim: int, trainer: Trainer) -> bool:
        """Whether this run looks its tables up together. Raises NotFusible."""
        reasons = list(_objections(config, embedding_dim, trainer))
        if self.choice == "fused" and reasons:
            raise NotFusible(
                f"sparse_arch=fused updates the tables within the backward pass, and "
                f"{'; '.join(reasons)}: set sparse_arch=tables, or auto"
            )
        if self.choice == "auto" and reasons:
            rank_zero_info(f"The tables are looked up one by one: {'; '.join(reasons)}")
        return self.choice != "tables" and not reasons


def _objections(config: OptimizerConfig, embedding_dim: int, trainer: Trainer) -> Iterator[str]:
    """What of this run an update within the backward pass would pass by."""
    reason = objection(config, embedding_dim)
    if reason is not None:
        yield reason
    device = trainer.strategy.root_device.type
    if device not in {"cpu", "cuda"}:
        yield f"there is no such lookup on {device}"
    if trainer.gradient_clip_val:
        yield f"gradient_clip_val={trainer.gradient_clip_val} could not reach their gradients"
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.accumulate_grad_batches != 1 or any(
        isinstance(callback, GradientAccumulationScheduler) for callback in callbacks
    ):
        yield "accumulated gradients would be applied batch by batch"
    if trainer.world_size > 1:
        yield f"the gradients of {trainer.world_size} processes would not be averaged"
    if trainer.precision == "16-mixed":
        yield "the gradient scaler of precision=16-mixed could not undo its scale"


def sparse_gradients_from(config: OptimizerConfig, trainer: Trainer) -> float:
    """Numbers in a table from which it gets sparse gradients, looked up on its own.

    Sparse gradients for large tables, where they are faster and change rounding at most.
    """
    # Neither clipping by norm nor NCCL's all-reduce takes sparse gradients.
    possible = not trainer.gradient_clip_val and trainer.world_size == 1
    if not possible or not config.takes_sparse_gradients:
        return math.inf
    return _SPARSE_FROM.get(trainer.strategy.root_device.type, math.inf)
