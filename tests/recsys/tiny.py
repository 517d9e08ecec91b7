"""A small learnable data set and a model that draws random numbers, for tests of training.

As a program it trains one run, which tests kill and resume: `python -m tests.recsys.tiny --help`.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from recsys.data.datamodule import RecDataModule
from recsys.data.schema import Schema, SparseFeature
from recsys.data.source import MemorySource, Source
from recsys.models.dlrm import DLRM
from recsys.module import RecModule

SCHEMA = Schema(
    ("d0", "d1", "d2"),
    (SparseFeature("a", 40), SparseFeature("b", 30, "mean", 2.0)),
    ("click", "buy"),
)


class TinyData(RecDataModule):
    """Labels drawn from a random first-order teacher over `SCHEMA`."""

    def __init__(self, num_rows: int = 160, **loader: Any) -> None:
        super().__init__(**({"batch_size": 16} | loader))
        self.num_rows = num_rows

    @property
    def schema(self) -> Schema:
        return SCHEMA

    def source(self, split: str) -> Source:
        rng = np.random.default_rng(["train", "val", "test"].index(split))
        teacher = np.random.default_rng(7)
        tables = [teacher.normal(size=(f.num_embeddings, 2)) for f in SCHEMA.sparse]
        slope = teacher.normal(size=(3, 2))
        dense = rng.normal(size=(self.num_rows, 3)).astype(np.float32)
        ids = np.stack([rng.integers(n, size=self.num_rows) for n in (40, 30, 30)], axis=1)
        logits = dense @ slope + tables[0][ids[:, 0]] + tables[1][ids[:, 1:]].mean(axis=1)
        labels = rng.random((self.num_rows, 2)) < 1 / (1 + np.exp(-2 * logits))
        return MemorySource(
            SCHEMA.keys, dense, ids.astype(np.int32), labels.astype(np.float32), (1, 2)
        )


class NoisyDLRM(DLRM):
    """With dropout: a resumed run has to go on with the generators' state too."""

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema, embedding_dim=4, bottom_layers=(8,), over_layers=(8,))
        self.dense_arch.over_arch = nn.Sequential(nn.Dropout(0.2), self.dense_arch.over_arch)


def make_module(**options: Any) -> RecModule:
    options = {
        "sparse_optimizer": {"name": "rowwise_adagrad", "lr": 0.1, "warmup_steps": 5}
    } | options
    options = {"dense_optimizer": {"name": "adam", "lr": 0.01, "decay_steps": -1}} | options
    return RecModule(NoisyDLRM, SCHEMA, **options)


def make_trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "log_every_n_steps": 4,
        "num_sanity_val_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "accelerator": "cpu",
        "devices": 1,
    }
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), **(defaults | options))


def every_step(folder: Path, num_steps: int = 3, **options: Any) -> ModelCheckpoint:
    options = {"filename": "{step}", "save_top_k": -1} | options
    return ModelCheckpoint(folder, every_n_train_steps=num_steps, **options)


class LossTrace(Callback):
    """The loss of each optimizer step, by step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses[trainer.global_step] = float(outputs["loss"])


class KillAt(Callback):
    """SIGKILL in the middle of step `step`: nothing gets to clean up."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    # A resumed process need not be seeded as the first one was: all of it is in the checkpoint.
    seed_everything(1 if arguments.resume is None else 2, verbose=False)
    trace, module = LossTrace(), make_module()
    trainer = make_trainer(
        arguments.folder,
        every_step(arguments.folder, save_top_k=1, save_last=True),
        KillAt(arguments.kill_at),
        trace,
        val_check_interval=0.2,
        devices=arguments.devices,
        strategy="ddp" if arguments.devices > 1 else "auto",
    )
    trainer.fit(module, datamodule=TinyData(), ckpt_path=arguments.resume)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    result = {"losses": trace.losses, "weights": weights(module), "logged": logged}
    torch.save(result, arguments.folder / f"result-{trainer.global_rank}.pt")
    trainer.strategy.barrier()  # who waits for the first process waits for all results


if __name__ == "__main__":
    main()
