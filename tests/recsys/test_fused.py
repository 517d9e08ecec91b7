"""Fused tables against separate ones: the same steps, the same checkpoints, or a clear refusal."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import fbgemm_gpu
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from recsys.data.batch import jagged_kjt
from recsys.data.schema import Schema, SparseFeature
from recsys.fused import objection
from recsys.lookup import NotFusible
from recsys.models.base import SparseArch
from recsys.optim import JointOptimizer, OptimizerConfig, scheduler
from tests.recsys.tiny import LossTrace, TinyData, every_step, make_module, make_trainer, weights

NAMES = ("sgd", "adagrad", "rowwise_adagrad")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Poolings alternate: their tables are looked up apart, and put back into this order.
SCHEMA = Schema(
    (),
    tuple(SparseFeature(f"f{i}", 20 + i, "mean" if i % 3 == 1 else "sum") for i in range(7)),
)


def test_fbgemm_does_not_warn_once_a_library_of_its_own_incomplete_table(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fbgemm_gpu._load_library("fbgemm_gpu_config.so", "99.0.0")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    logging.warning("something else")
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == ["something else"]


def make_arch(device: str = "cpu", dim: int = 8) -> SparseArch:
    torch.manual_seed(3)
    return SparseArch(SCHEMA, dim).to(device)


def train(arch: SparseArch, joint: JointOptimizer, steps: range) -> list[float]:
    """Losses of steps on ids that repeat within bags and batches; some bags are empty."""
    device = next(arch.parameters()).device
    schedule = scheduler(joint, OptimizerConfig(warmup_steps=30).schedule(0))
    losses: list[float] = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(4, (SCHEMA.num_sparse, 16), generator=generator)
        ids = torch.randint(20, (int(lengths.sum()),), generator=generator)
        target = torch.randn(16, SCHEMA.num_sparse, arch.embedding_dim, generator=generator)
        features = jagged_kjt(SCHEMA.keys, ids, lengths).to(torch.device(device))
        joint.zero_grad()
        loss = (arch(features) - target.to(device)).square().mean()
        loss.backward()
        joint.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


def optimizer_of(arch: SparseArch, name: str, fused: bool) -> JointOptimizer:
    config = OptimizerConfig(name, lr=2.0)
    return JointOptimizer(arch.fuse(config) if fused else config.build(arch.parameters(), "sparse"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_are_those_of_separate_tables(name: str, device: str) -> None:
    one, two = make_arch(device), make_arch(device)
    before = weights(one)
    apart = train(one, optimizer_of(one, name, fused=False), range(20))
    together = train(two, optimizer_of(two, name, fused=True), range(20))
    assert together == pytest.approx(apart, rel=1e-5)
    assert list(one.state_dict()) == list(two.state_dict())
    for key, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[key], value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(before[key], value), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("then", [True, False])
def test_state_goes_on_in_either_form(name: str, first: bool, then: bool) -> None:
    stopped = make_arch()
    optimizer = optimizer_of(stopped, name, first)
    train(stopped, optimizer, range(3))
    saved = copy.deepcopy([stopped.state_dict(), optimizer.state_dict()])
    resumed = make_arch()
    other = optimizer_of(resumed, name, then)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    again = other.state_dict()
    assert again["param_groups"][0].keys() == saved[1]["param_groups"][0].keys()
    assert again["state"].keys() == saved[1]["state"].keys()
    for own, loaded in zip(again["state"].values(), saved[1]["state"].values(), strict=True):
        assert own.keys() == loaded.keys()
        assert all(torch.equal(own[key], loaded[key]) for key in own)
    train(resumed, other, range(3, 6))
    train(stopped, optimizer, range(3, 6))
    for key, value in stopped.state_dict().items():
        if first == then:
            assert torch.equal(resumed.state_dict()[key], value), key
        torch.testing.assert_close(resumed.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_a_state_without_sums_begins_at_zero() -> None:
    arch = make_arch()
    optimizer = optimizer_of(arch, "rowwise_adagrad", fused=True)
    empty = copy.deepcopy(optimizer.state_dict()) | {"state": {}}
    train(arch, optimizer, range(2))
    optimizer.load_state_dict(empty)
    sums = [state["sum"] for state in optimizer.state_dict()["state"].values()]
    assert len(sums) == SCHEMA.num_sparse and not any(total.any() for total in sums)


def test_what_would_train_differently_is_named() -> None:
    assert objection(OptimizerConfig("rowwise_adagrad"), 8) is None
    assert "adam updates rows" in str(objection(OptimizerConfig("adam"), 8))
    assert "momentum" in str(objection(OptimizerConfig("sgd", momentum=0.9), 8))
    assert "weight decay" in str(objection(OptimizerConfig("adagrad", weight_decay=0.1), 8))
    assert "not a multiple of 4" in str(objection(OptimizerConfig("sgd"), 6))
    with pytest.raises(ValueError, match="not a multiple of 4"):
        make_arch(dim=6).fuse(OptimizerConfig("sgd"))


def test_an_id_beyond_its_table_is_an_error() -> None:
    arch = make_arch()
    arch.fuse(OptimizerConfig("sgd"))
    lengths = torch.ones(SCHEMA.num_sparse, 1, dtype=torch.int64)
    ids = torch.zeros(SCHEMA.num_sparse, dtype=torch.int64)
    ids[0] = 20
    with pytest.raises(RuntimeError):
        arch(jagged_kjt(SCHEMA.keys, ids, lengths))


def test_a_copy_and_a_moved_arch_have_tables_of_their_own() -> None:
    arch = make_arch()
    optimizer = optimizer_of(arch, "sgd", fused=True)
    twin = copy.deepcopy(arch)
    before = weights(twin)
    train(arch, optimizer, range(2))
    assert all(torch.equal(before[key], value) for key, value in weights(twin).items())
    values = weights(arch)
    arch.to(torch.float32)
    assert all(torch.equal(values[key], value) for key, value in weights(arch).items())
    with pytest.raises(RuntimeError, match="moved to another device"):
        train(arch, optimizer, range(2))


def test_fbgemm_tells_the_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_arch().fuse(OptimizerConfig("sgd"))
    assert not caplog.records


# In a run


def fit(folder: Path, sparse_arch: str, resume: Path | None = None, **options: Any) -> Any:
    """Losses by step, and the weights at the end."""
    seed_everything(1, verbose=False)
    trace = LossTrace()
    module = make_module(sparse_arch=sparse_arch, **options)
    trainer = make_trainer(folder, trace, every_step(folder, num_steps=7))
    trainer.fit(module, datamodule=TinyData(), ckpt_path=resume)
    return trace.losses, weights(module), trainer


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for key, value in left.items():
        torch.testing.assert_close(right[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["rowwise_adagrad", "sgd"])
def test_a_fused_run_is_the_run_on_separate_tables(tmp_path: Path, name: str) -> None:
    config = {"name": name, "lr": 0.1, "warmup_steps": 5, "decay_steps": 30}
    apart = fit(tmp_path / "apart", "tables", sparse_optimizer=config)
    together = fit(tmp_path / "together", "fused", sparse_optimizer=config)
    assert len(apart[0]) == 20
    assert list(together[0].values()) == pytest.approx(list(apart[0].values()), rel=1e-5)
    assert_close(apart[1], together[1])


@pytest.mark.parametrize("then", ["fused", "tables"])
def test_a_resumed_run_ends_as_the_whole_one(tmp_path: Path, then: str) -> None:
    losses, values, _ = fit(tmp_path / "whole", "fused")
    resumed = fit(tmp_path / "resumed", then, resume=tmp_path / "whole" / "step=14.ckpt")
    assert list(resumed[0]) == list(range(15, 21))
    if then == "fused":
        assert resumed[0] == {step: losses[step] for step in resumed[0]}
        assert all(torch.equal(values[key], value) for key, value in resumed[1].items())
    assert_close(values, resumed[1])


def test_testing_after_a_fused_fit_uses_the_trained_tables(tmp_path: Path) -> None:
    *_, trainer = fit(tmp_path / "together", "fused")
    (together,) = trainer.test(trainer.lightning_module, datamodule=TinyData(), verbose=False)
    *_, trainer = fit(tmp_path / "apart", "tables")
    (apart,) = trainer.test(trainer.lightning_module, datamodule=TinyData(), verbose=False)
    assert together["test/logloss"] == pytest.approx(apart["test/logloss"], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "sparse", "reason"),
    [
        ({"gradient_clip_val": 1.0}, {"name": "sgd"}, "gradient_clip_val=1.0 could not reach"),
        ({"accumulate_grad_batches": 2}, {"name": "sgd"}, "would be applied batch by batch"),
        ({}, {"name": "adam"}, "adam updates rows that were not looked up"),
    ],
)
def test_what_cannot_reach_fused_tables_is_refused_before_training(
    tmp_path: Path, options: dict[str, Any], sparse: dict[str, Any], reason: str
) -> None:
    module = make_module(sparse_arch="fused", sparse_optimizer=sparse)
    trainer = make_trainer(tmp_path, **options)
    with pytest.raises(NotFusible, match=reason):
        trainer.fit(module, datamodule=TinyData())
    assert trainer.global_step == 0


def test_a_callback_that_accumulates_is_refused_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, GradientAccumulationScheduler({0: 2}))
    with pytest.raises(NotFusible, match="batch by batch"):
        trainer.fit(make_module(sparse_arch="fused"), datamodule=TinyData())


def test_auto_fuses_where_nothing_is_passed_by(tmp_path: Path) -> None:
    auto, together = fit(tmp_path / "auto", "auto"), fit(tmp_path / "together", "fused")
    assert auto[0] == together[0]
    adam = {"name": "adam", "lr": 0.01}
    auto = fit(tmp_path / "adam", "auto", sparse_optimizer=adam)
    assert auto[0] == fit(tmp_path / "apart", "tables", sparse_optimizer=adam)[0]
    with pytest.raises(ValueError, match="did you mean fused"):
        make_module(sparse_arch="fusd")


@pytest.mark.gpu
def test_few_kernels_a_step_whatever_the_number_of_tables() -> None:
    arch = make_arch("cuda")
    optimizer = optimizer_of(arch, "rowwise_adagrad", fused=True)
    train(arch, optimizer, range(2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        train(arch, optimizer, range(1))
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) < 100
