"""What every data module here shares: splits into loaders, sharding, read-ahead, exact resume."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn

from recsys.data.loader import BatchLoader
from recsys.data.plan import SHUFFLES, EvalPlan, TrainPlan
from recsys.data.schema import Schema
from recsys.data.source import Source

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class LoaderSettings:
    """How rows become batches; the same settings for every data module.

    `batch_size` is that of one rank. `eval_batch_size`: the same when None. `num_workers`:
    processes that make batches; None takes none on a CPU, whose cores are busy training, and up to
    4 on a GPU machine.
    `prefetch_batches`: batches each worker keeps ready. `shuffle`: see TrainPlan. `seed` fixes the
    order and every random choice of the data module.
    """

    batch_size: int = 4096
    eval_batch_size: int | None = None
    num_workers: int | None = None
    prefetch_batches: int = 4
    shuffle: str = "rows"
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least("batch_size", self.batch_size, 1)
        _at_least("eval_batch_size", self.eval_batch_size, 1)
        _at_least("num_workers", self.num_workers, 0)
        _at_least("prefetch_batches", self.prefetch_batches, 1)
        _at_least("seed", self.seed, 0)
        if self.shuffle not in SHUFFLES:
            raise ValueError(f"shuffle is {self.shuffle!r}, must be one of {', '.join(SHUFFLES)}")


class RecDataModule(LightningDataModule):
    """Base of the data modules. A subclass gives `schema` and, after `setup`, a source a split.

    Its keyword arguments that are not its own are those of LoaderSettings.
    """

    def __init__(self, **loader: Any) -> None:
        super().__init__()
        self.loader_settings = LoaderSettings(**loader)
        self._loaders: list[BatchLoader] = []
        self._train_loader: BatchLoader | None = None
        self._resume: dict[str, Any] | None = None

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """Features and tasks; known once `prepare_data` and `setup` have run, if not before."""

    @abstractmethod
    def source(self, split: str) -> Source:
        """Rows of "train", "val" or "test"; after `setup`."""

    def train_dataloader(self) -> BatchLoader:
        """Shuffled, sharded, resumable batches of the training split."""
        settings, source = self.loader_settings, self.source("train")
        rank, world_size = self._rank()
        plan = TrainPlan(
            len(source), settings.batch_size, settings.shuffle, settings.seed, rank, world_size
        )
        loader = self._loader(source, plan)
        if self._resume is not None:
            loader.load_state_dict(self._resume)
            self._resume = None
        self._train_loader = loader
        return loader

    def val_dataloader(self) -> BatchLoader:
        """Every validation row once, in order."""
        return self._eval_loader("val")

    def test_dataloader(self) -> BatchLoader:
        """Every test row once, in order."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> BatchLoader:
        """The test rows."""
        return self._eval_loader("test")

    def state_dict(self) -> dict[str, Any]:
        """Position in the training data: epoch, batches trained on, and the plan they belong to."""
        if self._train_loader is None:
            return {}
        return {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next training loader go on from a saved position."""
        # Lightning also loads it to validate or test a checkpoint, where nothing is resumed.
        if self._is_fitting() or self.trainer is None:
            self._resume = state_dict.get("train")

    def teardown(self, stage: str) -> None:
        """Stop the workers."""
        del stage
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()

    def _eval_loader(self, split: str) -> BatchLoader:
        settings, source = self.loader_settings, self.source(split)
        rank, world_size = self._rank()
        size = settings.eval_batch_size or settings.batch_size
        return self._loader(source, EvalPlan(len(source), size, rank, world_size))

    def _loader(self, source: Source, plan: TrainPlan | EvalPlan) -> BatchLoader:
        device = self._device()
        on_gpu = device is not None and device.type == "cuda"
        workers = self.loader_settings.num_workers
        loader = BatchLoader(
            source,
            plan,
            num_workers=_auto_workers(on_gpu) if workers is None else workers,
            prefetch_batches=self.loader_settings.prefetch_batches,
            device=device,
            num_consumed=self._num_trained if isinstance(plan, TrainPlan) else None,
        )
        self._loaders.append(loader)
        return loader

    def _rank(self) -> tuple[int, int]:
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def _device(self) -> torch.device | None:
        return self.trainer.strategy.root_device if self.trainer is not None else None

    def _is_fitting(self) -> bool:
        return self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING

    def _num_trained(self) -> int | None:
        # The loader counts what it handed out. A run stopped within a step has not trained on its
        # last batch; Lightning's own count, which it resumes from, says so.
        if self.trainer is None or not self._is_fitting():
            return None
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.processed


def _auto_workers(on_gpu: bool) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(4, max(0, (cores or 1) - 2)) if on_gpu else 0


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}, must be at least {least}")
