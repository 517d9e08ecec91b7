"""RecModule under Lightning: learns, logs, clips, compiles, and saves only what is good."""

from __future__ import annotations

import csv
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import binary_cross_entropy_with_logits

from recsys.data.batch import Batch
from recsys.metrics import RecMetrics, flatten
from recsys.models.dlrm import DLRM
from recsys.models.dlrm_dcnv2 import DLRMDCNv2
from recsys.models.mmoe import MMoE
from recsys.module import NonFiniteError, RecModule
from recsys.optim import DENSE_OPTIMIZERS, SPARSE_OPTIMIZERS
from tests import processes
from tests.recsys.tiny import SCHEMA, TinyData, every_step, make_module, make_trainer, weights

SMALL = {"embedding_dim": 8, "bottom_layers": (16,), "over_layers": (16,)}


def fit(
    folder: Path, module: RecModule, *callbacks: Callback, num_rows: int = 800, **trainer: Any
) -> dict[str, float]:
    """What was logged last under each name."""
    seed_everything(1, verbose=False)
    trained = make_trainer(folder, *callbacks, **trainer)
    trained.fit(module, datamodule=TinyData(num_rows=num_rows))
    return {name: float(value) for name, value in trained.callback_metrics.items()}


@pytest.mark.parametrize(
    "model",
    [
        partial(DLRM, **SMALL),
        partial(DLRMDCNv2, cross_rank=4, **SMALL),
        partial(MMoE, embedding_dim=8, encoder_dim=8, num_experts=2, expert_layers=(16,)),
    ],
    ids=["dlrm", "dlrm_dcnv2", "mmoe"],
)
def test_every_model_learns(tmp_path: Path, model: Any) -> None:
    module = RecModule(
        model, SCHEMA, sparse_optimizer={"name": "adam", "lr": 0.03}, dense_optimizer={"lr": 0.01}
    )
    logged = fit(tmp_path, module, max_epochs=4)
    assert logged["val/auc"] > 0.75
    assert logged["val/ne"] < 0.9


@pytest.mark.parametrize("name", SPARSE_OPTIMIZERS)
def test_every_sparse_optimizer_trains_the_tables(tmp_path: Path, name: str) -> None:
    module = make_module(sparse_optimizer={"name": name, "lr": 0.1})
    before = weights(module.model.sparse_arch)
    fit(tmp_path, module, max_steps=2)
    for key, value in module.model.sparse_arch.state_dict().items():
        assert not torch.equal(value, before[key])


@pytest.mark.parametrize("name", DENSE_OPTIMIZERS)
def test_every_dense_optimizer_trains_the_layers(tmp_path: Path, name: str) -> None:
    module = make_module(dense_optimizer={"name": name, "lr": 0.1})
    before = weights(module.model.dense_arch)
    fit(tmp_path, module, max_steps=2)
    changed = [not torch.equal(v, before[k]) for k, v in weights(module.model.dense_arch).items()]
    assert all(changed)


def test_logged_metrics_are_those_of_all_validation_samples(tmp_path: Path) -> None:
    module = make_module()
    logged = fit(tmp_path, module, max_epochs=1)
    module.eval()
    expected = RecMetrics(2)
    with torch.no_grad():
        for batch in TinyData(num_rows=800, batch_size=64).val_dataloader():
            expected.update(module(batch), batch.labels)
    values = flatten(expected.compute(), "val", SCHEMA.tasks, per_task=True)
    assert {k: v for k, v in logged.items() if k.startswith("val/")} == pytest.approx(
        {k: float(v) for k, v in values.items()}, rel=1e-5
    )
    assert logged["val/num_samples"] == 800
    assert set(values) >= {"val/auc", "val/logloss/click", "val/calibration/buy"}


