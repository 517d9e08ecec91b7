"""Whether a hand-written kernel is worth it here: both forms are run and timed on this GPU.

A kernel pattern asks once for each kind of call: training or not, shapes, types, GPU. What it puts
in has to beat what Inductor makes of the same sub-graph, called one by one and in a CUDA graph, or
it is a miss that says the times. Measurements are made in a process of their own, where they can
compile while this one is compiling and where a kernel that crashes takes nothing along. It serves
one question after another, and ends when none comes any more. What it finds is kept beside the
kernels' tile choices for later processes.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import pickle
import select
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kernels.tuning import cache_folder
from optimus.legality import tensor_of
from optimus.pattern import Miss
from optimus.records import NOT_FASTER, UNMEASURED

GATES = ("measure", "always", "never")
"""What a kernel pattern's knob `gate` may be."""

Form = Callable[..., Tensor]
Forms = Callable[..., tuple[Form, Form]]
"""A function of a module that makes the kernel's form and plain PyTorch's."""
Spec = tuple[tuple[int, ...], torch.dtype, str, bool]
Casts = tuple[bool, torch.dtype]
"""Whether autocast is on, and to which type it casts."""
NO_CASTS: Casts = (False, torch.bfloat16)
Times = list[tuple[float, float]]
"""Milliseconds of the kernel and of plain PyTorch: called one by one, and in a CUDA graph."""

ROUNDS = 5
CALLS = 10
TIMEOUT_SECONDS = 300
IDLE_SECONDS = 30


def verdict(
    gate: str, forms: Forms, how: Sequence[str | int | bool], inputs: Sequence[Node]
) -> Miss | None:
    """None if the kernel is to be put in, otherwise why not.

    `forms(*how)`: two functions that compute the same of tensors like `inputs`. Raises ValueError
    for an unknown gate.
    """
    if gate not in GATES:
        raise ValueError(f"unknown gate {gate!r}; valid: {', '.join(GATES)}")
    if gate == "always":
        return None
    values = [tensor_of(node) for node in inputs]
    if gate == "never" or not all(v is not None and v.is_cuda for v in values):
        return Miss("switched off" if gate == "never" else "there is no GPU to run a kernel on")
    specs = [_spec(v) for v in values if v is not None]
    return judge(times_of(forms, tuple(how), specs))


def judge(times: Times | str) -> Miss | None:
    """The verdict on what `measure` found: the kernel has to win in both ways of running."""
    if isinstance(times, str):
        return Miss(f"{UNMEASURED}: {times}")
    if all(ours < plain for ours, plain in times):
        return None
    each = [f"{ours:.4f} ms against {plain:.4f} ms of torch.compile" for ours, plain in times]
    return Miss(f"{NOT_FASTER}: {each[0]}, in a CUDA graph {each[1]}")


def times_of(forms: Forms, how: tuple[str | int | bool, ...], specs: Sequence[Spec]) -> Times | str:
    """What `measure` finds in another process, or found in an earlier one; failures are told once
    in each process."""
    device = torch.device(specs[0][2]).type
    casts = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    how_run = torch.is_grad_enabled(), casts, torch.get_float32_matmul_precision()
    job = (forms.__module__, forms.__qualname__, how, list(specs), *how_run)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    key = hashlib.sha256(repr((job, where, torch.__version__)).encode()).hexdigest()
    if key not in _known:
        _known[key] = _stored(key) or _in_another_process(job)
        if isinstance(_known[key], list):
            _store(key, _known[key])
    return _known[key]


_known: dict[str, Times | str] = {}


def _in_another_process(job: tuple[Any, ...]) -> Times | str:
    """The answer of the process that measures; a new one where there is none, or none any more."""
    with _lock:
        while True:
            server = _servers.setdefault(os.getpid(), _Server())
            try:
                return server.ask(job)
            except (OSError, ValueError, EOFError) as error:
                del _servers[os.getpid()]
                code = server.stop()
                if code != 0:  # with 0 it had nothing to do for too long
                    return _first_line(error) if code is None else f"the process ended with {code}"


