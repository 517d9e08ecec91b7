"""The shared data module under a real Trainer: resume from any step, evaluation, bad settings."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from recsys.data import Batch, Schema, SparseFeature
from recsys.data.datamodule import RecDataModule
from recsys.data.source import MemorySource, Source, SplitSource
from tests import processes

NUM_TRAIN = 50


class Numbers(RecDataModule):
    """Rows that carry their own number as label: 50 to train on, 13 to validate, 9 to test."""

    @property
    def schema(self) -> Schema:
        return Schema(("d",), (SparseFeature("x", 100),))

    def source(self, split: str) -> Source:
        number = np.arange(72)[:, None].astype(np.float32)
        whole = MemorySource(("x",), number, number.astype(np.int32), number)
        start, stop = {"train": (0, 50), "val": (50, 63), "test": (63, 72)}[split]
        return SplitSource(whole, start, stop)


class Recorder(LightningModule):
    """Trains one weight; writes down the rows of every batch it was given."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, ...]] = []
        self.evaluated: list[int] = []
        self.fail_at = fail_at

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fail_at:
            raise RuntimeError("power cut")
        self.seen.append(rows(batch))
        return (self.weight - batch.labels.mean()) ** 2

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluated += rows(batch)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows(batch: Batch) -> tuple[int, ...]:
    return tuple(batch.labels[:, 0].int().tolist())


def trainer(folder: Path, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "enable_checkpointing": False,
    }
    return Trainer(**{**defaults, **options})


def every_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, ...]], Path]:
    folder = tmp_path_factory.mktemp("whole")
    module = Recorder()
    options = {"callbacks": [every_step(folder)], "enable_checkpointing": True}
    trainer(folder, **options).fit(module, datamodule=Numbers(batch_size=8))
    return module.seen, folder


def test_epochs_are_shuffled_and_full(whole_run: tuple[list[tuple[int, ...]], Path]) -> None:
    seen, _ = whole_run
    assert len(seen) == 18
    assert len(set(seen)) == 18
    for epoch in range(3):
        numbers = [n for batch in seen[6 * epoch : 6 * epoch + 6] for n in batch]
        assert len(set(numbers)) == 48
        assert max(numbers) < NUM_TRAIN


@pytest.mark.parametrize("step", [1, 5, 6, 7, 11, 12, 17])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_from_any_step(
    whole_run: tuple[list[tuple[int, ...]], Path], step: int, num_workers: int, tmp_path: Path
) -> None:
    seen, folder = whole_run
    module, data = Recorder(), Numbers(batch_size=8, num_workers=num_workers)
    trainer(tmp_path).fit(module, datamodule=data, ckpt_path=folder / f"step={step}.ckpt")
    assert module.seen == seen[step:]


@pytest.mark.parametrize("fail_at", [0, 4, 6, 9])
def test_resume_after_a_failure_within_a_step(
    whole_run: tuple[list[tuple[int, ...]], Path], fail_at: int, tmp_path: Path
) -> None:
    seen, _ = whole_run
    broken, path = trainer(tmp_path), tmp_path / "emergency.ckpt"
    with pytest.raises(RuntimeError, match="power cut"):
        broken.fit(Recorder(fail_at), datamodule=Numbers(batch_size=8))
    broken.save_checkpoint(path)
    module = Recorder()
    trainer(tmp_path).fit(module, datamodule=Numbers(batch_size=8), ckpt_path=path)
    assert module.seen == seen[fail_at:]


def test_resume_with_validation_within_the_epoch(tmp_path: Path) -> None:
    def fit(step: int | None) -> Recorder:
        module = Recorder()
        options = {"callbacks": [every_step(tmp_path)], "enable_checkpointing": True}
        fitter = trainer(tmp_path, val_check_interval=2, max_epochs=2, **options)
        path = tmp_path / f"step={step}.ckpt" if step else None
        fitter.fit(module, datamodule=Numbers(batch_size=8), ckpt_path=path)
        return module

    whole = fit(None)
    assert whole.evaluated == list(range(50, 63)) * 6
    for step in (2, 3, 6):
        assert fit(step).seen == whole.seen[step:]


