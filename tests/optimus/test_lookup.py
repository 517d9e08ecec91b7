"""`optimus.report` finds the report of everything that Optimus compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import optimus
from optimus.backend import OptimusBackend
from optimus.backend import optimus as named_backend
from optimus.callback import OptimusCallback
from optimus.records import Report


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(self.towers, x.split(8, 1), strict=True)
        return torch.cat([torch.relu(tower(part)) for tower, part in parts], 1)


X = torch.randn(5, 24)


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


def check(report: Report, graphs: int = 1) -> None:
    assert isinstance(report, Report)
    assert len(report.graphs) == graphs
    assert report.fired("batch_linears") == graphs


def test_a_module() -> None:
    model = optimus.compile(nn.Sequential(Towers(), nn.ReLU()), inner="eager")
    assert str(optimus.report(model)) == "no graph has been compiled yet"
    model(X)
    check(optimus.report(model))


def test_modules_inside_another() -> None:
    model = nn.Sequential(Towers(), nn.Linear(12, 24), Towers())
    optimus.compile(model[0], inner="eager")
    optimus.compile(model[2], inner="eager")
    model(X)
    check(optimus.report(model), graphs=2)
    check(optimus.report(model[2]))


def test_a_backend_and_what_it_compiled() -> None:
    backend = OptimusBackend(inner="eager")
    module = torch.compile(Towers(), backend=backend)
    function = torch.compile(Towers().forward, backend=backend, fullgraph=True)
    module(X), function(X)
    for each in (backend, module, function):
        check(optimus.report(each))


@pytest.mark.parametrize("given", ["optimus", named_backend])
def test_the_backend_by_name(given: Any) -> None:
    if given == "optimus" and given not in torch._dynamo.list_backends():
        pytest.skip("the package is not installed, so that its entry point is not known")
    compiled = torch.compile(Towers().forward, backend=given, options={"inner": "eager"})
    other = torch.compile(Towers().forward, backend=given, options={"inner": "eager"})
    compiled(X), other(X), compiled(X[:3])
    check(optimus.report(compiled), graphs=2)


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Towers()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def test_a_callback_and_the_modules_of_its_run(tmp_path: Path) -> None:
    callback = OptimusCallback(baseline_steps=1, inner="eager", summary_dir=tmp_path)
    assert not optimus.report(callback).graphs
    lit = Lit()
    trainer = Trainer(
        max_steps=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(lit, torch.utils.data.DataLoader(torch.randn(12, 24), batch_size=4))
    for each in (callback, lit, lit.model):
        check(optimus.report(each))


@pytest.mark.parametrize(
    "other",
    [nn.Linear(2, 2), torch.relu, lambda x: x, 3, None, torch.compile(nn.Linear(2, 2))],
    ids=["module", "builtin", "function", "number", "none", "plain"],
)
def test_anything_else_is_refused(other: Any) -> None:
    with pytest.raises(TypeError, match="Optimus did not compile this"):
        optimus.report(other)


def test_it_prints_what_fired_and_what_was_missed() -> None:
    backend = OptimusBackend(inner="eager")
    torch.compile(Towers(), backend=backend)(X)
    text = str(optimus.report(backend))
    assert "batch_linears: 3 anchors, fired 1" in text
    assert "missed" in text and "e.g. " in text and f"{__file__}:" in text
    assert "nothing to look at for: " in text
