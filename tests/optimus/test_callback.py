"""OptimusCallback in a training run: phases, figures, what is logged, shown and written."""

from __future__ import annotations

import csv
import json
import math
import pickle
import re
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from optimus import heartbeat
from optimus.callback import OptimusCallback
from tests.optimus.foreign_modules import (
    BATCH,
    Regressor,
    SubmodulesCalled,
    loader,
    trainer,
)


def optimus(**given: Any) -> OptimusCallback:
    """Short phases, and the inner compiler that is quickest to call."""
    defaults: dict[str, Any] = {
        "baseline_steps": 10,
        "warmup_steps": 2,
        "window": 3,
        "inner": "eager",
    }
    return OptimusCallback(**(defaults | given))


class Spy(pl.Callback):
    """Notes after each training step what ran it."""

    def __init__(self, callback: OptimusCallback) -> None:
        self.callback = callback
        self.phases: list[str] = []
        self.graphs: list[int] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        takeover = self.callback.takeover
        assert takeover is not None
        installed = takeover._installed
        self.phases.append(installed or "uncompiled")
        self.graphs.append(takeover._compiled[installed].graphs if installed else 0)


def rows(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def logged(path: Path, name: str) -> list[float]:
    return [float(row[name]) for row in rows(path) if row.get(name)]


def test_a_run_has_a_baseline_and_then_the_optimised_graph(tmp_path: Path) -> None:
    callback = optimus()
    spy = Spy(callback)
    trainer(tmp_path, callback, spy).fit(Regressor(), loader(24))
    assert spy.phases == ["uncompiled"] + ["baseline"] * 9 + ["optimised"] * 14
    assert spy.graphs == [0] + [1] * 23
    found = callback.summary()
    assert found["targets"] == ["Regressor"]
    assert found["phases"]["baseline"]["first_step"] == 0
    assert found["phases"]["optimised"]["first_step"] == 10
    assert {p["name"]: p["fired"] for p in found["patterns"]}["batch_linears"] > 0


def test_figures_are_of_warm_steps_and_logged_once_a_window(tmp_path: Path) -> None:
    callback = optimus()
    fit = trainer(tmp_path, callback)
    fit.fit(Regressor(), loader(24))
    phases = callback.summary()["phases"]
    # Step 0 finds the targets, step 1 compiles (2 steps to settle), then windows of three.
    assert [w["first_step"] for w in phases["baseline"]["windows"]] == [4, 7]
    assert [w["first_step"] for w in phases["optimised"]["windows"]] == [13, 16, 19]
    qps = logged(tmp_path, "qps")
    assert len(qps) == 5
    windows = phases["baseline"]["windows"] + phases["optimised"]["windows"]
    assert qps == pytest.approx([w["samples"] / w["seconds"] for w in windows], rel=1e-3)
    assert all(w["samples"] == 3 * BATCH for w in windows)
    gains = logged(tmp_path, "optimus/qps_gain")
    assert len(gains) == 3, "there is no gain before the take-over"
    assert gains[-1] == pytest.approx(
        phases["optimised"]["rate"] / phases["baseline"]["rate"] - 1, rel=1e-3, abs=1e-3
    )
    assert len(logged(tmp_path, "optimus/peak_memory_gain")) == 3
    assert logged(tmp_path, "optimus/optimised") == [0, 0, 1, 1, 1]
    assert all(value > 50 for value in logged(tmp_path, "optimus/peak_resident_mib"))
    assert {"qps", "optimus/qps_gain", "loss"} <= fit.callback_metrics.keys()
    low, middle, high = (logged(tmp_path, f"qps_{p}")[0] for p in ("p10", "p50", "p90"))
    assert low <= middle <= high


def test_figures_are_shown_from_the_window_on_that_they_are_of(tmp_path: Path) -> None:
    shown: list[set[str]] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            on_bar = set(trainer.progress_bar_metrics)
            assert on_bar - {"loss"} <= trainer.callback_metrics.keys()
            shown.append(on_bar & {"qps", "optimus/qps_gain"})

    fit = trainer(tmp_path, optimus(), max_epochs=2)
    fit.callbacks.append(Looks())  # type: ignore[attr-defined]
    fit.fit(Regressor(), loader(24))
    gained = shown.index({"qps", "optimus/qps_gain"})
    assert shown[0] == set()
    assert 10 < gained < 20
    assert all(len(names) == 2 for names in shown[gained:]), "in the second epoch, too"


def test_what_compiles_for_long_says_that_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.005)
    trainer(tmp_path, optimus(target="net"), Slow()).fit(Regressor(), loader(24))
    said = [line for line in capsys.readouterr().out.splitlines() if "compil" in line]
    goes_on = [i for i, line in enumerate(said) if line.startswith("Optimus: still compiling, for")]
    begun = said.index("Optimus: compiling net for the baseline, torch.compile (eager) ...")
    done = next(i for i, line in enumerate(said) if "the optimised graph runs" in line)
    assert goes_on and begun < min(goes_on)
    assert sum(i > done for i in goes_on) <= 1, "one may be on its way"


