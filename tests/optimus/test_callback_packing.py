"""Under the callback parameters are packed while training goes on, and nobody can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from optimus.callback import OptimusCallback


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, 4, 1)
        return self.head(torch.cat([t(p) for t, p in zip(self.towers, parts, strict=True)], 1))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Towers()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ReadsGradients(Model):
    """Looks at single gradients, as for logging their norms."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(p.grad is not None for p in self.parameters())


class CountLeaves(Callback):
    """What the optimizer held at the end of training."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.leaves = len(trainer.optimizers[0].param_groups[0]["params"])


def _fit(model: Model, tmp_path: Path, optimus: bool, **trainer_options: Any) -> CountLeaves:
    torch._dynamo.reset()
    counter = CountLeaves()
    data = torch.randn(12 * 8, 16, generator=torch.Generator().manual_seed(5))
    callbacks: list[Callback] = [counter]
    if optimus:
        callbacks.append(
            OptimusCallback(inner="aot_eager", baseline_steps=3, warmup_steps=1, window=2)
        )
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=callbacks,
        **trainer_options,
    )
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=8))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return counter


def _models(kind: type[Model]) -> tuple[Model, Model]:
    torch.manual_seed(0)
    plain, optimised = kind(), kind()
    optimised.load_state_dict(plain.state_dict())
    return plain, optimised


@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}]
)
def test_training_on_packs_is_training(tmp_path: Path, options: dict[str, Any]) -> None:
    plain, optimised = _models(Model)
    _fit(plain, tmp_path / "plain", optimus=False, **options)
    counter = _fit(optimised, tmp_path / "packed", optimus=True, **options)
    assert counter.leaves == 4  # two packs, and the head's weight and bias
    assert optimised.losses == pytest.approx(plain.losses, rel=1e-4)
    saved = [torch.load(tmp_path / n / "last.ckpt") for n in ("plain", "packed")]
    states = [checkpoint["optimizer_states"][0] for checkpoint in saved]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for number, state in states[0]["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, states[1]["state"][number][name])


def test_who_reads_single_gradients_finds_them(tmp_path: Path) -> None:
    plain, optimised = _models(ReadsGradients)
    _fit(plain, tmp_path / "plain", optimus=False)
    counter = _fit(optimised, tmp_path / "packed", optimus=True)
    assert counter.leaves == 10
    assert optimised.losses == pytest.approx(plain.losses, rel=1e-4)
