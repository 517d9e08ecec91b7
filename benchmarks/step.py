"""Time a training step of one model under every provider, in one run, on the same inputs.

    python -m benchmarks.step --model mmoe --batch 4096 --out benchmarks/results/step.csv

bf16 autocast, fused AdamW. All providers are built, checked and warmed up first, then timed in
turns. A provider whose logits are off (error to float64 over twice that of eager) gets no speed-up.
Appends one CSV row a provider and prints the table as Markdown. Without a GPU it runs the models'
small sizes, to keep this script alive.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
import gc
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import MODELS, BenchmarkModel
from benchmarks.providers import PROVIDERS, Job, Provider, autocast

WARMUP_STEPS = 5
ROUNDS = 7


@dataclass
class Row:
    """One line of the results. Times are per training step; memory is the provider's alone."""

    date: str
    commit: str
    gpu: str
    torch: str
    model: str
    batch: int
    provider: str
    ms: float = float("nan")
    ms_p10: float = float("nan")
    ms_p90: float = float("nan")
    qps: float = float("nan")
    kernels: int = 0
    gpu_busy_ms: float = float("nan")
    peak_allocated_mb: float = float("nan")
    peak_reserved_mb: float = float("nan")
    compile_seconds: float = float("nan")
    error: float = float("nan")
    eager_error: float = float("nan")
    failure: str = ""

    @property
    def is_right(self) -> bool:
        """Whether its logits are as near to float64 as eager's, by a factor of two."""
        return not self.failure and self.error <= 2 * self.eager_error + 1e-6


class Bench:
    """One model at one batch size."""

    def __init__(self, model: BenchmarkModel, batch: int, device: torch.device, amp: bool) -> None:
        self.model, self.batch, self.device, self.amp = model, batch, device, amp
        self.small = device.type != "cuda"
        torch.manual_seed(0)
        self.naive = (model.small if self.small else model.build)().to(device)
        self.inputs = model.inputs(batch, device, self.small)
        self.labels = (torch.rand(batch, model.num_tasks, device=device) < 0.3).float()
        with torch.no_grad():
            wide = copy.deepcopy(self.naive).double()
            self.exact = wide(*(x.detach().double() for x in self.inputs)).cpu()
            with autocast(device, amp):
                self.eager_error = self._error(self.naive(*self.inputs))
        del wide

    def _error(self, logits: Tensor) -> float:
        gap = logits.detach().double().cpu() - self.exact
        return (gap.norm() / self.exact.norm()).item()

    def run(self, provider: Provider, row: Row) -> Callable[[], None] | None:
        """Build and warm up one provider, fill in all of `row` but the times; its step."""
        self._collect()
        before = torch.cuda.memory_allocated() if not self.small else 0
        job = self._job(provider)
        start = time.perf_counter()
        job.forward = provider.compile(job)
        logits = job.logits()
        job.learn(logits)
        self._wait()
        row.compile_seconds = time.perf_counter() - start
        row.error, row.eager_error = self._error(logits), self.eager_error
        del logits
        step = _whole_step(job) if provider.whole_step and not self.small else job.step
        for _ in range(WARMUP_STEPS):
            step()
        self._measure(step, row, before)
        for note in job.notes:
            print(note, flush=True)
        return step

    def _job(self, provider: Provider) -> Job:
        module = copy.deepcopy(self.naive)
        if provider.fused:
            assert self.model.fused is not None
            module = self.model.fused(module)
        options: dict[str, Any] = {"fused": True, "capturable": provider.whole_step}
        if self.small:
            options = {}
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, **options)
        inputs = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in self.inputs)
        return Job(module, optimizer, module, inputs, self.labels, self.amp)

    def _measure(self, step: Callable[[], None], row: Row, before: int) -> None:
        if self.small:
            return
        self._collect()
        torch.cuda.reset_peak_memory_stats()
        reserved = torch.cuda.memory_reserved()
        step()
        self._wait()
        row.peak_allocated_mb = (torch.cuda.max_memory_allocated() - before) / 2**20
        row.peak_reserved_mb = (torch.cuda.max_memory_reserved() - reserved) / 2**20
        row.kernels, row.gpu_busy_ms = _kernels(step)

    def _collect(self) -> None:
        gc.collect()
        if not self.small:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if not self.small:
            torch.cuda.synchronize()

    def time(self, steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        """Milliseconds a step, ROUNDS figures a provider, taken in turns."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(ROUNDS):
            for name, step in steps.items():
                step()
                times[name].append(self._time(step, 3 if self.small else 20))
        return times

    def _time(self, step: Callable[[], None], count: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        self._wait()
        return (time.perf_counter() - start) / count * 1e3


def _whole_step(job: Job) -> Callable[[], None]:
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
        job.learn(job.logits())

    def replay() -> None:
        assert job.module is not None  # the graph reads and writes the job's memory: keep it
        graph.replay()

    return replay


def _kernels(step: Callable[[], None]) -> tuple[int, float]:
    """Kernels that one step runs, and for how many milliseconds the GPU works."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(e.device_time_total for e in events) / 1e3
    return len(events), busy


def measure(
    model: BenchmarkModel, batch: int, providers: Sequence[str], amp: bool, commit: str
) -> list[Row]:
    """Rows of all `providers` (those that do not apply to the model left out)."""
    # All providers' graphs stay: they share the code of one forward, and are timed in turns.
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 8 * len(PROVIDERS)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(model, batch, device, amp)
    rows: dict[str, Row] = {}
    steps: dict[str, Callable[[], None]] = {}
    for name in providers:
        provider = PROVIDERS[name]
        if provider.fused and model.fused is None:
            continue
        print(f"-- {model.name} {name}", flush=True)
        row = rows[name] = Row(*_where(commit), model.name, batch, name)
        try:
            step = bench.run(provider, row)
            if step is not None:
                steps[name] = step
        except Exception as error:
            traceback.print_exc()
            row.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]
    for name, times in bench.time(steps).items():
        _fill_times(rows[name], times)
    return list(rows.values())


