"""Windows of warm steps, peak memory and batch sizes, measured for real on this machine."""

from __future__ import annotations

import time
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optimus.figures import Window
from optimus.measure import (
    SETTLE_STEPS,
    CudaClock,
    CudaMemory,
    HostClock,
    HostMemory,
    KernelProbe,
    ThroughputMeter,
    batch_size_of,
    count_kernels,
    frames_compiled,
    release_memory,
)


class ScriptedClock:
    """A clock that the test moves; marks after `reachable` are not reached yet, as on a GPU."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reachable = float("inf")
        self.waits = 0

    def mark(self) -> float:
        return self.now

    def reached(self, mark: float) -> bool:
        return mark <= self.reachable

    def wait(self, mark: float) -> None:
        self.waits += mark > self.reachable

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class ScriptedMemory:
    """Peaks that the test sets."""

    note = "scripted"

    def __init__(self) -> None:
        self.peak = 0
        self.resets = 0

    def reset(self) -> None:
        self.peak = 0
        self.resets += 1

    def sample(self) -> None:
        pass

    def read(self) -> dict[str, int]:
        return {"allocated": self.peak}


def meter(warmup: int = 2, window: int = 3) -> tuple[ThroughputMeter, ScriptedClock, Any]:
    clock, memory = ScriptedClock(), ScriptedMemory()
    return ThroughputMeter(clock, memory, warmup, window), clock, memory


def run(
    under: ThroughputMeter, clock: ScriptedClock, steps: range, seconds: float = 1.0, **kw: Any
) -> None:
    for step in steps:
        under.begin_step()
        clock.now += seconds
        under.end_step(step, kw.get("samples", 8), kw.get("compiled", False))


def test_warm_up_is_left_out_and_windows_follow_without_gap() -> None:
    under, clock, _ = meter()
    run(under, clock, range(2), seconds=50.0)
    run(under, clock, range(2, 9), seconds=0.5)
    found = under.finished()
    assert [w.first_step for w in found] == [2, 5]
    assert [w.rate for w in found] == [16.0, 16.0]
    assert under.finished() == []


def test_time_between_steps_counts_but_interruptions_do_not() -> None:
    under, clock, _ = meter(warmup=1, window=2)
    run(under, clock, range(1))
    clock.now += 1.0  # loading the next batch
    run(under, clock, range(1, 2))
    under.interrupt()
    clock.now += 100.0  # validation
    run(under, clock, range(2, 3))
    (found,) = under.finished()
    assert found.seconds == pytest.approx(3.0)


def test_a_window_that_compiled_is_thrown_away_and_started_again() -> None:
    under, clock, _ = meter(warmup=1, window=3)
    run(under, clock, range(3))
    run(under, clock, range(3, 4), seconds=60.0, compiled=True)
    run(under, clock, range(4, 4 + SETTLE_STEPS), seconds=9.0)
    run(under, clock, range(4 + SETTLE_STEPS, 7 + SETTLE_STEPS))
    (found,) = under.finished()
    assert found.first_step == 4 + SETTLE_STEPS
    assert found.seconds == pytest.approx(3.0)
    assert under.discarded == 1


def test_the_peak_of_a_window_spans_an_interruption_but_not_what_happened_in_it() -> None:
    under, clock, memory = meter(warmup=1, window=2)
    run(under, clock, range(1))
    under.begin_step()
    memory.peak = 70
    clock.now += 1
    under.end_step(1, 8, False)
    under.interrupt()
    memory.peak = 900  # validation
    under.begin_step()
    memory.peak = 50
    clock.now += 1
    under.end_step(2, 8, False)
    assert under.finished()[0].peak_memory == {"allocated": 70}
    assert memory.peak == 0, "the next window begins with its own peak"


def test_marks_that_the_device_has_not_reached_are_not_waited_for() -> None:
    under, clock, _ = meter(warmup=1, window=2)
    clock.reachable = 2.0
    run(under, clock, range(5))
    assert under.finished() == []
    assert clock.waits == 0
    clock.reachable = 3.0
    assert len(under.finished()) == 1
    assert len(under.finished(wait=True)) == 1
    assert clock.waits == 1


def test_host_time_is_real_time() -> None:
    under = ThroughputMeter(HostClock(), HostMemory(), 1, 4)
    for step in range(5):
        under.begin_step()
        time.sleep(0.02)
        under.end_step(step, 10, False)
    (found,) = under.finished()
    assert 10 / 0.2 < found.rate < 10 / 0.019
    assert isinstance(found, Window)


def test_the_resident_peak_is_reset_between_windows() -> None:
    memory = HostMemory()
    if "peak resident" not in memory.note:
        pytest.skip("this system does not let a process reset its peak")
    release_memory(torch.device("cpu"))  # the block is to take memory that is not there yet
    memory.reset()
    before = memory.read()["resident"]
    block = torch.ones(25_000_000)  # 100 MB
    del block
    release_memory(torch.device("cpu"))  # the C library may have put it on a heap it keeps
    grown = memory.read()["resident"]
    memory.reset()
    assert grown - before > 80e6
    assert memory.read()["resident"] < grown - 80e6


def test_without_a_resettable_peak_the_resident_size_is_sampled_and_said_to_be(
    tmp_path: Path,
) -> None:
    (tmp_path / "clear_refs").mkdir()  # writing to it fails, whoever runs the test
    status = tmp_path / "status"
    status.write_text("VmHWM:\t 900 kB\nVmRSS:\t 100 kB\n")
    memory = HostMemory(tmp_path)
    memory.reset()
    memory.sample()
    status.write_text("VmHWM:\t 900 kB\nVmRSS:\t 80 kB\n")
    memory.sample()
    assert memory.read() == {"resident": 100 * 1024}
    assert "not seen" in memory.note


def test_a_system_without_proc_gives_no_figure(tmp_path: Path) -> None:
    memory = HostMemory(tmp_path / "absent")
    memory.sample()
    assert memory.read() == {}
    assert "does not tell" in memory.note


def test_kernels_are_not_counted_without_a_gpu_and_the_reason_is_given() -> None:
    assert "CUDA" in KernelProbe.unavailable(torch.device("cpu"))


def test_only_device_events_that_are_kernels_count() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).add(1)
    events = list(profile.events() or ())
    assert events
    assert count_kernels(events) == 0, "host operations are no kernels"
    on_device = SimpleNamespace(name="CUDA")
    kernel = SimpleNamespace(name="triton_poi_fused_add_0", device_type=on_device)
    copy = SimpleNamespace(name="Memcpy HtoD (Pinned -> Device)", device_type=on_device)
    note = SimpleNamespace(name="step", device_type=on_device, is_user_annotation=True)
    assert count_kernels([kernel, copy, note, kernel]) == 2


@pytest.mark.gpu
def test_kernels_of_a_step_are_counted_on_a_gpu() -> None:
    x = torch.ones(8, device="cuda")
    probe = KernelProbe()
    x.add(1).mul(2)
    assert probe.stop() == 2


def test_frames_compiled_by_anyone_are_seen() -> None:
    # Names torch._dynamo.utils.counters: a release without it fails here.
    before = frames_compiled()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert frames_compiled() > before


Pair = namedtuple("Pair", "first second")


@dataclass
class RecBatch:
    dense: torch.Tensor
    labels: torch.Tensor


@dataclass
class Nested:
    name: str
    inner: dict[str, list[torch.Tensor]]


class Opaque:
    pass


class Graphs:
    """Like a PyTorch Geometric batch: rows are nodes, not samples."""

    def __init__(self) -> None:
        self.x = torch.zeros(50, 2)
        self.batch_size = 4


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(7, 3), 7),
        ([torch.zeros(7, 3), torch.zeros(7)], 7),
        ({"step": 3, "x": torch.zeros(6)}, 6),
        (Pair(["a", "b"], torch.zeros(2)), 2),
        ((torch.tensor(1.0), torch.zeros(5)), 5),
        (RecBatch(torch.zeros(9, 13), torch.zeros(9, 1)), 9),
        (Nested("n", {"ids": [torch.zeros(3)]}), 3),
        (Graphs(), 4),
        (SimpleNamespace(batch_size=torch.Size([11, 2])), 11),
        (Opaque(), None),
        ("text", None),
        (None, None),
        ([], None),
    ],
)
def test_batch_sizes(batch: object, size: int | None) -> None:
    assert batch_size_of(batch) == size


def test_a_cyclic_batch_ends() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert batch_size_of(cyclic) is None


def test_a_keyed_jagged_tensor_counts_samples_not_values() -> None:
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor")
    kjt = sparse.KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b"],
        values=torch.arange(9),
        lengths=torch.tensor([2, 1, 0, 3, 1, 2]),
    )
    assert batch_size_of(kjt) == 3
    assert batch_size_of({"sparse": kjt, "labels": torch.zeros(3)}) == 3


@pytest.mark.gpu
def test_measuring_on_a_gpu_never_waits_for_it() -> None:
    """A step that keeps the device busy for long returns at once, and is timed all the same."""
    under = ThroughputMeter(CudaClock(), CudaMemory(torch.device("cuda")), 1, 2)
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in range(3):
        under.begin_step()
        for _ in range(40):
            torch.mm(x, x)
        under.end_step(step, 1, False)
        assert under.finished() == [] or step == 2
    on_host = time.perf_counter() - began
    (found,) = under.finished(wait=True)
    assert found.seconds > on_host
    assert found.peak_memory["allocated"] >= 2 * x.numel() * 4