class Slow(pl.Callback):
    """A training step that takes a while."""

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.03)


@pytest.mark.parametrize("every", [1, 1000])
def test_one_gain_is_one_number_wherever_it_is_told(
    every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class AtTheEnd(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            shown.update(trainer.progress_bar_callback.get_metrics(trainer, pl_module))

    shown: dict[str, Any] = {}
    callback = optimus()
    bars = (callback, TQDMProgressBar(), AtTheEnd())
    fit = trainer(tmp_path, *bars, enable_progress_bar=True, log_every_n_steps=every)
    fit.fit(Regressor(), loader(40))
    found = callback.summary()
    gain, memory = found["gain"]["qps"], found["gain"]["peak_memory"]
    assert len(found["phases"]["optimised"]["windows"]) > 5
    assert logged(tmp_path, "optimus/qps_gain")[-1] == pytest.approx(gain)
    assert logged(tmp_path, "optimus/peak_memory_gain")[-1] == pytest.approx(memory)
    assert fit.callback_metrics["optimus/qps_gain"].item() == pytest.approx(gain)
    assert fit.callback_metrics["optimus/peak_memory_gain"].item() == pytest.approx(memory)
    rate = found["phases"]["optimised"]["rate"]
    assert fit.callback_metrics["optimus/qps"].item() == pytest.approx(rate)
    assert shown["optimus/qps_gain"] == pytest.approx(gain, abs=1e-3)
    assert f"{gain:+.1%}" in capsys.readouterr().out.splitlines()[-2]


def test_what_compiles_is_said_before_it_does_and_how_long_it_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, optimus(target="net")).fit(Regressor(), loader(24))
    said = [line for line in capsys.readouterr().out.splitlines() if "compil" in line]
    assert said[0] == "Optimus: compiling net for the baseline, torch.compile (eager) ..."
    assert re.fullmatch(r"Optimus: the baseline is compiled, in \d+\.\d s", said[1])
    assert said[2] == "Optimus: rewriting and compiling net ..."
    taken = r"Optimus: the optimised graph runs from step 10 on, in net, compiled in \d+\.\d s"
    assert re.fullmatch(taken, said[3])


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"baseline": "eager"}, "rewriting and compiling net ..."),
        ({"patterns": "none"}, "compiling net ..."),
    ],
)
def test_only_what_compiles_is_said_to(
    given: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, optimus(target="net", **given)).fit(Regressor(), loader(14))
    said = capsys.readouterr().out
    assert said.count("compiling net") == 1
    assert f"Optimus: {line}" in said
    assert "the baseline is compiled" not in said
    assert ("no pattern being selected, runs from step 0 on" in said) == ("patterns" in given)
    assert "" not in said.splitlines()


def test_an_evaluation_that_compiles_is_said_to_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = trainer(tmp_path, optimus(target="net"), val_check_interval=6, num_sanity_val_steps=2)
    module = Regressor()
    fit.fit(module, loader(24), loader(2))
    fit.test(module, loader(2))
    said = [line for line in capsys.readouterr().out.splitlines() if "Optimus: " in line]
    line = "Optimus: compiling net for evaluation ..."
    assert said.count(line) == 1
    runs = next(i for i, text in enumerate(said) if "graph runs from step 10" in text)
    assert said.index(line) == runs + 1, "validation in the baseline runs as it is"


