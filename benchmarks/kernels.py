"""Time every kernel against PyTorch and its compiler on the models' shapes, in one run.

    python -m benchmarks.kernels                      # all cases; add --case NAME ... for some
    python -m benchmarks.kernels --out benchmarks/results/kernels.csv --plots benchmarks/results

bf16, forward and training (forward and backward), kernel by kernel and as one CUDA graph. Every
provider is checked first: one whose error to float64 is over twice that of eager gets no speed-up.
All are warmed up and then timed in turns. Appends one CSV row a measurement, prints them as a
Markdown table, with the share of the card's measured ceiling (copy bandwidth, bf16 products) that
forward reaches. Without a GPU it runs 16 rows of each case, to keep this script alive.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.bench import kernels
from benchmarks.kernel_cases import CASES, Case, Form
from benchmarks.rows import append, commit, where

COMPILED = {
    "compile": {},
    "compile_max_autotune": {"mode": "max-autotune-no-cudagraphs"},
    "reduce_overhead": {"mode": "reduce-overhead"},
}
# What patterns put into graphs that are compiled: the kernels, and norms batched without them.
COMPILED_FORMS = {"ours", "one_norm"}
ROUNDS = 7


@dataclass
class Row:
    """One measurement. `share`: of the ceiling, forward only; errors are relative to float64."""

    date: str
    commit: str
    gpu: str
    torch: str
    python: str
    triton: str
    case: str
    rows: int
    provider: str
    training: bool
    cuda_graph: bool
    us: float = float("nan")
    us_p10: float = float("nan")
    us_p90: float = float("nan")
    kernels: int = 0
    share: float = float("nan")
    error: float = float("nan")
    eager_error: float = float("nan")
    failure: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it is as near to float64 as eager is, by a factor of two."""
        return not self.failure and self.error <= 2 * self.eager_error + 1e-6


