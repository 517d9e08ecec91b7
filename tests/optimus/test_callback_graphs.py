"""`cuda_graphs=step` in Lightning: the same training, to the last bit, with replayed steps in it.

Here a recording is run again on the CPU (tests.optimus.rerun); test_cuda_graphs.py has real ones.
"""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from optimus.callback import OptimusCallback
from tests.optimus.foreign_modules import Manual, Regressor, ResumableLoader, loader, trainer
from tests.optimus.rerun import Rerun

BATCHES = 16
START = 2  # the batch in which the optimised graph takes over


def optimus(graphs: str = "step", **given: Any) -> OptimusCallback:
    defaults: dict[str, Any] = {
        "baseline_steps": START,
        "warmup_steps": 1,
        "window": 2,
        "baseline": "eager",
        "inner": "aot_eager",
        "verify": False,
    }
    callback = OptimusCallback("batch_linears", cuda_graphs=graphs, **(defaults | given))  # type: ignore[arg-type]
    callback.capture = Rerun()
    return callback


class Trained(Regressor):
    """Dropout and a schedule: what a recording could freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net, nn.Dropout(0.3), nn.Linear(1, 1))  # type: ignore[assignment]
        self.rates: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("twice", 2 * loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Losses(pl.Callback):
    """What each training step gave, and what was logged in it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.logged += [float(trainer.callback_metrics[n]) for n in ("loss", "twice")]


Fitted = tuple[Losses, OptimusCallback, Regressor]


def fit(
    path: Path,
    graphs: str,
    make: type[Regressor] = Trained,
    odd: int = 0,
    **options: Any,
) -> Fitted:
    torch._dynamo.reset()
    torch.manual_seed(3)
    module, losses, callback = make(), Losses(), optimus(graphs)
    run = trainer(path, callback, losses, **options)
    run.fit(module, loader(BATCHES, odd), loader(2))
    run.save_checkpoint(path / "last.ckpt")
    return losses, callback, module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs with no special settings leave their checkpoints."""
    return tmp_path_factory.mktemp("usual")


@pytest.fixture(scope="module")
def off(folder: Path) -> Fitted:
    """The usual run without graphs."""
    return fit(folder / "off", "off")


@pytest.fixture(scope="module")
def step(folder: Path) -> Fitted:
    """The same with graphs."""
    return fit(folder / "step", "step")


def replays(callback: OptimusCallback) -> dict[str, int]:
    found = callback.summary()["cuda_graphs"]
    return {
        "graphs": sum(graph["replays"] for graph in found["graphs"]),
        "optimizers": sum(o["replays"] for o in found["optimizers"]),
    }


def test_the_usual_training_is_the_same_to_the_last_bit(off: Fitted, step: Fitted) -> None:
    assert_same(off, step, 11)


@pytest.mark.parametrize(
    ("options", "odd", "least"),
    [
        ({"accumulate_grad_batches": 2}, 0, 10),
        ({"gradient_clip_val": 0.1}, 3, 11),
        ({"val_check_interval": 5, "max_epochs": 2}, 0, 20),
    ],
)
def test_training_is_the_same_to_the_last_bit(
    tmp_path: Path, options: dict[str, Any], odd: int, least: int
) -> None:
    off = fit(tmp_path / "off", "off", odd=odd, **options)
    assert_same(off, fit(tmp_path / "step", "step", odd=odd, **options), least)


def assert_same(without: Fitted, with_graphs: Fitted, least: int) -> None:
    """Losses, logs, weights and rates are equal, and there were as many replays at least."""
    (off, _, plain), (step, callback, module) = without, with_graphs
    assert step.losses == off.losses
    assert step.logged == off.logged, "self.log gets the numbers of each step"
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert isinstance(module, Trained)
    assert isinstance(plain, Trained)
    assert module.rates == plain.rates
    assert all(isinstance(rate, float) for rate in module.rates)
    assert replays(callback)["graphs"] >= least
    assert not callback.summary()["cuda_graphs"]["failure"]


def test_optimizers_are_replayed_and_left_as_they_were(step: Fitted) -> None:
    _, callback, _ = step
    assert replays(callback)["optimizers"] == BATCHES - START - 3
    assert callback.takeover is not None
    (optimizer,) = callback.takeover._graphs.optimizers()
    assert not isinstance(optimizer.step, MethodType), "the scheduler's function, not ours"


@pytest.mark.usefixtures("off", "step")
def test_a_checkpoint_is_what_it_is_without(folder: Path) -> None:
    saved = [torch.load(folder / n / "last.ckpt")["optimizer_states"][0] for n in ("off", "step")]
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    assert isinstance(saved[1]["param_groups"][0]["lr"], float)
    for number, state in saved[0]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, saved[1]["state"][number][name])


class LossInside(Trained):
    """The loss is compiled with the layers."""

    compile_targets = ("loss_and_scores", "net")

    def loss_and_scores(
        self, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.net(x)
        return F.mse_loss(scores, y), scores.detach()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, scores = self.loss_and_scores(*batch)
        self.log_dict({"loss": loss, "twice": 2 * loss, "scores": scores.mean()})
        return loss


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"val_check_interval": 5, "max_epochs": 2},
    ],
)
def test_a_method_with_the_loss_in_it_trains_the_same(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    off = fit(tmp_path / "off", "off", LossInside, **options)
    step = fit(tmp_path / "step", "step", LossInside, **options)
    assert_same(off, step, 11)
    assert step[1].summary()["targets"] == ["loss_and_scores", "net"]
    assert "loss_and_scores" not in step[2].__dict__


def resumable(path: Path, callback: OptimusCallback, stop: int = -1, resume: Any = None) -> Losses:
    torch._dynamo.reset()
    torch.manual_seed(4)
    losses = Losses()
    saved = ModelCheckpoint(path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = trainer(path, callback, losses, saved, enable_checkpointing=True, max_steps=stop)
    run.fit(NoDropout(), ResumableLoader(BATCHES), ckpt_path=resume)  # type: ignore[arg-type]
    return losses


class NoDropout(Trained):
    """A plain LightningModule does not store random states."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].p = 0.0  # type: ignore[index]


