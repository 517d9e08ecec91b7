"""A run that was stopped, even killed, goes on exactly; the phase depends on the step alone."""

from __future__ import annotations

import random
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from optimus.callback import OptimusCallback
from optimus.figures import Phase
from optimus.settings import Settings
from optimus.takeover import Takeover
from tests import processes
from tests.optimus.foreign_modules import Regressor, ResumableLoader, loader, trainer

BATCHES = 24


def optimus(**given: Any) -> OptimusCallback:
    """Short phases, and the inner compiler that is quickest to call."""
    defaults: dict[str, Any] = {
        "baseline_steps": 10,
        "warmup_steps": 1,
        "window": 2,
        "inner": "eager",
    }
    return OptimusCallback(**(defaults | given))


class WithAdam(Regressor):
    """Its optimizer has a state, which is in packs while they last."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


class Phases(pl.Callback):
    """The phase of each training step, by its number in the run, and its loss."""

    def __init__(self, callback: OptimusCallback) -> None:
        self.callback = callback
        self.seen: dict[int, str] = {}
        self.losses: dict[int, float] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        takeover = self.callback.takeover
        assert takeover is not None
        self.seen[batch_idx] = takeover._installed or "uncompiled"
        self.losses[batch_idx] = float(outputs["loss"])


def run(path: Path, callback: OptimusCallback, stop: int = -1, resume: Any = None) -> Phases:
    """Train all batches, or up to `stop` with a checkpoint of that step."""
    torch.manual_seed(4)
    phases = Phases(callback)
    saved = ModelCheckpoint(path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit = trainer(path, callback, phases, saved, enable_checkpointing=True, max_steps=stop)
    fit.fit(WithAdam(), ResumableLoader(BATCHES), ckpt_path=resume)  # type: ignore[arg-type]
    return phases


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Phases:
    """A run that nothing interrupts."""
    return run(tmp_path_factory.mktemp("whole"), optimus())


@pytest.mark.parametrize("stop", [1, 6, 10, 17])
def test_a_resumed_run_computes_what_an_uninterrupted_one_does(
    whole: Phases, tmp_path: Path, stop: int
) -> None:
    first = run(tmp_path / "parts", optimus(), stop=stop)
    again = optimus()
    rest = run(tmp_path / "parts", again, resume=tmp_path / "parts" / f"step={stop}.ckpt")
    assert first.seen | rest.seen == whole.seen
    assert first.losses | rest.losses == whole.losses, "bitwise"
    assert min(rest.seen) == stop
    found = again.summary()
    assert found["steps"] == BATCHES
    assert found["gain"]["qps"] is not None
    assert found["phases"]["baseline"]["source"].startswith("checkpoint")


def test_after_the_take_over_the_stored_baseline_is_used_and_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = optimus()
    run(tmp_path, first, stop=14)
    capsys.readouterr()
    again = optimus()
    rest = run(tmp_path, again, resume=tmp_path / "step=14.ckpt")
    assert set(rest.seen.values()) == {"optimised"}
    stored, now = first.summary()["phases"]["baseline"], again.summary()["phases"]["baseline"]
    assert now["source"] == "checkpoint"
    assert now["windows"] == stored["windows"]
    assert {w["process"] for w in again.summary()["phases"]["optimised"]["windows"]} == {1}
    assert any("before and after a resume" in d for d in again.summary()["gain"]["doubts"])
    assert "(checkpoint)" in capsys.readouterr().out
    assert again.summary()["phases"]["optimised"]["source"] == "checkpoint and this process"


def state(**given: Any) -> dict[str, Any]:
    """The state of a run on one device, after its take-over."""
    takeover = Takeover(Settings(inner="eager", baseline_steps=3), Regressor(), CPU)
    takeover.step = 9
    for name in ("baseline", "optimised"):
        phase = Phase(name, runs=takeover.settings.runs(name), device="cpu", **given)
        takeover.recorder.phases[name] = phase
    return takeover.state()


CPU = torch.device("cpu")


def test_a_baseline_from_another_machine_gives_no_gain(tmp_path: Path) -> None:
    saved = state()
    window = {
        "first_step": 1,
        "steps": 1,
        "samples": 4,
        "seconds": 1.0,
        "step_rates": [4.0, 4.0, 4.0],
    }
    for phase in saved["phases"].values():
        phase["windows"] = [window]
        phase["device"] = "NVIDIA H200"
    callback = optimus()
    callback.load_state_dict(saved)
    trainer(tmp_path, callback).fit(Regressor(), loader(12))
    gain = callback.summary()["gain"]
    assert gain["qps"] is None
    assert gain["qps_note"] == (
        "the baseline was measured with device NVIDIA H200, this run has cpu"
    )
    assert any("figures begin anew: device" in r for r in callback.summary()["remarks"])


def test_other_patterns_after_a_resume_are_measured_anew(tmp_path: Path) -> None:
    callback = optimus(patterns="vertical")
    callback.load_state_dict(state() | {"targets": ["net"]})
    trainer(tmp_path, callback).fit(Regressor(), loader(12))
    found = callback.summary()
    assert found["phases"]["optimised"]["first_step"] == 9
    assert any("figures begin anew: runs" in r for r in found["remarks"])


def test_targets_that_are_gone_are_looked_for_anew() -> None:
    takeover = Takeover(Settings(), Regressor(), CPU, saved=state() | {"targets": ["towers"]})
    assert takeover.targets is None
    assert any("looked for anew" in note for note in takeover.notes)


def test_a_state_of_another_version_is_not_used() -> None:
    takeover = Takeover(Settings(), Regressor(), CPU, saved=state() | {"version": 99})
    assert takeover.step == 0
    assert any("another version" in note for note in takeover.notes)


def test_the_state_is_plain_data(tmp_path: Path) -> None:
    run(tmp_path, optimus(), stop=14)
    checkpoint = torch.load(tmp_path / "step=14.ckpt", weights_only=True)
    saved = checkpoint["callbacks"]["OptimusCallback"]
    assert saved["step"] == 14
    assert saved["targets"] == [""]
    assert not [k for k in checkpoint["state_dict"] if "orig_mod" in k]


def test_fitting_twice_goes_on_with_the_optimised_graph(tmp_path: Path) -> None:
    callback, module = optimus(), Regressor()
    trainer(tmp_path, callback).fit(module, loader(16))
    graphs = callback.summary()["phases"]["optimised"]["graphs"]
    phases = Phases(callback)
    trainer(tmp_path, callback, phases).fit(module, loader(8))
    found = callback.summary()
    assert set(phases.seen.values()) == {"optimised"}
    assert found["steps"] == 24
    assert found["phases"]["optimised"]["graphs"] == graphs, "nothing is compiled again"
    assert found["phases"]["optimised"]["steps"] == 14


def test_parameters_have_memory_of_their_own_after_each_run(tmp_path: Path) -> None:
    """Packed while a run lasts, also in one that uses graphs of an earlier one."""

    class Storages(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            self.during = len({p.untyped_storage().data_ptr() for p in pl_module.parameters()})

    callback, module, storages = optimus(), Regressor(), Storages()
    count = len(list(module.parameters()))
    for _ in range(2):
        trainer(tmp_path, callback, storages).fit(module, loader(16))
        assert storages.during < count
        assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == count
        before = {name: p.clone() for name, p in module.state_dict().items()}
        data = loader(1)
        predicted: Any = trainer(tmp_path, callback).predict(module, data)
        assert torch.allclose(predicted[0], module(next(iter(data))[0]), rtol=1e-5)
        assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == count
        assert all(torch.equal(p, before[name]) for name, p in module.state_dict().items())


def test_fitting_another_module_begins_anew(tmp_path: Path) -> None:
    callback, first = optimus(), Regressor()
    trainer(tmp_path, callback).fit(first, loader(12))
    phases = Phases(callback)
    trainer(tmp_path, callback, phases).fit(Regressor(), loader(12))
    assert phases.seen[1] == "baseline"
    assert callback.summary()["steps"] == 12


def test_evaluating_a_checkpoint_does_not_set_training_back(tmp_path: Path) -> None:
    callback, module = optimus(), Regressor()
    saved = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    fit = trainer(tmp_path, callback, saved, enable_checkpointing=True)
    fit.fit(module, loader(16))
    fit.test(module, loader(2), ckpt_path=tmp_path / "step=4.ckpt")
    assert callback.takeover is not None
    assert callback.takeover.step == 16


PROGRAM = """
    import sys
    from pathlib import Path
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from optimus.callback import OptimusCallback
    from tests.optimus.foreign_modules import Regressor, ResumableLoader, trainer
    path, resume = Path(sys.argv[1]), sys.argv[2:]
    torch.manual_seed(4)
    saved = ModelCheckpoint(path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callback = OptimusCallback(baseline_steps=40, warmup_steps=1, window=2, inner="aot_eager")
    module = Regressor()
    trainer(path, callback, saved, enable_checkpointing=True).fit(
        module, ResumableLoader(120), ckpt_path=resume[0] if resume else None)
    torch.save(module.state_dict(), path / "final.pt")
"""


def program(path: Path, *resume: Path) -> list[str | Path]:
    return [sys.executable, "-c", textwrap.dedent(PROGRAM), path, *resume]


def steps(path: Path) -> list[int]:
    return sorted(int(p.stem.split("=")[1]) for p in path.glob("step=*.ckpt"))


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert processes.run(program(whole), forked=True).returncode == 0
    victim = random.SystemRandom().randrange(2, 110)
    deadline = time.monotonic() + 240
    with processes.running(program(killed), forked=True) as process:
        while victim > max(steps(killed), default=0) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert not (killed / "final.pt").exists()
    # The newest file may be half written; the one before it is whole.
    last = steps(killed)[-2]
    resumed = program(killed, killed / f"step={last}.ckpt")
    assert processes.run(resumed, forked=True).returncode == 0
    expected, found = torch.load(whole / "final.pt"), torch.load(killed / "final.pt")
    assert all(torch.equal(expected[name], found[name]) for name in expected), last