def test_limited_epochs_draw_anew(tmp_path: Path) -> None:
    module = Recorder()
    limits = {"limit_train_batches": 2, "limit_val_batches": 1}
    trainer(tmp_path, **limits).fit(module, datamodule=Numbers(batch_size=8))
    assert len(set(module.seen)) == 6
    assert module.evaluated == list(range(50, 58)) * 3


def test_overfitting_repeats_its_batches(tmp_path: Path) -> None:
    module = Recorder()
    options = {"overfit_batches": 2, "max_epochs": 2}
    trainer(tmp_path, **options).fit(module, datamodule=Numbers(batch_size=8, shuffle="none"))
    assert module.seen == [tuple(range(8)), tuple(range(8, 16))] * 2


class Writer(Recorder):
    """Leaves what each rank saw in a file of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.seen))

    def on_test_end(self) -> None:
        (self.folder / f"test{self.global_rank}.json").write_text(json.dumps(self.evaluated))


TWO_RANKS = """
    import sys
    from pathlib import Path
    from tests.recsys.data.test_datamodule import Numbers, Writer, trainer
    folder = Path(sys.argv[1])
    two = trainer(folder, strategy="ddp", devices=2, max_epochs=1)
    two.fit(Writer(folder), datamodule=Numbers(batch_size=4))
    two.test(Writer(folder), datamodule=Numbers(batch_size=4), verbose=False)
"""


@pytest.mark.slow
def test_two_ranks_share_the_rows(
    whole_run: tuple[list[tuple[int, ...]], Path], tmp_path: Path
) -> None:
    seen, _ = whole_run
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TWO_RANKS))
    done = processes.run([sys.executable, program, tmp_path], forked=True)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    # Together the batches of 4 are the batches of 8 of one process.
    assert [tuple(a + b) for a, b in zip(*ranks, strict=True)] == seen[:6]
    tested = [json.loads((tmp_path / f"test{rank}.json").read_text()) for rank in (0, 1)]
    assert tested[0] + tested[1] == list(range(63, 72))


def test_testing_a_checkpoint_leaves_training_at_its_start(
    whole_run: tuple[list[tuple[int, ...]], Path], tmp_path: Path
) -> None:
    seen, folder = whole_run
    module, data = Recorder(), Numbers(batch_size=8)
    trainer(tmp_path).test(module, datamodule=data, ckpt_path=folder / "step=4.ckpt", verbose=False)
    assert module.evaluated == list(range(63, 72))
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    assert module.seen == seen[:6]


def test_resume_under_another_batch_size_is_refused(
    whole_run: tuple[list[tuple[int, ...]], Path], tmp_path: Path
) -> None:
    _, folder = whole_run
    with pytest.raises(ValueError, match="batch_size: 8 then, 4 now"):
        trainer(tmp_path).fit(
            Recorder(), datamodule=Numbers(batch_size=4), ckpt_path=folder / "step=4.ckpt"
        )


def test_state_without_a_trainer() -> None:
    first, second = Numbers(batch_size=8), Numbers(batch_size=8)
    batches = iter(first.train_dataloader())
    next(batches)
    second.load_state_dict(first.state_dict())
    follow = [rows(batch) for batch in batches]
    assert [rows(batch) for batch in second.train_dataloader()] == follow


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0, must be at least 1"),
        ({"eval_batch_size": -1}, "eval_batch_size is -1"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prefetch_batches": 0}, "prefetch_batches is 0"),
        ({"shuffle": "maybe"}, "must be one of rows, batches, none"),
    ],
)
def test_bad_settings_are_refused_at_once(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Numbers(**setting)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="batchsize"):
        Numbers(batchsize=8)
