"""RecModule: trains any model of `recsys.models` with Lightning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from recsys.checkpoint import last_good_of, write_atomically
from recsys.data.batch import Batch
from recsys.data.schema import Schema
from recsys.lookup import LookupChoice, sparse_gradients_from
from recsys.metrics import RecMetrics, flatten
from recsys.models.base import RecModel
from recsys.optim import DENSE_OPTIMIZERS, JointOptimizer, OptimizerConfig, scheduler
from recsys.resume import restore_rng, save_rng, saved_rng
from recsys.window import TrainWindow

Config = OptimizerConfig | Mapping[str, Any]
_ON_PROGRESS_BAR = ("train/loss", "train/auc", "val/auc", "val/logloss", "val/ne")


class NonFiniteError(RuntimeError):
    """The loss or the weights are NaN or infinite; the message says since which step."""


class RecModule(LightningModule):
    """Binary cross-entropy on each task of `schema`, tables and dense layers optimised apart.

    `model` makes the model from the schema (`functools.partial(DLRM, embedding_dim=16)`).
    `task_weights` weigh the tasks' losses, which are then added; by default their mean is taken.
    `sparse_arch` says how the tables are looked up and updated: "tables" one by one, "fused" all
    together (`recsys.fused`), "auto" together wherever that changes no result. "fused" raises
    NotFusible before training where it would not train the same.

    Logged: `train/loss` of the step, and auc, logloss, ne, calibration and num_samples as
    `train/*` over the steps since the last log, `val/*` and `test/*` over all samples; means over
    the tasks, and for validation and test each task too. The GPU is waited for once every
    `log_every_n_steps`, not in between.

    Optimisation is automatic, with one `JointOptimizer` over the tables' and the dense layers' own
    optimizers. Lightning's automatic optimisation takes only one; manual optimisation would lose
    its gradient clipping (over all parameters together), accumulation and precision plugins, or
    rebuild them here.

    Raises NonFiniteError when the loss is NaN or infinite, at the next log at the latest, and
    before weights that are not finite would be saved: the last checkpoint stays good.
    """

    # What is worth compiling: lookups are bound by memory and their inputs are jagged. In training
    # the loss is compiled with the dense arch, elsewhere there is the dense arch alone.
    compile_targets = ("loss_and_logits", "model.dense_arch")

    def __init__(
        self,
        model: Callable[[Schema], RecModel],
        schema: Schema,
        *,
        sparse_optimizer: Config | None = None,
        dense_optimizer: Config | None = None,
        task_weights: Sequence[float] | None = None,
        sparse_arch: str = "auto",
    ) -> None:
        super().__init__()
        self.schema = schema
        self.lookup_choice = LookupChoice(sparse_arch)
        self.sparse_optimizer = OptimizerConfig.of(
            sparse_optimizer or OptimizerConfig("rowwise_adagrad", lr=0.02)
        )
        self.dense_optimizer = OptimizerConfig.of(dense_optimizer or OptimizerConfig("adam"))
        _expect_dense(self.dense_optimizer)
        weights = _weights(task_weights, schema.num_tasks)
        self.task_weights: Tensor | None
        # Plain values under the names of the arguments: loggers show them, and
        # load_from_checkpoint(path, model=..., schema=...) needs no more.
        self.save_hyperparameters(
            {
                "sparse_optimizer": asdict(self.sparse_optimizer),
                "dense_optimizer": asdict(self.dense_optimizer),
                "task_weights": weights,
            }
        )
        self.model = model(schema)
        self.register_buffer(
            "task_weights", None if weights is None else torch.tensor(weights), persistent=False
        )
        self.train_window = TrainWindow(schema.num_tasks)
        self.val_metrics = RecMetrics(schema.num_tasks)
        self.test_metrics = RecMetrics(schema.num_tasks)
        self._log_every_n_steps = 50
        self._fuses_tables = False
        self._has_sparse_gradients = False
        self._rng: dict[str, Any] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # The name of the hook that runs, which Lightning notes some forty times a step: a string,
        # so that Module's search among parameters and sub-modules, 2 us each time, finds nothing.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # Steps

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B, num_tasks)."""
        return self.model(batch.dense, batch.sparse)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Weighted sum over tasks of the mean binary cross-entropy, float32 scalar."""
        logits = logits.float()
        if self.task_weights is None:
            return binary_cross_entropy_with_logits(logits, labels)
        losses = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return (losses.mean(dim=0) * self.task_weights).sum()

    def loss_and_logits(
        self, dense: Tensor, embedded: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What a training step computes after the lookups: loss and logits (B, num_tasks).

        `dense` is (B, num_dense), `embedded` (B, F, D), `labels` (B, num_tasks). The logits are
        detached, so that backward is that of the loss and nothing else, and float32, as the loss.
        """
        logits = self.model.dense_arch(dense, embedded).float()
        return self.loss(logits, labels), logits.detach()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        embedded = self.model.sparse_arch(batch.sparse)
        loss, logits = self.loss_and_logits(batch.dense, embedded, batch.labels)
        self.train_window.add(self.global_step, loss, logits, batch.labels)
        if self._is_log_step(batch_idx):
            self._log({"train/loss": loss.detach().cpu()} | self._train_metrics(), on_step=True)
            self.train_window.reset()
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_metrics.update(self(batch), batch.labels)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.test_metrics.update(self(batch), batch.labels)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Probabilities (B, num_tasks), float32."""
        return self(batch).float().sigmoid()

    # Metrics

    def _is_log_step(self, batch_idx: int) -> bool:
        trainer = self.trainer
        every = trainer.accumulate_grad_batches
        steps_now = (batch_idx + 1) % every == 0 or trainer.is_last_batch
        return steps_now and (self.global_step + 1) % self._log_every_n_steps == 0

    def _train_metrics(self) -> dict[str, Tensor]:
        """Metrics of the training steps since the last log. Raises NonFiniteError."""
        if not len(self.train_window):
            return {}
        values = self.train_window.compute()
        flat = flatten(values, "train", self.schema.tasks, per_task=False)
        # Summed over all ranks, so that all of them stop, not the one with the bad batch alone.
        if not math.isfinite(flat["train/logloss"]):
            raise NonFiniteError(self._explain_loss())
        return flat

    def _log(self, values: Mapping[str, Tensor], on_step: bool) -> None:
        for name, value in values.items():
            on_bar = name in _ON_PROGRESS_BAR
            self.log(name, value, prog_bar=on_bar, on_step=on_step, on_epoch=not on_step)

    def on_train_start(self) -> None:
        self.train_window.reset()

    def on_train_epoch_end(self) -> None:
        self._train_metrics()

    def on_validation_start(self) -> None:
        # A bad loss is reported as one, and before time is spent on validating such weights.
        if self.trainer.state.fn == "fit":
            self._train_metrics()

    def on_validation_epoch_end(self) -> None:
        self._log_epoch(self.val_metrics, "val")

    def on_test_epoch_end(self) -> None:
        self._log_epoch(self.test_metrics, "test")

    def _log_epoch(self, metrics: RecMetrics, stage: str) -> None:
        values = metrics.compute()
        self._log(flatten(values, stage, self.schema.tasks, per_task=True), on_step=False)
        metrics.reset()

    # Optimisation

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        tables = list(self.model.sparse_arch.parameters())
        known = set(tables)
        layers = [p for p in self.model.parameters() if p not in known]
        # Made when the tables are on their device.
        if self._fuses_tables:
            sparse = self.model.sparse_arch.fuse(self.sparse_optimizer)
        else:
            sparse = self.sparse_optimizer.build(tables, "sparse", self._has_sparse_gradients)
        joint = JointOptimizer(sparse, self.dense_optimizer.build(layers, "dense"))
        total = 0.0
        if -1 in (self.sparse_optimizer.decay_steps, self.dense_optimizer.decay_steps):
            total = self.trainer.estimated_stepping_batches
        schedules = [c.schedule(total) for c in (self.sparse_optimizer, self.dense_optimizer)]
        return {
            "optimizer": joint,
            "lr_scheduler": {
                "scheduler": scheduler(joint, *schedules),
                "interval": "step",
                "name": "lr",
            },
        }

    def _choose_lookups(self) -> None:
        """How the tables are looked up and updated in this run, and what it says about it."""
        sparse = self.model.sparse_arch
        sparse.unfuse()
        self._fuses_tables = self.lookup_choice.fuses(
            self.sparse_optimizer, sparse.embedding_dim, self.trainer
        )
        limit = math.inf
        if not self._fuses_tables:
            limit = sparse_gradients_from(self.sparse_optimizer, self.trainer)
        tables = sparse.use_sparse_gradients(limit)
        self._has_sparse_gradients = bool(tables)
        if tables:
            # Said explicitly, or PyTorch warns that these checks are off by default.
            torch.sparse.check_sparse_tensor_invariants.disable()
            rank_zero_info(f"Sparse gradients for the large tables {', '.join(tables)}")

    # Checkpoints

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._choose_lookups()
        self._log_every_n_steps = max(1, getattr(self.trainer, "log_every_n_steps", 50))
        write_atomically(self.trainer)
        # Lightning's advice for values logged at the end of an epoch; these are summed over ranks.
        warnings.filterwarnings("ignore", "It is recommended to use `self.log\\('(val|test)/")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Only now: making the loaders' iterators and the validation before training draw random
        # numbers, which the run that wrote the checkpoint had drawn by then too.
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        bad = [name for name, value in self.state_dict().items() if not _is_finite(value)]
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            raise NonFiniteError(
                f"after step {self.global_step} these weights are not finite: "
                f"{', '.join(bad[:3])}{more}. {self._advice()}"
            )
        save_rng(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng = saved_rng(checkpoint)

    def _explain_loss(self) -> str:
        found = self.train_window.first_non_finite()
        where = f"is {found[1]} at step {found[0]}" if found else "is not finite on another rank"
        return f"the training loss {where}, noticed at step {self.global_step}. {self._advice()}"

    def _advice(self) -> str:
        kept = last_good_of(self.trainer)
        rates = [group["lr"] for o in self.trainer.optimizers for group in o.param_groups]
        return (
            f"Learning rates were {rates}: lower them, warm up for longer or clip gradients "
            "(trainer.gradient_clip_val), and look for NaN in the data. "
            + (f"The last good checkpoint is {kept}." if kept else "No checkpoint was written yet.")
        )


def _expect_dense(config: OptimizerConfig) -> None:
    if config.name not in DENSE_OPTIMIZERS:
        raise ValueError(
            f"{config.name} is for tables only, "
            f"the dense optimizer must be one of {', '.join(DENSE_OPTIMIZERS)}"
        )


def _weights(weights: Sequence[float] | None, num_tasks: int) -> list[float] | None:
    if weights is None:
        return None
    if len(weights) != num_tasks:
        raise ValueError(f"{len(weights)} task_weights for {num_tasks} tasks")
    return [float(weight) for weight in weights]


def _is_finite(value: Tensor) -> bool:
    # The largest magnitude keeps a NaN or infinity and needs no mask as large as the table.
    if not value.is_floating_point() or not value.numel():
        return True
    return math.isfinite(torch.linalg.vector_norm(value, ord=math.inf))
