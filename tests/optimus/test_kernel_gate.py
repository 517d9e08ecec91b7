"""A kernel is put in where it has won, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from optimus.kernel_gate import judge, measure, verdict
from optimus.pattern import Miss
from optimus.patterns.kernels.fuse_cross_layer import FuseCrossLayer
from optimus.patterns.kernels.fuse_narrow_mlp import FuseNarrowMlp
from optimus.testing import check_program

MLP = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))


def test_it_has_to_win_in_both_ways_of_running() -> None:
    assert judge(((1.0, 2.0), (0.5, 0.6))) is None
    assert judge(((1.0, 2.0), (0.6, 0.5))) == Miss(
        "no faster here: 1.0000 ms against 2.0000 ms of torch.compile, "
        "in a CUDA graph 0.6000 ms against 0.5000 ms of torch.compile"
    )
    assert judge("no memory") == Miss("the kernel cannot be measured: no memory")


def test_without_a_gpu_nothing_is_measured() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = torch.ones(2)
    for gate, reason in (("measure", "no GPU"), ("never", "switched off")):
        miss = verdict(gate, "op", torch.relu, torch.relu, (node,))
        assert isinstance(miss, Miss)
        assert reason in miss.reason
    assert verdict("always", "op", torch.relu, torch.relu, (node,)) is None
    with pytest.raises(ValueError, match="measure, always, never"):
        verdict("sometimes", "op", torch.relu, torch.relu, (node,))


def test_what_cannot_be_measured_says_why() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of shared memory\nand more")

    spec = ((2,), torch.float32, torch.device("cpu"), False)
    assert measure(broken, torch.relu, [spec]) == "out of shared memory"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the gate is open or measured")
def test_on_a_cpu_models_keep_their_layers_and_the_report_says_why() -> None:
    report = check_program(MLP, (torch.randn(2, 5),), "kernels")
    records = {p.name: p for graph in report.graphs for p in graph.patterns}
    assert {FuseNarrowMlp.name(), FuseCrossLayer.name()} <= records.keys()
    assert not report.fired(FuseNarrowMlp.name())
    assert "there is no GPU" in " ".join(records[FuseNarrowMlp.name()].misses)


@pytest.mark.gpu
def test_on_a_gpu_both_forms_are_timed() -> None:
    spec = ((64, 64), torch.float32, torch.device("cuda"), True)
    times = measure(lambda x: x.relu(), lambda x: torch.relu(x) * 1, [spec])
    assert isinstance(times, tuple), times
    assert all(t > 0 for pair in times for t in pair)


@pytest.mark.gpu
def test_on_a_gpu_the_gate_decides() -> None:
    module = MLP.cuda()
    report = check_program(module, (torch.randn(64, 5, device="cuda"),), "kernels")
    records = {p.name: p for graph in report.graphs for p in graph.patterns}
    misses = " ".join(records[FuseNarrowMlp.name()].misses)
    assert report.fired(FuseNarrowMlp.name()) or "no faster here" in misses