def _fill_times(row: Row, times: list[float]) -> None:
    row.ms = statistics.median(times)
    deciles = statistics.quantiles(times, n=10)
    row.ms_p10, row.ms_p90 = deciles[0], deciles[-1]
    row.qps = row.batch / row.ms * 1e3


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _where(commit: str) -> tuple[str, str, str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return date, commit, gpu, torch.__version__


def append(rows: Sequence[Row], path: Path) -> None:
    """Add `rows` to a CSV file, with a header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        if is_new:
            writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; the speed-up is over plain compile, for right results only."""
    base = {(r.model, r.batch): r.ms for r in rows if r.provider == "compile"}
    lines = [
        "| model | provider | ms | speed-up | kernels | busy ms | peak MB | compile s | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        plain = base.get((r.model, r.batch), float("nan"))
        gain = f"{plain / r.ms:.2f}" if r.is_right else (r.failure[:40] or "wrong")
        lines.append(
            f"| {r.model} {r.batch} | {r.provider} | {r.ms:.2f} | {gain} | {r.kernels} | "
            f"{r.gpu_busy_ms:.2f} | {r.peak_allocated_mb:.0f} | {r.compile_seconds:.0f} | "
            f"{r.error:.1e} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int, default=[4096])
    parser.add_argument("--provider", nargs="+", default=list(PROVIDERS), choices=list(PROVIDERS))
    parser.add_argument("--no-amp", action="store_true", help="float32 instead of bf16 autocast")
    parser.add_argument("--commit", default=_commit(), help="what to call the code measured")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step.csv"))
    options = parser.parse_args(arguments)
    everything: list[Row] = []
    for name in options.model:
        for batch in options.batch:
            rows = measure(
                MODELS[name], batch, options.provider, not options.no_amp, options.commit
            )
            append(rows, options.out)
            everything += rows
    print(table(everything))


if __name__ == "__main__":
    main()
