"""A training loop on which replayed steps are compared with plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from optimus.backend import OptimusBackend
from optimus.capture import Capture, CudaCapture
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing
from optimus.step_graphs import StepGraphs
from tests.optimus.rerun import Rerun


class Towers(nn.Module):
    """What is merged, packed, normalised over the batch and dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(12, 1)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, 4, 1)
        y = torch.cat([t(p) for t, p in zip(self.towers, parts, strict=True)], 1)
        return self.head(self.drop(self.norm(y))) * self.temperature


class LossInside(nn.Module):
    """What a target is that has the loss in it. `detached`: the other result has no gradient."""

    def __init__(self, detached: bool = True, loss_last: bool = False) -> None:
        super().__init__()
        self.towers = Towers()
        self.head = self.towers.head
        self.detached, self.loss_last = detached, loss_last

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.towers(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        logits = logits.detach() if self.detached else logits
        return (logits, loss) if self.loss_last else (loss, logits)


class Loop:
    """Training with or without graphs, on the same random numbers.

    On a GPU, or on the CPU, where a recording is run again.
    """

    def __init__(
        self,
        graphed: bool,
        make: Callable[[], nn.Module] = Towers,
        *,
        device: str = "cpu",
        inner: str = "aot_eager",
        **adamw: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.module = make().to(self.device)
        self.source = nn.Linear(16, 16, device=self.device)  # its gradient comes out of the graph
        parameters = [*self.module.parameters(), *self.source.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, **adamw)
        capture: Capture = Rerun() if device == "cpu" else CudaCapture(self.device)
        self.graphs = StepGraphs(capture) if graphed else None
        # As on a GPU: the biases' pack is padded.
        self.packing = Packing(adopt=PackedOptimizer([self.optimizer]).adopt, alignment=16)
        backend = OptimusBackend(
            "batch_linears", inner=inner, verify=False, packing=self.packing, graphs=self.graphs
        )
        self.forward = torch.compile(self.module, backend=backend)  # type: ignore[call-overload]
        if self.graphs is not None:
            self.graphs.install([self.optimizer])

    def begin(self) -> None:
        if self.graphs is not None:
            self.graphs.begin_step()

    def end(self) -> None:
        if self.graphs is not None:
            self.graphs.end_step()

    def loss(self, step: int, rows: int = 8) -> torch.Tensor:
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(step))
        return self.forward(self.source(x.to(self.device))).square().mean()

    def results(self, step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and logits of `LossInside`."""
        numbers = torch.Generator().manual_seed(step)
        x, labels = torch.randn(rows, 16, generator=numbers), torch.rand(rows, 1, generator=numbers)
        found = self.forward(self.source(x.to(self.device)), labels.to(self.device))
        return found[::-1] if self.module.loss_last else found  # type: ignore[return-value]

    def step(
        self,
        step: int,
        *,
        rows: int = 8,
        micro: int = 1,
        calls: int = 1,
        backwards: int = 1,
        **zero_grad: Any,
    ) -> float:
        """A training step of `micro` batches, with several forwards or backwards for each."""
        self.optimizer.zero_grad(**zero_grad)
        total = 0.0
        for i in range(micro):
            self.begin()
            losses = [self.loss(100 * j + step * micro + i, rows) for j in range(calls)]
            loss = torch.stack(losses).sum()
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)
            total += loss.item()
            if i == micro - 1:
                self.optimizer.step()
            self.end()
        return total

    @property
    def counts(self) -> dict[str, Any]:
        assert self.graphs is not None
        return self.graphs.to_dict()

    @property
    def replays(self) -> list[int]:
        return [graph["replays"] for graph in self.counts["graphs"]]
