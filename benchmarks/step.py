"""Time a training step of models under every provider, in one run, on the same inputs.

    python -m benchmarks.step                                  # all there is, on this GPU
    python -m benchmarks.step --model mmoe --batch 512 4096 --seconds 540
    python -m benchmarks.step --device cpu                     # three models, small, no code made

bf16 autocast and fused AdamW; float32 for the illustrative graph and with --no-amp. For each model
and batch every provider first compiles with cold caches in a process of its own, which measures its
memory; then all are compiled here, from those caches, and timed in turns. A provider whose logits
or gradients are off (error to float64 over twice that of eager) gets no speed-up. Rows go to a CSV
file as each model is done; at the end plots are drawn beside it and the tables printed as Markdown,
with what was left out.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import plots
from benchmarks.alone import caches, measure
from benchmarks.bench import Bench, Exact, Setting, Step, kernels, release, time_in_turns
from benchmarks.models import MODELS
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.rows import Row, append, commit, summary, table, where

# What a CPU runs within two minutes if no models are named.
_ON_CPU = ["per_feature_encoder", "masknet", "dlrm"]
# Of the time there is; the rest is for timing what has been compiled by then.
_COMPILE_SHARE = 0.85


@dataclass
class Plan:
    """How much to run: `rounds` of `count` steps; nothing new begins when `seconds` are over.

    `left_out` gathers what was not run, and why.
    """

    rounds: int = 7
    count: int = 20
    seconds: float | None = None
    in_own_process: bool = True
    started: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list[str])

    @property
    def compile_seconds_left(self) -> float | None:
        """Until no further provider is compiled; None without a limit."""
        if self.seconds is None:
            return None
        return self.seconds * _COMPILE_SHARE - (time.monotonic() - self.started)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        left = self.compile_seconds_left
        return left is not None and left <= 0


class Comparison:
    """All providers on one setting."""

    def __init__(self, setting: Setting, plan: Plan, cache: Path, commit: str) -> None:
        self.setting, self.plan, self.cache, self.commit = setting, plan, cache, commit
        self.rows: dict[str, Row] = {}
        self.steps: dict[str, Step] = {}

    def run(self, names: Sequence[str]) -> list[Row]:
        """Rows of those of the providers that apply and fit into the time."""
        # All providers' graphs stay: they share the code of one forward, and are timed in turns.
        torch._dynamo.reset()
        with torch._dynamo.config.patch(recompile_limit=8 * len(PROVIDERS)):
            return self._rows(names)

    def _rows(self, names: Sequence[str]) -> list[Row]:
        wanted = [PROVIDERS[name] for name in names if self._is_wanted(PROVIDERS[name])]
        if not wanted:
            return []
        self.bench = Bench(self.setting)
        self.exact = Exact(self.bench)
        release(self.setting.device)
        for provider in wanted:
            if self.plan.is_over:
                self._leave_out(provider, "the time was up")
            else:
                self._try(provider)
        plan = self.plan
        times = time_in_turns(self.steps, self.setting.device, plan.rounds, plan.count)
        for name, found in times.items():
            self.rows[name].fill_times(found)
        return list(self.rows.values())

    def _is_wanted(self, provider: Provider) -> bool:
        setting = self.setting
        reason = provider.objection(setting.model, setting.device, setting.inner)
        if not reason and self.plan.is_over:
            reason = "the time was up"
        if reason:
            self._leave_out(provider, reason)
        return not reason

    def _leave_out(self, provider: Provider, reason: str) -> None:
        what = f"{self.setting.model.name} {self.setting.batch} {provider.name}"
        self.plan.left_out.append(f"{what}: {reason}")

    def _try(self, provider: Provider) -> None:
        print(f"-- {self.setting.model.name} {self.setting.batch} {provider.name}", flush=True)
        row = self.rows[provider.name] = self._row(provider)
        folder = self.cache / provider.name
        if self.plan.in_own_process:
            limit = self.plan.compile_seconds_left
            found = measure(self.setting, provider, folder, None if limit is None else limit + 1)
            for name, value in found.__dict__.items():
                setattr(row, name, value)
            if found.failure:
                return
        try:
            with _environment(caches(folder)):
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
    plan = Plan(chosen.rounds, chosen.steps, chosen.seconds, not chosen.one_process)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        for name in chosen.model:
            for batch in chosen.batch:
                model = MODELS[name]
                amp = model.amp and not chosen.no_amp
                setting = Setting(model, batch, chosen.device, chosen.size, amp, chosen.inner)
                folder = Path(cache) / f"{name}-{batch}"
                rows += _compare(setting, plan, folder, chosen)
                release(chosen.device)
    return rows, plan.left_out


def _compare(setting: Setting, plan: Plan, cache: Path, chosen: argparse.Namespace) -> list[Row]:
    comparison = Comparison(setting, plan, cache, chosen.commit)
    try:
        made = comparison.run(chosen.provider)
    except torch.OutOfMemoryError as error:
        release(setting.device)
        made = []
        what = f"{setting.model.name} {setting.batch}"
        plan.left_out.append(f"{what}: {str(error).splitlines()[0]}")
    append(made, chosen.out)
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