@dataclass(frozen=True)
class Ceilings:
    """What the card was seen to do: bytes a second copied, operations a second in bf16 products."""

    bandwidth: float
    flops: float

    @classmethod
    def measured(cls, device: torch.device) -> Ceilings:
        """By copying 2 GiB and multiplying 8192 x 8192 matrices (far less on a CPU)."""
        is_gpu = device.type == "cuda"
        side = 8192 if is_gpu else 64
        source = torch.empty(2**30 if is_gpu else 2**12, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        one = torch.randn(side, side, device=device).bfloat16()
        copied = min(_time(lambda: target.copy_(source), device, 10) for _ in range(5))
        multiplied = min(_time(lambda: one @ one, device, 10) for _ in range(5))
        return cls(2 * source.nbytes / copied * 1e6, 2.0 * side**3 / multiplied * 1e6)


class Step:
    """One provider on one case: `run` is a forward pass, or one and its backward."""

    def __init__(self, form: Form, inputs: Sequence[Tensor], training: bool) -> None:
        self.form, self.inputs, self.training = form, inputs, training
        self.wanted = [t for t in inputs if t.requires_grad]
        self.weight: Tensor | None = None

    def __call__(self) -> list[Tensor]:
        """The result, in training also all gradients."""
        if not self.training:
            with torch.no_grad():
                return [self.form(*self.inputs)]
        out = self.form(*self.inputs)
        if self.weight is None:
            generator = torch.Generator().manual_seed(1)
            weight = torch.randn(out.shape, generator=generator).bfloat16()
            self.weight = weight.to(out.device, out.dtype)
        return [out, *torch.autograd.grad(out, self.wanted, self.weight)]

    def captured(self) -> Callable[[], object]:
        """The step as one CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = self()
        return lambda: (graph.replay(), kept)


@dataclass(frozen=True)
class How:
    """What measurements of a run have in common: the providers called `names` are compared."""

    device: torch.device
    ceilings: Ceilings
    names: Sequence[str]
    commit: str


def measure(case: Case, rows: int, how: How) -> list[Row]:
    """Those of the providers that the case has, forward and training."""
    done: list[Row] = []
    device, ceilings = how.device, how.ceilings
    for training in (False, True):
        inputs = case.inputs(rows, torch.bfloat16, device)
        wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
        exact = [t.detach() for t in Step(case.forms["eager"], wide, training)()]
        eager_error = _error(Step(case.forms["eager"], inputs, training)(), exact)
        timed: list[tuple[Row, Callable[[], object]]] = []
        for name, form in _providers(case, how).items():
            for cuda_graph in (False, True) if device.type == "cuda" else (False,):
                if cuda_graph and name == "reduce_overhead":
                    continue  # it is one already
                row = Row(
                    commit=how.commit,
                    case=case.name,
                    rows=rows,
                    provider=name,
                    training=training,
                    cuda_graph=cuda_graph,
                    **where(device),
                )
                row.eager_error = eager_error
                done.append(row)
                try:
                    step = Step(form, inputs, training)
                    row.error = _error(step(), exact)
                    run = step.captured() if cuda_graph else step
                    run()
                    row.kernels = kernels(run)[0] if device.type == "cuda" else 0
                    timed.append((row, run))
                except Exception as failure:
                    traceback.print_exc()
                    text = str(failure).splitlines() or [""]
                    row.failure = f"{type(failure).__name__}: {text[0]}"[:200]
        _fill_times(timed, device)
        floor = max(case.bytes(rows, 2) / ceilings.bandwidth, case.flops(rows) / ceilings.flops)
        for row, _ in timed:
            row.share = float("nan") if training else floor * 1e6 / row.us
        torch._dynamo.reset()
    return done


def _providers(case: Case, how: How) -> dict[str, Form]:
    forms = dict(case.forms)
    modes = COMPILED if how.device.type == "cuda" else {}
    for name, options in modes.items():
        forms[name] = torch.compile(case.forms["eager"], dynamic=False, **options)
    for name in COMPILED_FORMS & forms.keys() if modes else ():
        forms[name] = torch.compile(forms[name], dynamic=False)
    return {name: form for name, form in forms.items() if name in how.names}


def _error(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of the relative errors of the result and of the gradients."""
    pairs = zip(values, exact, strict=True)
    return max(((v.double() - e).norm() / e.norm()).item() for v, e in pairs)


def _fill_times(timed: Sequence[tuple[Row, Callable[[], object]]], device: torch.device) -> None:
    times: list[list[float]] = [[] for _ in timed]
    for _ in range(ROUNDS if device.type == "cuda" else 2):
        for (_, run), seen in zip(timed, times, strict=True):
            seen.append(_time(run, device, 20 if device.type == "cuda" else 1))
    for (row, _), seen in zip(timed, times, strict=True):
        row.us = statistics.median(seen)
        deciles = statistics.quantiles(seen, n=10)
        row.us_p10, row.us_p90 = deciles[0], deciles[-1]


def _time(run: Callable[[], object], device: torch.device, count: int) -> float:
    """Microseconds a call, the host's time included."""
    is_gpu = device.type == "cuda"
    run()
    if is_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    if is_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; speed-ups over eager and over the best torch.compile of the
    same kind, for right results only."""
    lines = [
        "| case | rows | pass | graph | provider | us | x eager | x compile | kernels | share |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peers = [r for r in rows if _kind(r) == _kind(row) and not r.failure]
        eager = [r.us for r in peers if r.provider == "eager"]
        compiled = [r.us for r in peers if r.provider in COMPILED]
        gains = [f"{min(base) / row.us:.2f}" if base else "" for base in (eager, compiled)]
        if not row.is_right:
            gains = [row.failure[:40] or f"wrong: {row.error:.1e}", ""]
        lines.append(
            f"| {row.case} | {row.rows} | {'training' if row.training else 'forward'} | "
            f"{'yes' if row.cuda_graph else 'no'} | {row.provider} | {row.us:.1f} | {gains[0]} | "
            f"{gains[1]} | {row.kernels} | {'' if row.training else f'{row.share:.0%}'} |"
        )
    return "\n".join(lines)


def _kind(row: Row) -> tuple[str, int, bool, bool]:
    return row.case, row.rows, row.training, row.cuda_graph


def plot(rows: Sequence[Row], folder: Path) -> None:
    """One figure a case: microseconds over rows, a line a provider, by pass and CUDA graph."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(row.case for row in rows):
        kinds = sorted({(r.training, r.cuda_graph) for r in rows if r.case == name})
        figure, axes = pyplot.subplots(1, len(kinds), figsize=(5 * len(kinds), 4), squeeze=False)
        for axis, (training, graph) in zip(axes[0], kinds, strict=True):
            chosen = [
                r for r in rows if (r.case, r.training, r.cuda_graph) == (name, training, graph)
            ]
            for provider in dict.fromkeys(r.provider for r in chosen if r.is_right):
                line = [(r.rows, r.us) for r in chosen if r.provider == provider and r.is_right]
                axis.loglog(*zip(*line, strict=True), marker="o", label=provider)
            pass_name = "training" if training else "forward"
            axis.set(title=f"{pass_name}, CUDA graph: {graph}", xlabel="rows", ylabel="us")
            axis.legend(fontsize=7)
        figure.suptitle(name)
        figure.tight_layout()
        figure.savefig(folder / f"kernels_{name.replace(' ', '_')}.png", dpi=100)
        pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rows", nargs="+", type=int, help="instead of each case's own")
    names = list(COMPILED | {name: None for case in CASES.values() for name in case.forms})
    parser.add_argument("--provider", nargs="+", default=names, choices=names)
    parser.add_argument("--commit", default=commit(), help="what to call the code measured")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels.csv"))
    parser.add_argument("--plots", type=Path, help="folder for a figure a case")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceilings = Ceilings.measured(device)
    print(f"copy {ceilings.bandwidth / 1e12:.2f} TB/s, bf16 {ceilings.flops / 1e12:.0f} TFLOP/s")
    how = How(device, ceilings, options.provider, options.commit)
    everything: list[Row] = []
    for name in options.case:
        for count in options.rows or (CASES[name].rows if device.type == "cuda" else (16,)):
            print(f"-- {name}, {count} rows", flush=True)
            rows = measure(CASES[name], count, how)
            append(rows, options.out)  # as it goes: a run that is cut short keeps what it has
            everything += rows
    print(table(everything))
    if options.plots:
        plot(everything, options.plots)
    return everything


if __name__ == "__main__":
    main()