class _Server:
    """A process that measures, see `main`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        # Small graphs compile sooner in one process than others take to start.
        env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "optimus.kernel_gate", str(IDLE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # Ctrl-C is for the training, which ends it in its own way
        )

    def ask(self, job: tuple[Any, ...]) -> Times | str:
        """Raises OSError, EOFError or ValueError where no answer comes."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        pickle.dump(job, process.stdin)
        process.stdin.flush()
        if not select.select([process.stdout], [], [], TIMEOUT_SECONDS)[0]:
            raise TimeoutError(f"took more than {TIMEOUT_SECONDS} s")
        line = process.stdout.readline()
        if not line:
            raise EOFError
        found = json.loads(line)
        return found if isinstance(found, str) else [(float(a), float(b)) for a, b in found]

    def stop(self) -> int | None:
        """How it ended by itself; otherwise end it."""
        process = self._process
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=1)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


_servers: dict[int, _Server] = {}
"""By the process that asks: one that was forked has none yet."""
_lock = threading.Lock()


def _file(key: str) -> Path:
    return cache_folder() / f"gate-{key[:32]}.json"


def _stored(key: str) -> Times | None:
    try:
        return [(float(a), float(b)) for a, b in json.loads(_file(key).read_text())]
    except (OSError, ValueError, TypeError):
        return None


def _store(key: str, times: Times | str) -> None:
    with contextlib.suppress(OSError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        part = _file(key).with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(times))
        part.replace(_file(key))


def _spec(value: Tensor) -> Spec:
    shape = tuple(s if isinstance(s, int) else int(s.node.hint) for s in value.shape)
    return shape, value.dtype, str(value.device), value.requires_grad


# What runs in the other process.


def measure(
    ours: Form, plain: Form, specs: Sequence[Spec], train: bool = True, casts: Casts = NO_CASTS
) -> Times | str:
    """Times of the two forms, forward and, where an input asks for it, backward; or why they
    cannot be told. Both are compiled, forward under autocast as `casts` says, and timed in turns.
    """
    try:
        tensors = [_example(spec, train) for spec in specs]
        compiled = [torch.compile(form, dynamic=False) for form in (ours, plain)]
        steps = [_step(form, tensors, casts) for form in compiled]
        for step in steps * 3:
            step()
        replays = [_captured(step) for step in steps]
        return [_compare(*steps), _compare(*replays)]
    except Exception as error:  # whatever it is: training goes on without the kernel
        return _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _example(spec: Spec, train: bool) -> Tensor:
    shape, dtype, device, requires_grad = spec
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype).requires_grad_(requires_grad and train)


def _step(form: Callable[..., Any], tensors: Sequence[Tensor], casts: Casts) -> Callable[[], None]:
    wanted = [t for t in tensors if t.requires_grad]
    enabled, dtype = casts

    def step() -> None:
        with torch.autocast(tensors[0].device.type, dtype, enabled=enabled):
            out = form(*tensors)
        if wanted:
            torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    return step


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """One step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _compare(ours: Callable[[], None], plain: Callable[[], None]) -> tuple[float, float]:
    rounds = [(_time(ours), _time(plain)) for _ in range(ROUNDS)]
    return statistics.median(t for t, _ in rounds), statistics.median(t for _, t in rounds)


def _time(step: Callable[[], None]) -> float:
    """Milliseconds a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def main() -> None:
    """Read jobs from standard input and write what was measured, a line each, to standard output.

    Ends with its input, or after as many seconds without a job as its argument says: then its GPU
    memory is needed more elsewhere.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    while select.select([sys.stdin.buffer], [], [], float(sys.argv[1]))[0]:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        print(json.dumps(_answer(job)), file=answers, flush=True)


def _answer(job: tuple[Any, ...]) -> Times | str:
    module, name, how, specs, train, casts, precision = job
    torch.set_float32_matmul_precision(precision)
    device = torch.device(specs[0][2])
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        ours, plain = getattr(importlib.import_module(module), name)(*how)
    except Exception as error:
        return _first_line(error)
    times = measure(ours, plain, specs, train, casts)
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return times


if __name__ == "__main__":
    main()
