"""The step benchmark runs on a CPU at small sizes, and says what it left out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks.alone import measure
from benchmarks.bench import Bench, Exact, Setting
from benchmarks.models import MODELS
from benchmarks.providers import PROVIDERS
from benchmarks.step import Comparison, Plan, main, options

CPU = torch.device("cpu")
SMALL = Setting(MODELS["per_feature_encoder"], 16, CPU, "small", amp=False, inner="aot_eager")


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.csv"
    providers = ["eager", "compile", "optimus_packed", "fused_compile"]
    chosen = ["--device", "cpu", "--no-amp", "--rounds", "2", "--out", str(out)]
    models = ["--model", "per_feature_encoder", "dlrm"]
    main([*chosen, *models, "--provider", *providers, "fused_step_graph", "upstream_all"])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [(m, p) for m in models[1:] for p in providers if (m, p) != ("dlrm", providers[-1])]
    assert [(r["model"], r["provider"]) for r in rows] == expected
    assert all(float(r["ms"]) > 0 and not r["failure"] for r in rows)
    assert all(float(r["error"]) < 1e-5 for r in rows)
    said = capsys.readouterr().out
    assert "left out: dlrm 64 fused_compile: the model has no repeated branches" in said
    assert "left out: dlrm 64 fused_step_graph: the model has no repeated branches" in said
    assert "left out: per_feature_encoder 64 fused_step_graph: needs a GPU" in said
    assert "left out: dlrm 64 upstream_all: its options are Inductor's" in said
    assert "| optimus_packed | 1 |" in said
    assert out.with_suffix(".png").exists()


@pytest.mark.gpu
@pytest.mark.slow
def test_a_gpu_has_kernels_and_memory(tmp_path: Path) -> None:
    out = tmp_path / "step.csv"
    providers = ["compile", "reduce_overhead", "optimus_step_graph", "fused_step_graph"]
    chosen = ["--device", "cuda", "--size", "small", "--batch", "64", "--out", str(out)]
    main([*chosen, "--model", "per_feature_encoder", "--provider", *providers])
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["provider"] for r in rows if not r["failure"]] == providers
    for name in ("kernels", "gpu_busy_ms", "peak_allocated_mb", "peak_reserved_mb", "ms"):
        assert all(float(r[name]) > 0 for r in rows), name


@pytest.mark.slow
def test_a_process_of_its_own_measures_compile_seconds(tmp_path: Path) -> None:
    found = measure(SMALL, PROVIDERS["optimus_packed"], tmp_path, timeout=300)
    assert not found.failure
    assert found.compile_seconds > 0


def test_a_process_of_its_own_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    found = measure(SMALL, PROVIDERS["eager"], tmp_path, timeout=0.2)
    assert found.failure == "took more than 0 s in its own process"


def test_nothing_begins_when_the_time_is_up(tmp_path: Path) -> None:
    plan = Plan(seconds=1, in_own_process=False)
    plan.started -= 10
    assert Comparison(SMALL, ["eager", "compile"], plan, tmp_path, "abc").run() == []
    assert plan.left_out == [
        "per_feature_encoder 16 eager: the time was up",
        "per_feature_encoder 16 compile: the time was up",
    ]


def test_a_provider_that_fails_is_a_row_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Bench, "first_step", fail)
    plan = Plan(rounds=1, count=1, in_own_process=False)
    (row,) = Comparison(SMALL, ["eager"], plan, tmp_path, "abc").run()
    assert row.failure == "RuntimeError: no such kernel"


def test_errors_are_relative_to_float64() -> None:
    bench = Bench(SMALL)
    exact = Exact(bench)
    assert 0 < exact.eager_error < 1e-5 and 0 < exact.eager_gradient_error < 1e-5
    job = bench.job(PROVIDERS["eager"])
    logits, _ = bench.first_step(PROVIDERS["eager"], job)
    assert exact.errors(logits, job.inputs) == (exact.eager_error, exact.eager_gradient_error)
    error, _ = exact.errors(logits * 1.1, job.inputs)
    assert error == pytest.approx(0.1, rel=1e-4)


def test_a_job_leaves_the_weights_of_the_others_alone() -> None:
    bench = Bench(SMALL)
    before = [p.clone() for p in bench.naive.parameters()]
    for name in ("eager", "fused_compile"):
        job = bench.job(PROVIDERS[name])
        job.step()
    assert all(map(torch.equal, before, bench.naive.parameters()))
    assert all(x.grad is None for x in bench.inputs)


def test_a_cpu_runs_small_sizes_without_generating_code() -> None:
    chosen = options(["--device", "cpu"])
    assert (chosen.batch, chosen.size, chosen.inner) == ([64], "small", "aot_eager")
    assert chosen.one_process and "per_feature_encoder" in chosen.model


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batch", "0"], "0 is below 1"),
        (["--model", "mmo"], "invalid choice: 'mmo'"),
        (["--provider", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(arguments)
    assert says in capsys.readouterr().err
