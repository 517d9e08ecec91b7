"""Host microseconds of a training step whose parts are replayed as CUDA graphs, by part.

    python -m benchmarks.host_time --model per_feature_encoder masknet ple
    python -m benchmarks.host_time --out benchmarks/results/host_time.csv

Runs on a CPU: the layers are narrow, their number is that of the public model, and a replay does
nothing, so what is left is what Python, Dynamo's guards, autograd and the optimizer's bookkeeping
take between replays. On a GPU the same work is done, and each launch comes on top. Medians over
`--steps` steps.

- `dynamo`: entering the compiled forward with its loss, guards included, and returning from it
- `packing`: finding the packs to pass
- `graph`: what stands in for the compiled forward: checks, inputs copied in, results handed out
- `zero_grad`, `begin`: as they say
- `engine`: backward, but for what stands in for the compiled backward, which is `back`
- `optimizer`: its step
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.bench import Bench, Setting
from benchmarks.models import MODELS, BenchmarkModel, Size
from benchmarks.providers import Job, Provider, autocast
from benchmarks.rows import append, commit, where
from optimus import graphed_call
from optimus.backend import OptimusBackend
from optimus.capture import Recorded, Results, Work
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing
from optimus.packs import alignment_of
from optimus.step_graphs import StepGraphs

# The public models' branches and layers, few numbers in each; MaskNet's fields have as many as it.
NARROW = {
    "per_feature_encoder": Size(
        0, 64, 4, options={"hidden_dim": 4, "encoder_dim": 4, "over_layers": (8, 8)}
    ),
    "masknet": Size(0, 39, 10, options={"block_layers": (8, 8, 8)}),
    "ple": Size(0, 64, 2, 2, {"expert_layers": ((8, 6, 4),) * 3, "tower_layers": (8, 6, 4)}),
}
Parts = dict[str, list[float]]


@dataclasses.dataclass
class Row:
    """Median microseconds of a part of a replayed step."""

    date: str
    commit: str
    machine: str
    torch: str
    python: str
    model: str
    part: str
    us: float


class Nothing:
    """A capture whose replays do nothing: recording runs the work once, for its results."""

    device = torch.device("cpu")
    rate_type = torch.float64
    capturable = False

    def pool(self) -> Any:
        """Not needed."""
        return None

    def record(self, work: Work, pool: Any) -> Recorded:
        """Run it once."""
        return _Done(work())


@dataclasses.dataclass
class _Done:
    results: Results

    def replay(self) -> Results:
        return self.results


class Clock:
    """Microseconds by part; a part within another is taken off that one."""

    def __init__(self) -> None:
        self.parts: Parts = defaultdict(list)
        self._inside: list[float] = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done within."""
        self._inside.append(0.0)
        start = time.thread_time()
        yield
        whole = time.thread_time() - start
        self.parts[name].append((whole - self._inside.pop()) * 1e6)
        self._inside[-1] += whole

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed as part `name`."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call


def job_of(model: BenchmarkModel, packing: type[Packing] = Packing) -> Job:
    """The model with the callback's `cuda_graphs=step`, replays that do nothing."""
    provider = Provider("host", functools.partial(_compile, packing_type=packing))
    bench = Bench(Setting(model, 8, torch.device("cpu"), "full", True, "aot_eager"))
    job = bench.job(provider)
    job.forward = provider.compile(job)
    return job


def _compile(job: Job, packing_type: type[Packing]) -> Any:
    graphs = StepGraphs(Nothing())
    adopt = PackedOptimizer([job.optimizer]).adopt
    packing = packing_type(adopt=adopt, alignment=alignment_of(torch.device("cuda")))
    backend = OptimusBackend("all", inner=job.inner, verify=False, packing=packing, graphs=graphs)
    graphs.install([job.optimizer])
    job.begin = graphs.begin_step
    job.notes = lambda: iter([str(graphs.to_dict()), *graphs.remarks()])
    return torch.compile(job.objective, backend=backend)  # type: ignore[call-overload]


def timed_step(job: Job, clock: Clock) -> None:
    """Job.step, part by part."""
    with clock.part("begin"):
        job.begin()
    with clock.part("zero_grad"):
        job.forget()
    with clock.part("dynamo"), autocast(job.labels.device, job.amp):
        loss, _ = job.forward(*job.inputs, job.labels)
    with clock.part("engine"):
        loss.backward()  # type: ignore[no-untyped-call]
    with clock.part("optimizer"):
        job.optimizer.step()


def measure(model: BenchmarkModel, steps: int, warmup: int = 20) -> dict[str, float]:
    """Median microseconds of each part, of `all` parts and of the `step` run without a clock."""
    clock = Clock()
    call, back = graphed_call.GraphedCall.__call__, graphed_call._Link.backward
    with (
        mock.patch.object(graphed_call.GraphedCall, "__call__", clock.timed("graph", call)),
        mock.patch.object(graphed_call._Link, "backward", staticmethod(clock.timed("back", back))),
    ):
        job = job_of(model, _timed_packing(clock))
        for _ in range(warmup):
            job.step()
        clock.parts.clear()
        for _ in range(steps):
            timed_step(job, clock)
    found = {name: statistics.median(times) for name, times in clock.parts.items()}
    found["all"] = sum(found.values())
    found["step"] = whole(job_of(model), steps, warmup)
    return found


def _timed_packing(clock: Clock) -> type[Packing]:
    class Timed(Packing):
        def pack_graph(self, module: Any, inputs: Any) -> Any:
            module, inputs, wrap = super().pack_graph(module, inputs)
            return module, inputs, lambda compiled: clock.timed("packing", wrap(compiled))

    return Timed


def whole(job: Job, steps: int, warmup: int) -> float:
    """Median microseconds of a step."""
    times: list[float] = []
    for _ in range(warmup + steps):
        start = time.thread_time()
        job.step()
        times.append((time.thread_time() - start) * 1e6)
    return statistics.median(times[warmup:])


def profile(model: BenchmarkModel, steps: int) -> None:
    """Print what cProfile finds."""
    job = job_of(model)
    for _ in range(20):
        job.step()
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(steps):
            job.step()
    for note in job.notes():
        print(note)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=list(NARROW), default=list(NARROW))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--profile", action="store_true", help="print cProfile's table instead")
    parser.add_argument("--out", type=Path, help="CSV file to append the results to")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in chosen.model:
        torch._dynamo.reset()
        model = dataclasses.replace(MODELS[name], full=NARROW[name])
        if chosen.profile:
            profile(model, chosen.steps)
            continue
        found = measure(model, chosen.steps)
        print(name, *(f"{part}: {us:.0f}" for part, us in found.items()), sep="  ", flush=True)
        if chosen.out:
            append(_rows(name, found), chosen.out)


def _rows(model: str, found: dict[str, float]) -> list[Row]:
    at = where(torch.device("cpu"))
    run = (at["date"], commit(), f"{at['gpu']}, 1 core", at["torch"], at["python"])
    return [Row(*run, model, part, round(us, 1)) for part, us in found.items()]


if __name__ == "__main__":
    main()
