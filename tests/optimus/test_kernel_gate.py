"""A kernel is put in where it has won, and nowhere else."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from optimus import kernel_gate
from optimus.kernel_gate import Form, judge, measure, times_of, verdict
from optimus.pattern import Miss
from optimus.patterns.kernels.fuse_cross_layer import FuseCrossLayer
from optimus.patterns.kernels.fuse_narrow_mlp import FuseNarrowMlp
from optimus.testing import check_program

MLP = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))


def _forms(text: str = "") -> tuple[Form, Form]:
    """Two forms to measure; the first raises if there is a text."""

    def ours(x: torch.Tensor) -> torch.Tensor:
        if text:
            raise RuntimeError(text)
        return x.relu()

    return ours, torch.relu


def test_it_has_to_win_in_both_ways_of_running() -> None:
    assert judge([(1.0, 2.0), (0.5, 0.6)]) is None
    assert judge([(1.0, 2.0), (0.6, 0.5)]) == Miss(
        "no faster here: 1.0000 ms against 2.0000 ms of torch.compile, "
        "in a CUDA graph 0.6000 ms against 0.5000 ms of torch.compile"
    )
    assert judge("no memory") == Miss("the kernel cannot be measured: no memory")


def test_without_a_gpu_nothing_is_measured() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = torch.ones(2)
    for gate, reason in (("measure", "no GPU"), ("never", "switched off")):
        miss = verdict(gate, _forms, (), (node,))
        assert isinstance(miss, Miss)
        assert reason in miss.reason
    assert verdict("always", _forms, (), (node,)) is None
    with pytest.raises(ValueError, match="measure, always, never"):
        verdict("sometimes", _forms, (), (node,))


@pytest.fixture
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIMUS_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_gate, "_known", {})


@pytest.mark.usefixtures("_fresh")
def test_another_process_measures_and_says_why_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "forms_to_measure.py").write_text(FORMS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        forms = importlib.import_module("forms_to_measure").forms
        told = times_of(forms, ("out of shared memory",), [((2,), torch.float32, "cpu", False)])
    assert told == "out of shared memory"


FORMS = """
def forms(text):
    raise_it = lambda x: (_ for _ in ()).throw(RuntimeError(text + chr(10) + "and more"))
    import torch
    torch.compile = lambda form, **options: form  # what is tested is the way there and back
    return raise_it, raise_it
"""


@pytest.mark.usefixtures("_fresh")
def test_what_was_measured_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [((2,), torch.float32, "cpu", False)]
    monkeypatch.setattr(kernel_gate, "_in_another_process", lambda job: [(1.0, 2.0), (3.0, 4.0)])
    measured = times_of(_forms, (), specs)
    kernel_gate._known.clear()
    monkeypatch.setattr(kernel_gate, "_in_another_process", lambda job: "measured again")
    assert times_of(_forms, (), specs) == measured == [(1.0, 2.0), (3.0, 4.0)]
    assert times_of(_forms, ("other",), specs) == "measured again"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the gate is open or measured")
def test_on_a_cpu_models_keep_their_layers_and_the_report_says_why() -> None:
    report = check_program(MLP, (torch.randn(2, 5),), "kernels")
    records = {p.name: p for graph in report.graphs for p in graph.patterns}
    assert {FuseNarrowMlp.name(), FuseCrossLayer.name()} <= records.keys()
    assert not report.fired(FuseNarrowMlp.name())
    assert "there is no GPU" in " ".join(records[FuseNarrowMlp.name()].misses)


@pytest.mark.gpu
def test_on_a_gpu_both_forms_are_timed() -> None:
    spec = ((64, 64), torch.float32, "cuda:0", True)
    times = measure(*_forms(), [spec])
    assert isinstance(times, list), times
    assert all(t > 0 for pair in times for t in pair)


@pytest.mark.gpu
def test_on_a_gpu_the_gate_decides() -> None:
    module = MLP.cuda()
    report = check_program(module, (torch.randn(64, 5, device="cuda"),), "kernels")
    records = {p.name: p for graph in report.graphs for p in graph.patterns}
    misses = " ".join(records[FuseNarrowMlp.name()].misses)
    assert report.fired(FuseNarrowMlp.name()) or "no faster here" in misses
