"""Whether a hand-written kernel is worth it here: both forms are run and timed on this GPU.

A kernel pattern asks once for each kind of call: training or not, shapes, types, GPU. What it puts
in has to beat what Inductor makes of the same sub-graph, or it is a miss that says both times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node, symbolic_trace

from optimus.legality import tensor_of
from optimus.pattern import Miss

GATES = ("measure", "always", "never")
"""What a kernel pattern's knob `gate` may be."""

Form = Callable[..., Tensor]
Spec = tuple[tuple[int, ...], torch.dtype, torch.device, bool]
Times = tuple[tuple[float, float], tuple[float, float]]
"""Milliseconds of the kernel and of plain PyTorch: called one by one, and in a CUDA graph."""

ROUNDS = 5
CALLS = 10


def verdict(
    gate: str, name: str, ours: Form, plain: Form, inputs: Sequence[Node], *how: Hashable
) -> Miss | None:
    """None if the kernel is to be put in, otherwise why not.

    `ours` and `plain` compute the same of tensors like `inputs`; `how`: whatever else they depend
    on. Raises ValueError for an unknown gate.
    """
    if gate not in GATES:
        raise ValueError(f"unknown gate {gate!r}; valid: {', '.join(GATES)}")
    if gate == "always":
        return None
    values = [tensor_of(node) for node in inputs]
    if gate == "never" or not all(v is not None and v.is_cuda for v in values):
        return Miss("switched off" if gate == "never" else "there is no GPU to run a kernel on")
    specs = tuple(_spec(v) for v in values if v is not None)
    key = (name, *how, specs, torch.cuda.get_device_name(), torch.is_grad_enabled())
    if key not in _measured:
        _measured[key] = measure(ours, plain, specs)
    return judge(_measured[key])


def judge(times: Times | str) -> Miss | None:
    """The verdict on what `measure` found: the kernel has to win in both ways of running."""
    if isinstance(times, str):
        return Miss(f"the kernel cannot be measured: {times}")
    if all(ours < plain for ours, plain in times):
        return None
    each = [f"{ours:.4f} ms against {plain:.4f} ms of torch.compile" for ours, plain in times]
    return Miss(f"no faster here: {each[0]}, in a CUDA graph {each[1]}")


_measured: dict[Hashable, Times | str] = {}


def _spec(value: Tensor) -> Spec:
    shape = tuple(s if isinstance(s, int) else int(s.node.hint) for s in value.shape)
    return shape, value.dtype, value.device, value.requires_grad


def measure(ours: Form, plain: Form, specs: Sequence[Spec]) -> Times | str:
    """Times of the two forms, forward and, where an input asks for it, backward; or why they
    cannot be told. Both are compiled, and timed in turns."""
    try:
        with torch.random.fork_rng(), torch.autocast("cuda", enabled=False):
            tensors = [_example(spec) for spec in specs]
            steps = [_step(_compiled(form, tensors), tensors) for form in (ours, plain)]
            for step in steps * 3:
                step()
            replays = [_captured(step) for step in steps]
            return _compare(*steps), _compare(*replays)
    except Exception as error:  # whatever it is: training goes on without the kernel
        return (str(error).splitlines() or [""])[0] or type(error).__name__


def _example(spec: Spec) -> Tensor:
    shape, dtype, device, requires_grad = spec
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype).requires_grad_(requires_grad)


def _compiled(form: Form, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """By Inductor, as the graph around it will be."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(symbolic_trace(form), list(tensors))
    return cast(Callable[..., Any], compiled)


def _step(form: Callable[..., Any], tensors: Sequence[Tensor]) -> Callable[[], None]:
    wanted = [t for t in tensors if t.requires_grad]

    def step() -> None:
        out = form(*tensors)
        out = out[0] if isinstance(out, tuple | list) else out
        if wanted and out.requires_grad:
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
