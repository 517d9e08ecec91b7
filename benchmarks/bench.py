"""One model at one batch size: its jobs, its exact result, and what is measured of a job."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import BenchmarkModel, Inputs, SizeName
from benchmarks.providers import Inner, Job, Provider, autocast, loss_of, objective_of
from optimus.measure import clock_for, count_kernels

WARMUP_STEPS = 5
Step = Callable[[], None]


@dataclass(frozen=True)
class Setting:
    """What all providers of one comparison have in common."""

    model: BenchmarkModel
    batch: int
    device: torch.device
    size: SizeName
    amp: bool
    inner: Inner

    @property
    def on_gpu(self) -> bool:
        """Whether there are kernels and a CUDA allocator to look at."""
        return self.device.type == "cuda"


class Bench:
    """Makes the jobs of one setting: the same weights, inputs and labels for every provider."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        torch.manual_seed(0)
        self.naive = setting.model.build(setting.size).to(setting.device)
        self.inputs = setting.model.inputs(setting.batch, setting.device, setting.size)
        shape = setting.batch, setting.model.size(setting.size).num_tasks
        self.labels = (torch.rand(shape, device=setting.device) < 0.3).float()

    def job(self, provider: Provider) -> Job:
        """The model with an optimizer and inputs of its own, not compiled yet."""
        module = copy.deepcopy(self.naive)
        if provider.fused:
            assert self.setting.model.fused is not None
            module = self.setting.model.fused(module)
        options: dict[str, Any] = {}
        if self.setting.on_gpu:
            options = {"fused": True, "capturable": provider.whole_step}
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, **options)
        inputs = _copies(self.inputs)
        setting = self.setting
        objective = objective_of(module)
        return Job(module, optimizer, objective, inputs, self.labels, setting.amp, setting.inner)

    def first_step(self, provider: Provider, job: Job) -> tuple[Tensor, float]:
        """Compile and train one step: its logits, and the seconds it took."""
        start = time.perf_counter()
        job.forward = provider.compile(job)
        loss, logits = job.loss_and_logits()
        job.learn(loss)
        wait(self.setting.device)
        return logits, time.perf_counter() - start

    def warm(self, provider: Provider, job: Job) -> Step:
        """The step to measure, run a few times."""
        step = whole_step(job) if provider.whole_step else job.step
        for _ in range(WARMUP_STEPS):
            step()
        wait(self.setting.device)
        return step


class Exact:
    """Logits and gradients of the inputs in float64, and how far eager mode is from them."""

    def __init__(self, bench: Bench) -> None:
        self.logits, self.gradients = _exact(bench)
        inputs = _copies(bench.inputs)
        with autocast(bench.setting.device, bench.setting.amp):
            loss, logits = objective_of(copy.deepcopy(bench.naive))(*inputs, bench.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.eager_error, self.eager_gradient_error = self.errors(logits, inputs)

    def errors(self, logits: Tensor, inputs: Inputs) -> tuple[float, float]:
        """Relative errors (2-norm) of logits and of the inputs' gradients; nan without any."""
        pairs = zip((x.grad for x in inputs), self.gradients, strict=True)
        gaps = [_gap(grad, exact) for grad, exact in pairs if exact is not None]
        return _gap(logits.detach(), self.logits), max(gaps, default=math.nan)


def _exact(bench: Bench) -> tuple[Tensor, list[Tensor | None]]:
    """In float64; without gradients where they do not fit into memory."""
    module = copy.deepcopy(bench.naive).double()
    inputs = tuple(x.detach().double().requires_grad_(x.requires_grad) for x in bench.inputs)
    try:
        logits = module(*inputs)
        loss_of(logits, bench.labels).backward()  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        logits = None
    if logits is None:
        release(bench.setting.device)
        with torch.no_grad():
            return module(*inputs).cpu(), [None for _ in inputs]
    return logits.detach().cpu(), [None if x.grad is None else x.grad.cpu() for x in inputs]


def _gap(found: Tensor | None, exact: Tensor) -> float:
    if found is None:
        return math.inf
    return ((found.double().cpu() - exact).norm() / exact.norm()).item()


def _copies(inputs: Inputs) -> Inputs:
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)


def wait(device: torch.device) -> None:
    """Until the device has done all work queued so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give unused memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def whole_step(job: Job) -> Step:
    """The step as one CUDA graph; gradients live at fixed addresses in the graph's own pool."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            job.step()
    torch.cuda.current_stream().wait_stream(stream)
    job.forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.learn(job.loss_and_logits()[0])

    def replay() -> None:
        assert job.module is not None  # the graph reads and writes the job's memory: keep it
        graph.replay()

    return replay


def kernels(step: Step) -> tuple[int, float]:
    """Kernels that one step runs, and for how many milliseconds the GPU works."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    events: list[Any] = [e for e in profile.events() if e.device_type.name == "CUDA"]
    events = [e for e in events if not getattr(e, "is_user_annotation", False)]
    return count_kernels(events), sum(e.device_time_total for e in events) / 1e3


def time_in_turns(
    steps: Mapping[str, Step], device: torch.device, rounds: int, count: int
) -> dict[str, list[float]]:
    """Milliseconds of each step: `rounds` times `count` in a row, the providers in turns."""
    clock = clock_for(device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            wait(device)
            marks = [clock.mark()]
            for _ in range(count):
                step()
                marks.append(clock.mark())
            wait(device)
            pairs = itertools.pairwise(marks)
            times[name] += [clock.seconds(a, b) * 1e3 for a, b in pairs]
    return times


def memory_of(step: Step, device: torch.device) -> tuple[float, float]:
    """Peak MiB allocated and reserved in this process during a step, all it holds included."""
    if device.type != "cuda":
        return math.nan, math.nan
    release(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        step()
    wait(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return peaks[0] / 2**20, peaks[1] / 2**20