def test_training_metrics_cover_the_steps_since_the_last_log(tmp_path: Path) -> None:
    losses: list[float] = []

    class Losses(Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            losses.append(float(args[2]["loss"]))

    # 10 batches an epoch, and a validation in the third window.
    logger = CSVLogger(tmp_path)
    fit(tmp_path, make_module(), Losses(), num_rows=160, logger=logger, max_steps=12)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [int(row["step"]) for row in rows] == [3, 7, 11]
    for row in rows:
        last = int(row["step"])
        assert float(row["train/loss"]) == pytest.approx(losses[last])
        window = sum(losses[last - 3 : last + 1]) / 4
        assert float(row["train/logloss"]) == pytest.approx(window, rel=1e-5)
        assert float(row["train/num_samples"]) == 64


def test_task_weights_weigh_the_losses() -> None:
    logits, labels = torch.randn(8, 2), torch.randint(2, (8, 2)).float()
    click, buy = (binary_cross_entropy_with_logits(logits[:, i], labels[:, i]) for i in (0, 1))
    assert float(make_module().loss(logits, labels)) == pytest.approx(float(click + buy) / 2)
    weighted = make_module(task_weights=(1, 0.25)).loss(logits, labels)
    assert float(weighted) == pytest.approx(float(click + buy / 4))


def test_gradients_are_clipped_over_tables_and_layers_together(tmp_path: Path) -> None:
    norms: list[float] = []

    class Norm(Callback):
        def on_before_zero_grad(self, trainer: Any, module: RecModule, optimizer: Any) -> None:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            if grads:
                norms.append(float(torch.nn.utils.get_total_norm(grads)))

    # Zeroing comes before backward, so the hook sees the clipped gradients of the step before.
    fit(tmp_path, make_module(), Norm(), max_steps=4, gradient_clip_val=1e-3, limit_val_batches=0)
    assert len(norms) == 3
    assert norms == pytest.approx([1e-3] * 3, rel=1e-2)


def test_accumulating_two_batches_equals_one_of_twice_the_size(tmp_path: Path) -> None:
    def weights_after(batch_size: int, accumulate: int) -> dict[str, torch.Tensor]:
        seed_everything(1, verbose=False)
        sgd = {"name": "sgd", "lr": 0.1}
        module = RecModule(
            partial(DLRM, **SMALL), SCHEMA, sparse_optimizer=sgd, dense_optimizer=sgd
        )
        trainer = make_trainer(
            tmp_path, max_steps=3, accumulate_grad_batches=accumulate, limit_val_batches=0
        )
        trainer.fit(module, datamodule=TinyData(batch_size=batch_size, shuffle="none"))
        return weights(module)

    torch.testing.assert_close(weights_after(8, 2), weights_after(16, 1))


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_large_tables_get_sparse_gradients_and_train_the_same(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> RecModule:
        seed_everything(1, verbose=False)
        module = make_module(sparse_optimizer={"name": name, "lr": 0.1}, sparse_arch="tables")
        fit(tmp_path, module, max_steps=6, limit_val_batches=0)
        return module

    def sparse(module: RecModule) -> list[bool]:
        return [bag.sparse for bag in module.modules() if isinstance(bag, torch.nn.EmbeddingBag)]

    dense = trained()
    # Table a has 40 rows of 4 numbers, b 30.
    monkeypatch.setattr("recsys.lookup._SPARSE_FROM", {"cpu": 130})
    mixed = trained()
    assert (sparse(dense), sparse(mixed)) == ([False, False], [True, False])
    torch.testing.assert_close(weights(mixed), weights(dense))


@pytest.mark.parametrize(
    ("module", "trainer"),
    [({"sparse_optimizer": {"name": "adam"}}, {}), ({}, {"gradient_clip_val": 1.0})],
    ids=["adam_would_differ", "clipping_needs_dense"],
)
def test_gradients_stay_dense_where_sparse_ones_would_not_do(
    tmp_path: Path, module: Any, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys.lookup._SPARSE_FROM", {"cpu": 0})
    trained = make_module(**module)
    fit(tmp_path, trained, max_steps=2, limit_val_batches=0, **trainer)
    assert all(p.grad is None or not p.grad.is_sparse for p in trained.parameters())


def test_the_dense_arch_compiled_in_place_trains_the_same(tmp_path: Path) -> None:
    plain, compiled = (RecModule(partial(DLRM, **SMALL), SCHEMA) for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    method, target = RecModule.compile_targets
    compiled.get_submodule(target).compile(backend="aot_eager", fullgraph=True)
    own = getattr(compiled, method)
    setattr(compiled, method, torch.compile(own, backend="aot_eager", fullgraph=True))
    expected = fit(tmp_path, plain, max_epochs=1)
    assert fit(tmp_path, compiled, max_epochs=1) == pytest.approx(expected, rel=1e-4)
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_bf16_mixed_trains_with_float32_weights(tmp_path: Path) -> None:
    module = make_module()
    logged = fit(tmp_path, module, max_epochs=1, precision="bf16-mixed")
    assert math.isfinite(logged["val/auc"])
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_test_and_predict(tmp_path: Path) -> None:
    module, trainer = make_module(), make_trainer(tmp_path)
    (logged,) = trainer.test(module, datamodule=TinyData(), verbose=False)
    assert logged["test/num_samples"] == 160
    assert "test/auc/buy" in logged
    batches: Any = trainer.predict(module, datamodule=TinyData())
    predictions = torch.cat(batches)
    assert predictions.shape == (160, 2)
    assert 0 <= float(predictions.min()) <= float(predictions.max()) <= 1


def test_load_from_checkpoint_needs_the_model_and_the_schema_only(tmp_path: Path) -> None:
    module = make_module(task_weights=[1, 2])
    fit(tmp_path, module, every_step(tmp_path), max_steps=3)
    model = type(module.model)
    twin = RecModule.load_from_checkpoint(tmp_path / "step=3.ckpt", model=model, schema=SCHEMA)
    assert twin.sparse_optimizer == module.sparse_optimizer
    assert dict(twin.hparams) == dict(module.hparams)
    for key, value in twin.state_dict().items():
        assert torch.equal(value, module.state_dict()[key])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dense_optimizer": {"name": "rowwise_adagrad"}}, "rowwise_adagrad is for tables only"),
        ({"sparse_optimizer": {"name": "adma"}}, "did you mean adam"),
        ({"task_weights": [1.0]}, "1 task_weights for 2 tasks"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_module(**options)


# Losses and weights that are not finite


class NanAt(Callback):
    """Make the dense features of one step NaN."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            batch.dense.fill_(math.nan)


def test_a_nan_loss_stops_the_run_naming_its_step(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"is nan at step 5, noticed at step 7.* No check"):
        fit(tmp_path, make_module(), NanAt(5), limit_val_batches=0)


def test_nan_weights_are_not_saved_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    checkpoint = every_step(tmp_path, save_top_k=1)
    with pytest.raises(NonFiniteError, match="after step 6 these weights are not finite") as caught:
        fit(tmp_path, make_module(), NanAt(4), checkpoint, log_every_n_steps=100)
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["step=3.ckpt"]
    assert "step=3.ckpt" in str(caught.value)
    kept = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert all(bool(value.isfinite().all()) for value in kept["state_dict"].values())


@pytest.mark.parametrize("trainer", [{"val_check_interval": 10}, {"limit_val_batches": 0}])
def test_a_nan_loss_is_found_before_validation_and_at_the_epochs_end(
    tmp_path: Path, trainer: dict[str, Any]
) -> None:
    with pytest.raises(NonFiniteError, match="at step 4"):
        fit(tmp_path, make_module(), NanAt(4), log_every_n_steps=1000, **trainer)


# Checkpoints on a full disk

_FULL_DISK = """
import resource, sys
from pathlib import Path
from lightning.pytorch import Callback
from tests.recsys.tiny import TinyData, every_step, make_module, make_trainer

class Fill(Callback):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 4:  # from here on no file may grow beyond 20 kB
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

folder = Path(sys.argv[1])
last = every_step(
    folder, save_top_k=1, filename="best", save_last=True, enable_version_counter=False
)
make_trainer(folder, Fill(), last).fit(make_module(), datamodule=TinyData())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_a_write_that_fails_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FULL_DISK, str(tmp_path)]
    done = processes.run(command, forked=True)
    assert done.returncode == 1
    assert "CheckpointWriteError: checkpoint" in done.stderr
    assert "File too large" in done.stderr
    assert f"The last good checkpoint is {tmp_path / 'last.ckpt'}" in done.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]
    for name in ("best.ckpt", "last.ckpt"):
        assert torch.load(tmp_path / name, weights_only=True)["global_step"] == 3
    make_trainer(tmp_path).fit(
        make_module(), datamodule=TinyData(), ckpt_path=str(tmp_path / "last.ckpt")
    )
