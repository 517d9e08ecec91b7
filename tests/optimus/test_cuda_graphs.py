"""Real CUDA graphs: recording executes nothing and fails cleanly, replays train alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optimus.capture import CaptureError, CudaCapture, Results
from tests.optimus.graph_loop import Loop, LossInside

pytestmark = pytest.mark.gpu
STEPS = 20


@pytest.fixture
def capture() -> CudaCapture:
    return CudaCapture(torch.device("cuda", 0))


def test_recording_executes_nothing_and_draws_no_numbers(capture: CudaCapture) -> None:
    counter = torch.zeros(4, device="cuda")
    torch.cuda.manual_seed(1)
    first = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(1)

    def work() -> Results:
        counter.add_(1)
        return [torch.rand(4, device="cuda")]

    recorded = capture.record(work, capture.pool())
    assert counter.sum() == 0
    (drawn,) = recorded.replay()
    assert drawn is not None
    assert torch.equal(drawn, first), "the numbers that would have been drawn"
    kept = drawn.clone()
    (again,) = recorded.replay()
    assert again is drawn
    assert not torch.equal(drawn, kept), "other ones in each replay"
    assert counter.tolist() == [2.0] * 4


def _reads(x: torch.Tensor) -> Results:
    return [torch.rand(2, device="cuda"), x.sum().item()]  # type: ignore[list-item]


def _raises(x: torch.Tensor) -> Results:
    torch.rand(2, device="cuda")
    raise ValueError("of the user's own")


@pytest.mark.parametrize("work", [_reads, _raises])
def test_a_recording_that_fails_leaves_nothing_behind(capture: CudaCapture, work: Any) -> None:
    x = torch.ones(4, device="cuda")
    stream = torch.cuda.current_stream()
    torch.cuda.manual_seed(1)
    expected = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(1)
    with pytest.raises(CaptureError):
        capture.record(lambda: work(x), capture.pool())
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    assert not torch.cuda.is_current_stream_capturing()
    # Memory used by several streams is given back, too: nothing believes to be recorded any more.
    side = torch.cuda.Stream()
    before = torch.cuda.memory_allocated()
    for _ in range(4):
        big = torch.empty(1 << 20, device="cuda")
        big.record_stream(side)
        del big
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    recorded = capture.record(lambda: [x + 1], capture.pool())
    assert torch.equal(recorded.replay()[0], x + 1)  # type: ignore[arg-type]


def _loops(**adamw: Any) -> Iterator[Loop]:
    for graphed in (False, True):
        loop = Loop(graphed, device="cuda:0", inner="inductor", **adamw)
        torch.manual_seed(1)
        yield loop


@pytest.mark.parametrize("adamw", [{}, {"fused": True}, {"foreach": False}])
def test_replayed_steps_train_alike(adamw: dict[str, Any]) -> None:
    losses: list[list[float]] = []
    for loop in _loops(**adamw):
        schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.8)
        losses.append([])
        for i in range(STEPS):
            losses[-1].append(loop.step(i, rows=5 if i == 12 else 8, micro=1 + (i == 15)))
            schedule.step()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)
    assert not loop.counts["failure"]
    assert sum(loop.replays) >= STEPS - 8
    assert loop.counts["optimizers"][0]["replays"] == STEPS - 3
    assert isinstance(loop.optimizer.param_groups[0]["lr"], float)
    saved = loop.optimizer.state_dict()
    on_host = not adamw.get("fused")
    assert all((s["step"].device.type == "cpu") == on_host for s in saved["state"].values())


def test_the_loss_in_the_graph_trains_alike_and_goes_back_in_one_thread() -> None:
    losses: list[list[float]] = []
    threads: set[int] = set()
    for graphed in (False, True):
        loop = Loop(graphed, LossInside, device="cuda:0", inner="inductor", fused=True)
        torch.manual_seed(1)
        losses.append([])
        for i in range(STEPS):
            loop.begin()
            loss, logits = loop.results(i)
            assert not logits.requires_grad
            loop.optimizer.zero_grad()
            loss.register_hook(lambda g: threads.add(threading.get_ident()))
            (loss / 1).backward()
            loop.optimizer.step()
            losses[-1].append(loss.item())
            loop.end()
        if not graphed:
            threads.clear()
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)
    assert loop.replays == [STEPS - 3]
    assert not loop.counts["failure"]
    assert threads == {threading.get_ident()}


def test_gradients_are_handed_over_without_a_copy() -> None:
    loop = Loop(True, LossInside, device="cuda:0", inner="inductor", fused=True)
    for i in range(6):
        loop.begin()
        loss, _ = loop.results(i)
        loop.optimizer.zero_grad()
        loss.backward()
        assert loop.graphs is not None
        outside = {id(p) for p in loop.source.parameters()}
        leaves = [p for group in loop.optimizer.param_groups for p in group["params"]]
        inside = [p.grad for p in leaves if id(p) not in outside]
        static = loop.graphs._session.static
        assert all(g is not None and (i < 3 or g.data_ptr() in static) for g in inside)
        loop.optimizer.step()
        loop.end()


def test_dropout_differs_from_step_to_step() -> None:
    *_, loop = _loops()
    losses = []
    for _ in range(STEPS):
        loop.begin()
        loss = loop.loss(0)
        loss.backward()
        losses.append(loss.item())
        loop.end()
    assert not loop.counts["failure"]
    assert loop.replays[0] > 10
    assert len(set(losses)) > 10


def test_memory_does_not_grow() -> None:
    *_, loop = _loops()
    for i in range(8):
        loop.step(i)
    before = torch.cuda.memory_allocated()
    for i in range(8, 40):
        loop.step(i)
    assert torch.cuda.memory_allocated() == before
