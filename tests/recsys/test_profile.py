"""Traces of single steps, and the profiler that does nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import seed_everything

from recsys.profile import NoProfiler, ProfileSteps
from tests.recsys.tiny import LossTrace, TinyData, make_module, make_trainer


def test_the_trace_has_the_steps_asked_for(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, ProfileSteps(tmp_path, 3, 2), profiler=NoProfiler())
    trainer.fit(make_module(), datamodule=TinyData())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [str(event.get("name", "")) for event in events]
    assert sum(name.startswith("Optimizer.step#JointOptimizer") for name in names) == 2


def test_no_profiler_changes_no_loss(tmp_path: Path) -> None:
    losses: list[dict[int, float]] = []
    for options in ({}, {"profiler": NoProfiler()}):
        seed_everything(1, verbose=False)
        trace = LossTrace()
        trainer = make_trainer(tmp_path, trace, max_epochs=1, **options)
        trainer.fit(make_module(), datamodule=TinyData())
        losses.append(trace.losses)
    assert len(losses[0]) == 10
    assert losses[0] == losses[1]


def test_negative_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        ProfileSteps(tmp_path, -1, 2)
