"""RecModule with replayed steps: tables and lookups outside, metrics and schedules as without."""

from __future__ import annotations

from pathlib import Path

import torch

from optimus.callback import OptimusCallback
from tests.optimus.rerun import Rerun
from tests.recsys.tiny import LossTrace, TinyData, make_module, make_trainer


def test_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    losses: list[dict[int, float]] = []
    for graphs in ("off", "step"):
        torch._dynamo.reset()
        torch.manual_seed(1)
        callback = OptimusCallback(
            "none",
            cuda_graphs=graphs,
            inner="aot_eager",
            warmup_steps=1,
            window=2,  # type: ignore[arg-type]
        )
        callback.capture = Rerun()
        trace = LossTrace()
        make_trainer(tmp_path / graphs, callback, trace).fit(make_module(), datamodule=TinyData())
        losses.append(trace.losses)
    assert losses[0] == losses[1]
    found = callback.summary()["cuda_graphs"]
    assert sum(graph["replays"] for graph in found["graphs"]) > 10
    assert found["optimizers"][0]["name"] == "Adam"
    assert found["optimizers"][0]["replays"] > 10
    assert any("not known to step without the host" in r for r in callback.summary()["remarks"])
