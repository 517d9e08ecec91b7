"""A kernel is put in where it has won, and nowhere else."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from optimus import kernel_gate
from optimus.driver import Phase, rewrite
from optimus.editor import Editor
from optimus.kernel_gate import Form, judge, measure, times_of, verdict
from optimus.pattern import Match, Miss, Pattern
from optimus.patterns.kernels.fuse_cross_layer import FuseCrossLayer
from optimus.patterns.kernels.fuse_narrow_mlp import FuseNarrowMlp
from optimus.testing import check_program
from tests import processes

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


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that measure are forked: spares them their imports."""
    monkeypatch.setattr(sys, "executable", processes.forked_python())


@pytest.fixture
def forms_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "forms_to_measure.py").write_text(FORMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("forms_to_measure", None)
    monkeypatch.setattr(kernel_gate, "_servers", {})
    yield importlib.import_module("forms_to_measure").forms
    for server in kernel_gate._servers.values():
        server.stop()


FORMS = """
import os, torch
def forms(text):
    torch.compile = lambda form, **options: form  # what is tested is the way there and back
    def ours(x):
        if text == "die":
            os.kill(os.getpid(), 9)
        print("no answer")
        casts = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        raise RuntimeError(f"{text} {os.getpid()} {casts}" + chr(10) + "and more")
    return ours, ours
"""
SPECS = [((2,), torch.float32, "cpu", False)]


@pytest.mark.usefixtures("_fresh")
def test_another_process_measures_one_after_another(forms_to_measure: Any) -> None:
    first, second = (times_of(forms_to_measure, (text,), SPECS) for text in ("one", "two"))
    assert isinstance(first, str) and isinstance(second, str)
    assert first.split()[0] == "one" and second.split()[0] == "two"
    assert first.split()[1] == second.split()[1] != str(os.getpid()), "one process for both"


@pytest.mark.usefixtures("_fresh", "_forked")
def test_it_measures_under_the_autocast_that_the_kernel_would_run_under(
    forms_to_measure: Any,
) -> None:
    plain = times_of(forms_to_measure, ("one",), SPECS)
    with torch.autocast("cpu", torch.float16):
        cast = times_of(forms_to_measure, ("one",), SPECS)
    assert str(plain).split()[-1] == "False"
    assert str(cast).split()[-1] == "torch.float16"


@dataclass(frozen=True)
class _Asks(Pattern):
    """Measures nothing, but says under what it would."""

    anchors = ("relu",)
    family = "kernels"
    seen: ClassVar[list[bool]] = []

    def match(self, node: torch.fx.Node) -> Miss:
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return Miss("asked")

    def rewrite(self, match: Match, edit: Editor) -> None:
        raise AssertionError("nothing matches")

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def test_a_pattern_decides_under_the_autocast_of_its_node() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x.relu() + 1
        return y.relu()

    def backend(module: torch.fx.GraphModule, inputs: object) -> Any:
        rewrite(module, [Phase("asks", (_Asks(),))], strict=True)
        return module.forward

    _Asks.seen.clear()
    torch.compile(f, backend=backend)(torch.ones(3))
    assert _Asks.seen == [True, False]


@pytest.mark.usefixtures("_fresh", "_forked")
def test_a_process_that_dies_takes_one_question_along(forms_to_measure: Any) -> None:
    told = [times_of(forms_to_measure, (text,), SPECS) for text in ("one", "die", "two")]
    assert told[1] == "the process ended with -9"
    assert str(told[0]).split()[0] == "one" and str(told[2]).split()[0] == "two"


@pytest.mark.usefixtures("_fresh", "_forked")
def test_a_process_that_had_nothing_to_do_is_replaced(
    forms_to_measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_gate, "IDLE_SECONDS", 0.1)
    told = [times_of(forms_to_measure, ("one",), SPECS)]
    (server,) = kernel_gate._servers.values()
    assert server._process is not None
    assert server._process.wait(timeout=60) == 0
    told.append(times_of(forms_to_measure, ("two",), SPECS))
    assert [str(text).split()[0] for text in told] == ["one", "two"]


@pytest.mark.usefixtures("_fresh")
def test_what_was_measured_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_gate, "_in_another_process", lambda job: [(1.0, 2.0), (3.0, 4.0)])
    measured = times_of(_forms, (), SPECS)
    kernel_gate._known.clear()
    monkeypatch.setattr(kernel_gate, "_in_another_process", lambda job: "measured again")
    assert times_of(_forms, (), SPECS) == measured == [(1.0, 2.0), (3.0, 4.0)]
    assert times_of(_forms, ("other",), SPECS) == "measured again"


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
    report = check_program(module, (torch.randn(4096, 5, device="cuda"),), "kernels")
    records = {p.name: p for graph in report.graphs for p in graph.patterns}
    misses = " ".join(records[FuseNarrowMlp.name()].misses)
    assert report.fired(FuseNarrowMlp.name()) or "no faster here" in misses
