"""LightningModules as other people write them, and what is needed to train them for a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8
BATCH = 4


def loader(batches: int = 12, odd: int = 0) -> DataLoader[Any]:
    """Batches of four samples; with `odd` a last one of that many."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batches * BATCH + odd, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH)


def trainer(path: Path, *callbacks: pl.Callback, **given: Any) -> pl.Trainer:
    """A quiet CPU trainer that logs every step to a CSV file under `path`."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": CSVLogger(path, name="", version=""),
        "log_every_n_steps": 1,
        "default_root_dir": path,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | given))


class Branches(nn.Module):
    """One narrow tower for each part of the input, joined again: what a recommender is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(2, 4), nn.ReLU()) for _ in range(4))
        self.top = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [tower(part) for tower, part in zip(self.towers, x.split(2, 1), strict=True)]
        return self.top(torch.cat(parts, 1))


class Regressor(pl.LightningModule):
    """The usual one: `self(x)` in every step and `self.log`."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Branches()
        self.lr = lr

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class SubmodulesCalled(Regressor):
    """Never calls `self(x)`; has a loss module and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.criterion = nn.MSELoss()
        self.metric = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out = self.head(self.net(batch[0]))
        self.metric(out, batch[1])
        self.log("mse", self.metric)
        return self.criterion(out, batch[1])


class LogsInForward(Regressor):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        self.log("mean", out.mean())
        return out


class Manual(Regressor):
    """Manual optimisation, accumulating over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.manual_backward(loss / 2)
        self.log("loss", loss)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


class Gan(pl.LightningModule):
    """Two networks, two optimizers, each frozen while the other one trains."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()  # type: ignore[misc]
        real = batch[0]
        noise = torch.randn(len(real), 4)
        self.toggle_optimizer(generator)
        loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        self.log("g_loss", loss)
        self._step(generator, loss)
        self.toggle_optimizer(discriminator)
        fake = self.discriminator(self.generator(noise).detach())
        loss = (F.softplus(-self.discriminator(real)) + F.softplus(fake)).mean()
        self.log("d_loss", loss)
        self._step(discriminator, loss)

    def _step(self, optimizer: Any, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), 1e-3),
            torch.optim.Adam(self.discriminator.parameters(), 1e-3),
        ], []


class Clicks:
    """A batch type of the user's own."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


@dataclass
class Plain:
    x: torch.Tensor


class ReadsClicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Branches()

    def forward(self, clicks: Clicks) -> torch.Tensor:
        return self.net(clicks.x)


class TakesObjects(Regressor):
    """Its outermost module takes an object that would break the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ReadsClicks()  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.mse_loss(self.net(Clicks(*batch)), batch[1])


class ResumableLoader:
    """Batches that depend on their number only, and a position that goes into checkpoints."""

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._next = 0

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while self._next < self._batches:
            generator = torch.Generator().manual_seed(self._next)
            self._next += 1
            x = torch.randn(BATCH, WIDTH, generator=generator)
            yield [x, x.sum(1, keepdim=True)]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]