@pytest.mark.parametrize("target", [None, "net"])
def test_without_training_it_is_said_before_or_behind_the_first_batch(
    target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, optimus(target=target)).validate(Regressor(), loader(3))
    assert capsys.readouterr().out.count("Optimus: compiling") == 1


def test_compile_time_is_kept_apart(tmp_path: Path) -> None:
    callback = optimus()
    trainer(tmp_path, callback).fit(Regressor(), loader(24))
    phase = callback.summary()["phases"]["optimised"]
    assert phase["compile_seconds"] > phase["step_ms"] / 1e3
    slowest = max(w["seconds"] / w["steps"] for w in phase["windows"])
    assert slowest < phase["compile_seconds"]


def test_losses_are_those_of_plain_training(tmp_path: Path) -> None:
    losses = []
    for name, callbacks in (("plain", ()), ("optimus", (optimus(inner="aot_eager"),))):
        torch.manual_seed(1)
        module = Regressor()
        trainer(tmp_path / name, *callbacks).fit(module, loader(24))
        losses.append(logged(tmp_path / name, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_random_numbers_are_those_of_plain_training(tmp_path: Path) -> None:
    """Neither looking at a step nor checking a rewritten graph draws any."""
    losses = []
    for name, callbacks in (("plain", ()), ("optimus", (optimus(),))):
        torch.manual_seed(1)
        trainer(tmp_path / name, *callbacks).fit(SubmodulesCalled(), loader(16))
        losses.append(logged(tmp_path / name, "mse"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("given", "phases", "note"),
    [
        ({"baseline": "eager"}, ["uncompiled"] + ["baseline"] * 9 + ["optimised"] * 2, ""),
        ({"baseline": "off"}, ["uncompiled"] + ["optimised"] * 11, "the baseline is off"),
        ({"patterns": "none"}, ["uncompiled"] + ["optimised"] * 11, "no pattern is selected"),
        ({"baseline_steps": 0}, ["uncompiled"] + ["optimised"] * 11, "the baseline is off"),
    ],
)
def test_baselines(tmp_path: Path, given: dict[str, Any], phases: list[str], note: str) -> None:
    callback = optimus(**given)
    spy = Spy(callback)
    trainer(tmp_path, callback, spy).fit(Regressor(), loader(12))
    assert spy.phases == phases
    found = callback.summary()
    assert note in found["gain"]["qps_note"]
    if given.get("baseline") == "eager":
        assert found["phases"]["baseline"]["graphs"] == 0
        assert found["phases"]["baseline"]["runs"] == "eager"
    if given.get("patterns") == "none":
        assert found["patterns"] == []
        assert found["phases"]["optimised"]["runs"].endswith("no pattern selected")


def test_a_run_too_short_says_so_early_and_logs_no_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = optimus(baseline_steps=80)
    trainer(tmp_path, callback).fit(Regressor(), loader(12))
    assert callback.summary()["gain"]["qps"] is None
    assert "too few steps: the optimised phase" in callback.summary()["gain"]["qps_note"]
    assert logged(tmp_path, "optimus/qps_gain") == []
    printed = capsys.readouterr().out
    assert "12 training batches, too few to measure a gain" in printed
    assert "no gain measured: too few steps" in printed


def test_the_table_the_gain_and_remarks_are_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, optimus(target="net")).fit(Regressor(), loader(30))
    printed = capsys.readouterr().out
    assert printed.count("the optimised graph runs from step 10 on, in net") == 1
    assert printed.count("batch_linears") == 1
    assert printed.count("samples/s against") == 2, "with the first figure, and at the end"
    assert "too few" not in printed


@pytest.mark.parametrize(("target", "hints"), [("net", 0), ("net.top", 1)])
def test_a_model_in_which_there_is_nothing_to_find_is_said_to_be_one(
    target: str, hints: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, optimus(target=target)).fit(Regressor(), loader(14))
    assert capsys.readouterr().out.count("expect little gain") == hints


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_both_progress_bars_show_qps_and_gain(tmp_path: Path, bar: Any) -> None:
    shown: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            shown.update(trainer.progress_bar_callback.get_metrics(trainer, pl_module))

    fit = trainer(tmp_path, optimus(), bar(), Look(), enable_progress_bar=True)
    fit.fit(Regressor(), loader(24))
    assert shown["qps"] > 0
    assert math.isfinite(shown["optimus/qps_gain"])
    assert "optimus/step_ms" not in shown


def test_validation_test_and_predict_run_with_odd_batches(tmp_path: Path) -> None:
    callback = optimus()
    fit = trainer(tmp_path, callback, max_epochs=3, num_sanity_val_steps=2)
    module = Regressor()
    fit.fit(module, loader(9, odd=3), loader(3, odd=1))
    takeover = callback.takeover
    assert takeover is not None
    optimised = takeover._compiled["optimised"].targets[0]
    # Training: full and odd batch. Validation: full and odd batch, without gradients.
    assert optimised.graphs <= 4
    assert optimised.no_grad_graphs >= 1
    assert callback.summary()["phases"]["optimised"]["recompiles"] == optimised.graphs - 1
    fit.test(module, loader(3, odd=1))
    before = optimised.graphs
    assert len(fit.predict(module, loader(3, odd=1)) or []) == 4
    assert optimised.graphs == before, "the graphs made for the test serve the prediction"
    assert "_compiled_call_impl" not in module.__dict__


def test_sanity_checks_and_baseline_validation_compile_nothing(tmp_path: Path) -> None:
    callback = optimus(target="net", baseline_steps=100)
    fit = trainer(tmp_path, callback, num_sanity_val_steps=2, max_epochs=2)
    fit.fit(Regressor(), loader(4), loader(2))
    takeover = callback.takeover
    assert takeover is not None
    (target,) = takeover._compiled["baseline"].targets
    assert (target.graphs, target.no_grad_graphs) == (1, 0)


@pytest.mark.parametrize("target", [None, "net"])
def test_without_training_the_optimised_graph_runs_at_once(tmp_path: Path, target: Any) -> None:
    module = Regressor()
    expected = module(loader(1).dataset.tensors[0])  # type: ignore[attr-defined]
    callback = optimus(target=target)
    predicted: Any = trainer(tmp_path, callback).predict(module, loader(3))
    assert torch.allclose(predicted[0], expected[:BATCH], rtol=1e-5)
    assert callback.takeover is not None
    assert callback.takeover.report.fired("batch_linears") > 0
    for run in ("validate", "test"):
        getattr(trainer(tmp_path, optimus(target=target)), run)(Regressor(), loader(3))


def test_a_window_is_not_measured_across_a_validation(tmp_path: Path) -> None:
    callback = optimus(baseline="off", warmup_steps=2, window=4)

    class SlowValidation(Regressor):
        def on_validation_start(self) -> None:
            import time

            time.sleep(1.0)

    fit = trainer(tmp_path, callback, val_check_interval=5, num_sanity_val_steps=0)
    fit.fit(SlowValidation(), loader(20), loader(2))
    windows = callback.summary()["phases"]["optimised"]["windows"]
    assert windows
    assert all(w["seconds"] < 0.9 for w in windows)


def test_batches_that_do_not_tell_their_size_are_counted_in_steps(tmp_path: Path) -> None:
    class Opaque(Regressor):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return iter([batch])

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(next(batch), batch_idx)

    callback = optimus()
    trainer(tmp_path, callback).fit(Opaque(), loader(24))
    found = callback.summary()
    assert found["phases"]["optimised"]["unit"] == "steps/s"
    assert found["gain"]["qps"] is not None, "the ratio holds in steps too"
    assert logged(tmp_path, "qps") == []
    assert any("batch_size=" in remark for remark in found["remarks"])
    for size in (64, lambda batch: 64):
        callback = optimus(batch_size=size, baseline="off")
        trainer(tmp_path, callback).fit(Opaque(), loader(8))
        assert callback.summary()["phases"]["optimised"]["windows"][0]["samples"] == 3 * 64


def test_the_summary_is_json_and_a_page_without_outside_parts(tmp_path: Path) -> None:
    trainer(tmp_path, optimus()).fit(Regressor(), loader(24))
    found = json.loads((tmp_path / "optimus_summary.json").read_text())
    assert found["status"] == "finished"
    assert found["steps"] == 24
    assert found["gain"]["qps"] == pytest.approx(
        found["phases"]["optimised"]["rate"] / found["phases"]["baseline"]["rate"] - 1
    )
    html = (tmp_path / "optimus_summary.html").read_text()
    assert html.count("<svg") == 3
    assert "batch_linears" in html
    assert not [bad for bad in ("http:", "https:", "src=", "@import", "<script") if bad in html]
    assert list(tmp_path.glob("*.part")) == []


def test_the_summary_goes_where_it_is_told(tmp_path: Path) -> None:
    trainer(tmp_path, optimus(summary_dir=tmp_path / "deep" / "er")).fit(Regressor(), loader(2))
    assert (tmp_path / "deep" / "er" / "optimus_summary.html").exists()
    assert not (tmp_path / "optimus_summary.html").exists()


def test_without_a_logger_it_goes_to_the_trainers_folder_and_a_line_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trainer(Path("../there"), optimus(), logger=False).fit(Regressor(), loader(2))
    where = tmp_path / "there" / "optimus_summary.html"
    assert where.exists()
    assert list(Path().iterdir()) == []
    assert f"Optimus: summary in {where.resolve()}" in capsys.readouterr().out


def test_nothing_of_optimus_is_left_in_module_and_hyperparameters(tmp_path: Path) -> None:
    module = SubmodulesCalled()
    keys, before = list(module.state_dict()), dict(module.net.__dict__)
    trainer(tmp_path, optimus()).fit(module, loader(24))
    assert list(module.state_dict()) == keys
    assert module.net.__dict__.keys() == before.keys()
    assert not [m for m in module.modules() if "_compiled_call_impl" in m.__dict__]
    assert not [m for m in module.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert "lr" in module.hparams
    assert len(module.hparams) == 1


def test_targets_come_from_argument_then_module_then_observation(tmp_path: Path) -> None:
    class Declares(Regressor):
        compile_targets = ("net.towers.0", "net.top")

    callback = optimus()
    trainer(tmp_path, callback).fit(Declares(), loader(3))
    assert callback.summary()["targets"] == ["net.towers.0", "net.top"]
    module = Declares()
    callback = optimus(target=module.net)
    trainer(tmp_path, callback).fit(module, loader(3))
    assert callback.summary()["targets"] == ["net"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"patterns": "vertcal"}, "vertical"),
        ({"disable": ["batch_linaers"]}, "batch_linears"),
        ({"knobs": {"batch_linears": {"no_such_knob": 1}}}, "no_such_knob"),
        ({"inner": "inductr"}, "inductor"),
        ({"baseline": "none"}, "compile, eager, off"),
        ({"baseline_steps": -1}, "baseline_steps must be at least 0"),
        ({"warmup_steps": 0}, "warmup_steps must be at least 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimus(**given)


def test_a_target_that_is_not_there_is_refused_before_training(tmp_path: Path) -> None:
    module = Regressor()
    with pytest.raises(ValueError, match="nearest: net"):
        trainer(tmp_path, optimus(target="nett")).fit(module, loader(3))
    assert "_compiled_call_impl" not in module.net.__dict__


def test_fast_dev_run_leaves_no_files(tmp_path: Path) -> None:
    trainer(tmp_path, optimus(), fast_dev_run=2).fit(Regressor(), loader(3), loader(2))
    assert list(tmp_path.iterdir()) == []


def test_the_callback_can_be_pickled_before_and_after_a_run(tmp_path: Path) -> None:
    callback = pickle.loads(pickle.dumps(optimus(baseline_steps=7)))
    assert callback.settings == optimus(baseline_steps=7).settings
    trainer(tmp_path, callback).fit(Regressor(), loader(12))
    twin = pickle.loads(pickle.dumps(callback))
    assert twin.state_dict() == callback.state_dict()
    assert twin.takeover is None


def test_no_warnings_in_a_plain_run(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, optimus()).fit(Regressor(), loader(24))
    ours = [str(w.message) for w in caught if "ptimus" in str(w.message)]
    assert ours == []
