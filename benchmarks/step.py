"""Time a training step of models under every provider, in one run, on the same inputs.

    python -m benchmarks.step                                  # all there is, on this GPU
    python -m benchmarks.step --model mmoe --batch 512 4096 --seconds 540
    python -m benchmarks.step --device cpu                     # three models, small, no code made

bf16 autocast and fused AdamW; float32 for the illustrative graph and with --no-amp. For each model
and batch every provider first compiles with cold caches in a process of its own, which measures its
memory (--jobs of them at a time); then all are compiled here, from those caches, and timed in
turns. A provider whose logits or gradients are off (error to float64 over twice that of eager) gets
no speed-up. Rows go to a CSV file as each model is done; at the end plots are drawn beside it and
the tables printed as Markdown, with what was left out.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from benchmarks import plots
from benchmarks.alone import Figures, caches, measure
from benchmarks.bench import Bench, Exact, Setting, Step, kernels, release, time_in_turns
from benchmarks.models import MODELS
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.rows import Row, append, commit, summary, table, where

# What a CPU runs within two minutes if no models are named.
_ON_CPU = ["per_feature_encoder", "masknet", "dlrm"]
# Of the time there is: for processes of their own, and until nothing more is compiled here. The
# rest is for timing what has been compiled by then.
_ALONE_SHARE = 0.55
_COMPILE_SHARE = 0.85


@dataclass
class Plan:
    """How much to run: `rounds` of `count` steps; nothing new begins when `seconds` are over.

    `jobs`: how many processes of their own run side by side. `left_out` gathers what was not run,
    and why.
    """

    rounds: int = 7
    count: int = 20
    seconds: float | None = None
    jobs: int = 1
    in_own_process: bool = True
    started: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list[str])

    def seconds_left(self, share: float) -> float:
        """Until this share of the time is over; infinite without a limit."""
        if self.seconds is None:
            return math.inf
        return self.seconds * share - (time.monotonic() - self.started)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be compiled here."""
        return self.seconds_left(_COMPILE_SHARE) <= 0

    def leave_out(self, setting: Setting, provider: Provider, reason: str) -> None:
        """Say why this is not measured."""
        what = f"{setting.model.name} {setting.batch} {provider.name}"
        self.left_out.append(f"{what}: {reason}")


class Comparison:
    """The providers that apply to one setting; `alone`: what their own processes found."""

    def __init__(
        self, setting: Setting, names: Sequence[str], plan: Plan, cache: Path, commit: str
    ) -> None:
        self.setting, self.plan, self.cache, self.commit = setting, plan, cache, commit
        self.providers: list[Provider] = []
        self.alone: dict[str, Figures] = {}
        self.rows: dict[str, Row] = {}
        self.steps: dict[str, Step] = {}
        for provider in (PROVIDERS[name] for name in names):
            if reason := provider.objection(setting.model, setting.device, setting.inner):
                plan.leave_out(setting, provider, reason)
            else:
                self.providers.append(provider)

    def measure_alone(self, provider: Provider) -> None:
        """Compile seconds and memory, in a process of its own."""
        left = self.plan.seconds_left(_ALONE_SHARE)
        if left > 0:
            limit = None if math.isinf(left) else left + 1
            folder = self.cache / provider.name
            self.alone[provider.name] = measure(self.setting, provider, folder, limit)

    def run(self) -> list[Row]:
        """Rows of those of the providers that fit into the time."""
        # All providers' graphs stay: they share the code of one forward, and are timed in turns.
        torch._dynamo.reset()
        with torch._dynamo.config.patch(recompile_limit=8 * len(PROVIDERS)):
            return self._rows()

    def _rows(self) -> list[Row]:
        for provider in self.providers:
            if self.plan.is_over or (self.plan.in_own_process and provider.name not in self.alone):
                self.plan.leave_out(self.setting, provider, "the time was up")
            else:
                self._try(provider)
        plan = self.plan
        times = time_in_turns(self.steps, self.setting.device, plan.rounds, plan.count)
        for name, found in times.items():
            self.rows[name].fill_times(found)
        return list(self.rows.values())

    @cached_property
    def bench(self) -> Bench:
        """Weights, inputs and labels, once the first provider needs them."""
        return Bench(self.setting)

    @cached_property
    def exact(self) -> Exact:
        """What is right."""
        exact = Exact(self.bench)
        release(self.setting.device)
        return exact

    def _try(self, provider: Provider) -> None:
        print(f"-- {self.setting.model.name} {self.setting.batch} {provider.name}", flush=True)
        row = self.rows[provider.name] = self._row(provider)
        if provider.name in self.alone:
            found = self.alone[provider.name]
            for name, value in found.__dict__.items():
                setattr(row, name, value)
            if found.failure:
                return
        try:
            with _environment(caches(self.cache / provider.name)):
                self.steps[provider.name] = self._prepare(provider, row)
        except Exception as error:
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            row.failure = f"{type(error).__name__}: {first}"[:300]
            release(self.setting.device)

    def _prepare(self, provider: Provider, row: Row) -> Step:
        """Compile and warm up; error and kernels go into `row`."""
        job = self.bench.job(provider)
        logits, seconds = self.bench.first_step(provider, job)
        if not self.plan.in_own_process:
            row.compile_seconds = seconds
        row.error, row.gradient_error = self.exact.errors(logits, job.inputs)
        del logits
        step = self.bench.warm(provider, job)
        if self.setting.on_gpu:
            row.kernels, row.gpu_busy_ms = kernels(step)
        for note in job.notes():
            print(note, flush=True)
        release(self.setting.device)
        return step

    def _row(self, provider: Provider) -> Row:
        setting = self.setting
        return Row(
            **where(setting.device),
            commit=self.commit,
            model=setting.model.name,
            batch=setting.batch,
            provider=provider.name,
            size=setting.size,
            precision="bf16" if setting.amp else "fp32",
            inner=setting.inner,
            eager_error=self.exact.eager_error,
            eager_gradient_error=self.exact.eager_gradient_error,
        )


