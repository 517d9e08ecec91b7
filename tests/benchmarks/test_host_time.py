"""Host time is taken of steps that are replayed, and all of it belongs to a part."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import host_time
from benchmarks.models import MODELS


def test_every_part_is_timed() -> None:
    torch._dynamo.reset()
    model = MODELS["per_feature_encoder"]
    found = host_time.measure(dataclasses.replace(model, full=model.small), steps=5, warmup=6)
    parts = {"begin", "zero_grad", "dynamo", "packing", "graph", "engine", "back"}
    assert set(found) == parts | {"optimizer", "all", "step"}
    assert all(us > 0 for us in found.values())
    assert found["all"] == pytest.approx(sum(found[p] for p in (*parts, "optimizer")))


def test_the_steps_are_replayed() -> None:
    torch._dynamo.reset()
    model = MODELS["masknet"]
    job = host_time.job_of(dataclasses.replace(model, full=model.small))
    for _ in range(5):
        job.step()
    (counts,) = job.notes()
    assert counts.count("'replays': 2") == 2, "the graph and the optimizer"


def test_fields_of_ten_numbers_are_one_leaf_to_the_optimizer() -> None:
    """On a GPU, too, where parameters must begin at multiples of 16 bytes."""
    torch._dynamo.reset()
    model = MODELS["masknet"]
    job = host_time.job_of(dataclasses.replace(model, full=host_time.NARROW["masknet"]))
    assert len(list(job.module.parameters())) > 90
    job.step()
    assert sum(len(group["params"]) for group in job.optimizer.param_groups) < 25
