"""Exact resume: stopped anywhere and resumed, a run ends bit by bit as if it had never stopped."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from recsys.resume import restore_rng, save_rng, saved_rng
from tests import processes
from tests.recsys.tiny import LossTrace, TinyData, every_step, make_module, make_trainer, weights


def run(
    folder: Path, *callbacks: Any, resume: Path | None = None, module: Any = None, **trainer: Any
) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Loss by step and final weights."""
    seed_everything(1 if resume is None else 2, verbose=False)
    module, trace = make_module(**(module or {})), LossTrace()
    make_trainer(folder, trace, *callbacks, **trainer).fit(
        module, datamodule=TinyData(), ckpt_path=resume
    )
    return trace.losses, weights(module)


def assert_same_end(resumed: Any, straight: Any) -> None:
    (losses, ended), (all_losses, expected) = resumed, straight
    assert losses == {step: all_losses[step] for step in losses}
    assert max(all_losses) in losses or not losses
    assert ended.keys() == expected.keys()
    for key, value in ended.items():
        assert torch.equal(value, expected[key]), key


ADAM = {"sparse_optimizer": {"name": "adam", "lr": 0.01, "decay_steps": 15, "warmup_steps": 3}}
SGD = {"dense_optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}


@pytest.mark.parametrize(
    ("module", "trainer"),
    [
        ({}, {"val_check_interval": 0.5}),
        (ADAM, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        (SGD, {"limit_val_batches": 0, "precision": "bf16-mixed"}),
        ({}, {"max_epochs": -1, "max_steps": 17, "val_check_interval": 4}),
    ],
    ids=["validation_mid_epoch", "accumulate_and_clip", "momentum_bf16", "max_steps"],
)
def test_resuming_from_every_checkpoint_changes_nothing(
    tmp_path: Path, module: dict[str, Any], trainer: dict[str, Any]
) -> None:
    checkpoints = every_step(tmp_path)
    straight = run(tmp_path, checkpoints, module=module, **trainer)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert len(files) >= 3
    for file in files:
        resumed = run(tmp_path, resume=file, module=module, **trainer)
        assert_same_end(resumed, straight)


def test_the_epoch_boundary_is_no_exception(tmp_path: Path) -> None:
    straight = run(tmp_path, every_step(tmp_path, num_steps=10), max_epochs=3)
    files = sorted(tmp_path.glob("*.ckpt"))
    assert [file.name for file in files] == ["step=10.ckpt", "step=20.ckpt", "step=30.ckpt"]
    for file in files:
        assert_same_end(run(tmp_path, resume=file, max_epochs=3), straight)


def test_the_checkpoint_holds_plain_data_only(tmp_path: Path) -> None:
    run(tmp_path, every_step(tmp_path), max_steps=3)
    checkpoint = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert "TinyData" in checkpoint
    assert all(key.startswith("model.") for key in checkpoint["state_dict"])


def _process(folder: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "tests.recsys.tiny", folder, *arguments]
    done = processes.run(command, forked=True)
    print(done.stderr[-3000:])
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_killed_at_a_random_step_and_resumed(tmp_path: Path, devices: int) -> None:
    last = 20 // devices
    kill_at = random.SystemRandom().randint(3, last - 1)
    print(f"killed at step {kill_at}")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    on = ("--devices", str(devices))
    assert _process(straight, *on) == 0
    assert _process(killed, "--kill-at", str(kill_at), *on) != 0
    assert not (killed / "result-0.pt").exists()
    assert _process(killed, "--resume", str(killed / "last.ckpt"), *on) == 0
    for rank in range(devices):
        expected, result = (torch.load(f / f"result-{rank}.pt") for f in (straight, killed))
        assert list(result["losses"]) == list(range(kill_at // 3 * 3 + 1, last + 1))
        assert_same_end(
            (result["losses"], result["weights"]), (expected["losses"], expected["weights"])
        )
        for name, value in expected["logged"].items():
            # Windows of training steps begin anew in the resumed run.
            assert name.startswith("train/") or result["logged"][name] == value, name


def draw() -> list[float]:
    return [random.random(), np.random.random(), np.random.standard_normal(), float(torch.rand(()))]


def test_every_generator_goes_on_where_it_was() -> None:
    checkpoint: dict[str, Any] = {}
    np.random.standard_normal()  # leaves half of a pair cached
    save_rng(checkpoint)
    expected = draw()
    seed_everything(99, verbose=False)
    state = saved_rng(checkpoint)
    assert state is not None
    assert draw() != expected
    restore_rng(state)
    assert draw() == expected


def test_a_checkpoint_without_or_of_other_ranks_restores_nothing() -> None:
    assert saved_rng({}) is None
    assert saved_rng({"recsys_rng": [{}, {}]}) is None