@contextmanager
def _environment(variables: Mapping[str, str]):  # type: ignore[no-untyped-def]
    old = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with what depends on the device filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", nargs="+", choices=list(MODELS), help=f"all; on a CPU {', '.join(_ON_CPU)}"
    )
    parser.add_argument("--provider", nargs="+", default=list(PROVIDERS), choices=list(PROVIDERS))
    parser.add_argument("--batch", nargs="+", type=_positive, help="4096; 64 on a CPU")
    parser.add_argument("--device", type=torch.device, help="cuda if there is one")
    parser.add_argument("--size", choices=("full", "small"), help="small on a CPU")
    parser.add_argument(
        "--inner", choices=("inductor", "aot_eager"), help="the compiler; aot_eager on a CPU"
    )
    parser.add_argument("--no-amp", action="store_true", help="float32 instead of bf16 autocast")
    parser.add_argument("--rounds", type=_positive, default=7)
    parser.add_argument("--steps", type=_positive, help="in a row in a round: 20; 3 on a CPU")
    parser.add_argument("--seconds", type=_positive, help="begin nothing new when they are over")
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=1,
        help="processes of their own at a time; with more than 1 compile seconds are a little high",
    )
    parser.add_argument(
        "--one-process",
        action="store_true",
        help="no process for each provider, no memory figures; always so on a CPU",
    )
    parser.add_argument("--commit", default=commit(), help="what to call the code measured")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step.csv"))
    found = parser.parse_args(arguments)
    if found.device is None:
        found.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = found.device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here; --device cpu runs small sizes")
    found.model = found.model or (list(MODELS) if on_gpu else _ON_CPU)
    found.batch = found.batch or [4096 if on_gpu else 64]
    found.size = found.size or ("full" if on_gpu else "small")
    found.inner = found.inner or ("inductor" if on_gpu else "aot_eager")
    found.steps = found.steps or (20 if on_gpu else 3)
    found.one_process |= not on_gpu
    return found


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def run(chosen: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """All rows, written to the CSV file as they are made, and what was left out."""
    plan = Plan(chosen.rounds, chosen.steps, chosen.seconds, chosen.jobs, not chosen.one_process)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        comparisons: list[Comparison] = []
        for name, batch in itertools.product(chosen.model, chosen.batch):
            model = MODELS[name]
            amp = model.amp and not chosen.no_amp
            setting = Setting(model, batch, chosen.device, chosen.size, amp, chosen.inner)
            cache = Path(folder) / f"{name}-{batch}"
            comparisons.append(Comparison(setting, chosen.provider, plan, cache, chosen.commit))
        if plan.in_own_process:
            with ThreadPoolExecutor(plan.jobs) as pool:
                jobs = [pool.submit(c.measure_alone, p) for c in comparisons for p in c.providers]
            for job in jobs:
                job.result()
            del jobs  # they hold the comparisons
        while comparisons:  # none of them, nor what it has on the GPU, stays for the next
            rows += _compare(comparisons.pop(0), chosen.out)
            release(chosen.device)
    return rows, plan.left_out


def _compare(comparison: Comparison, out: Path) -> list[Row]:
    setting, plan = comparison.setting, comparison.plan
    try:
        made = comparison.run()
    except torch.OutOfMemoryError as error:
        made = []
        what = f"{setting.model.name} {setting.batch}"
        plan.left_out.append(f"{what}: {str(error).splitlines()[0]}")
    append(made, out)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's text."""
    chosen = options(arguments)
    rows, left_out = run(chosen)
    plots.draw(rows, chosen.out.with_suffix(".png"))
    repeated = [name for name, model in MODELS.items() if model.fused is not None]
    print(f"\n{table(rows)}\n\n{summary(rows, repeated)}")
    for what in left_out:
        print(f"left out: {what}")


if __name__ == "__main__":
    main()