def test_a_resumed_run_computes_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = resumable(tmp_path / "whole", optimus())
    first = resumable(tmp_path / "parts", optimus(), stop=9)
    again = optimus()
    rest = resumable(tmp_path / "parts", again, resume=tmp_path / "parts" / "step=9.ckpt")
    assert first.losses + rest.losses == whole.losses, "bitwise"
    assert replays(again) == {"graphs": 4, "optimizers": 4}


class WithSparseTable(Trained):
    """Looks ids up outside what is compiled, as many as there are, with an optimizer for both."""

    compile_targets = ("net",)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 8, mode="sum")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        count = 5 + batch_idx % 3
        ids = torch.arange(4 * count) * (batch_idx + 1) % 50
        pooled = self.table(ids, torch.arange(0, 4 * count, count))
        loss = F.mse_loss(self.net(batch[0] + pooled), batch[1])
        self.log_dict({"loss": loss, "twice": 2 * loss})
        return loss


def test_lookups_of_any_length_stay_outside_and_learn(tmp_path: Path) -> None:
    off, _, _ = fit(tmp_path / "off", "off", WithSparseTable)
    step, callback, _ = fit(tmp_path / "step", "step", WithSparseTable)
    assert step.losses == off.losses
    assert replays(callback)["graphs"] > 5


class Item(Trained):
    """Waits for the device in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        assert loss.item() >= 0
        return loss


def test_a_training_step_that_reads_numbers_is_no_obstacle(tmp_path: Path) -> None:
    off, _, _ = fit(tmp_path / "off", "off", Item)
    step, callback, _ = fit(tmp_path / "step", "step", Item)
    assert step.losses == off.losses
    assert replays(callback)["graphs"] > 5


class WithLbfgs(Trained):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2)


class WithHook(Trained):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


@pytest.mark.parametrize(
    ("make", "reason"), [(WithLbfgs, "LBFGS is not known"), (WithHook, "hooks around its step")]
)
def test_an_optimizer_that_cannot_be_recorded_stays_outside(
    tmp_path: Path, make: type[Regressor], reason: str
) -> None:
    off, _, _ = fit(tmp_path / "off", "off", make)
    step, callback, _ = fit(tmp_path / "step", "step", make)
    assert step.losses == off.losses
    assert any(reason in remark for remark in callback.summary()["remarks"])


class MomentumCycles(Trained):
    """A setting other than the rate changes in every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_settings_that_change_in_every_step_act(tmp_path: Path) -> None:
    off, _, _ = fit(tmp_path / "off", "off", MomentumCycles)
    step, callback, _ = fit(tmp_path / "step", "step", MomentumCycles)
    assert step.losses == off.losses
    assert replays(callback)["optimizers"] == 0
    assert any("change from step to step" in r for r in callback.summary()["remarks"])


def test_manual_optimisation_falls_back(tmp_path: Path) -> None:
    callback = optimus()
    trainer(tmp_path, callback).fit(Manual(), loader(8))
    assert any("optimisation is manual" in r for r in callback.summary()["remarks"])


def test_without_a_gpu_it_falls_back(tmp_path: Path) -> None:
    callback = optimus()
    callback.capture = None
    trainer(tmp_path, callback).fit(Regressor(), loader(8))
    remarks = callback.summary()["remarks"]
    assert "cuda_graphs=step fell back to off: there are no CUDA graphs on cpu" in remarks


def test_a_recording_that_fails_ends_the_graphs_not_the_run(off: Fitted, tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(3)
    callback, losses = optimus(), Losses()
    callback.capture = Rerun({2: "the device was asked"})
    trainer(tmp_path, callback, losses).fit(Trained(), loader(BATCHES), loader(2))
    assert losses.losses == off[0].losses
    remarks = callback.summary()["remarks"]
    assert any("fell back to off" in r and "the device was asked" in r for r in remarks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cuda_graphs": "steps"}, "nearest valid: step"),
        ({"cuda_graphs": "model", "inner": "aot_eager"}, "is Inductor's"),
        (
            {"cuda_graphs": "step", "inner_options": {"triton.cudagraphs": True}},
            "leave one of them out",
        ),
    ],
)
def test_what_could_never_work_is_said_first(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimusCallback(**given)


def test_inductors_own_graphs_are_said_to_be_missing_on_a_cpu(tmp_path: Path) -> None:
    callback = OptimusCallback("none", cuda_graphs="model", warmup_steps=1, window=2)
    assert callback.settings.backend("optimised")._options == {"triton.cudagraphs": True}
    trainer(tmp_path, callback).fit(Regressor(), loader(4))
    assert "cuda_graphs=model: there are no CUDA graphs on cpu" in callback.summary()["remarks"]
