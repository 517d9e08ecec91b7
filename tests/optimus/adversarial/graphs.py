"""Graphs written one by one to mislead a rewriter, and how each is compared with eager mode.

A graph is a function `f(m, *inputs)`, decorated with `@graphs(...)`; `m` holds its modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimus.backend import OptimusBackend
from optimus.outcome import Outcome, fact_difference, observe, value_difference

Shape = tuple[int, ...]
Spec = Shape | Tensor | int | float
GATES = {
    name: {"gate": "always"}
    for name in ("fuse_cross_layer", "fuse_dot_interaction", "fuse_narrow_mlp")
}


@dataclass(frozen=True)
class Case:
    """One graph. `inputs`: shapes of random tensors that require gradients, or tensors as they are;
    a first size of 4 is the batch; these may be views of one another. Of a negative size, and of a
    number, each further call has one more. `modes` are those it is
    checked in: train, eval, no_grad, inference, autocast, double, dynamic (two batches), symbolic
    (torch.compile's dynamic=True), single (a batch of one), empty (no batch), again (two calls
    whose gradients add up), aot (under AOTAutograd)."""

    name: str
    forward: Callable[..., Any]
    inputs: Sequence[Spec]
    modules: Callable[[], dict[str, Any]]
    modes: tuple[str, ...]
    coarse: bool


class Graphs:
    """Collects the graphs of one file."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def __call__(
        self,
        *inputs: Spec,
        modules: Callable[[], dict[str, Any]] = dict,
        modes: str = "train dynamic",
        coarse: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(forward: Callable[..., Any]) -> Callable[..., Any]:
            name = getattr(forward, "__name__", "")
            case = Case(name, forward, inputs, modules, tuple(modes.split()), coarse)
            self.cases.append(case)
            return forward

        return add

    def params(self) -> Iterator[Any]:
        """One parameter of a test for each graph and mode; all modes but the first are slow."""
        for case in self.cases:
            for mode in case.modes:
                marks = [pytest.mark.slow] if mode != case.modes[0] else []
                yield pytest.param(case, mode, id=f"{case.name}-{mode}", marks=marks)


_BATCHES = {
    "dynamic": (4, 6),
    "symbolic": (4, 6, 1),
    "single": (1,),
    "empty": (0,),
    "again": (4, 4),
}


def _at_call(spec: Spec, index: int) -> Spec:
    if isinstance(spec, int | float):
        return spec + index
    if isinstance(spec, Tensor):
        return spec
    return tuple(index - size if size < 0 else size for size in spec)


class _Module(nn.Module):
    def __init__(self, forward: Callable[..., Any], parts: dict[str, Any]) -> None:
        super().__init__()
        self._call = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self._call(self, *inputs)


@dataclass
class _Run:
    case: Case
    mode: str
    precision: float = field(init=False)

    def __post_init__(self) -> None:
        coarse = self.mode == "autocast" or self.case.coarse
        self.precision = torch.finfo(torch.bfloat16).eps if coarse else 0.0

    def outcomes(self, backend: Any = None, widen: bool = False) -> list[Outcome]:
        torch.manual_seed(0)
        module = _Module(self.case.forward, self.case.modules())
        module.train(self.mode != "eval")
        widen = widen or self.mode == "double"
        module = module.double() if widen else module
        call: Callable[..., Any] = module
        if backend is not None:
            torch._dynamo.reset()
            symbolic = True if self.mode == "symbolic" else None
            call = torch.compile(module, backend=backend, dynamic=symbolic)
        found: list[Outcome] = []
        for call_index, batch in enumerate(_BATCHES.get(self.mode, (4,))):
            given = copy.deepcopy(self.case.inputs)  # as a whole: views of one tensor stay such
            specs = [_at_call(spec, call_index) for spec in given]
            inputs = [self._input(i, spec, batch, widen) for i, spec in enumerate(specs)]
            if self.mode == "dynamic":
                for tensor in inputs:
                    if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape[0] == batch:
                        torch._dynamo.maybe_mark_dynamic(tensor, 0)
            with self._context(widen):
                found.append(observe(module, inputs, call))
            if self.mode != "again":
                module.zero_grad(set_to_none=True)
        return found

    def _input(self, i: int, spec: Spec, batch: int, widen: bool) -> Any:
        if isinstance(spec, int | float):
            return spec
        if isinstance(spec, Tensor):
            if not widen or not spec.is_floating_point():
                return spec
            return spec.detach().double().requires_grad_(spec.requires_grad)
        generator = torch.Generator().manual_seed(100 + i + batch)
        shape = tuple(batch if i == 0 and size == 4 else size for i, size in enumerate(spec))
        value = torch.randn(shape, generator=generator)
        return (value.double() if widen else value).requires_grad_()

    @contextmanager
    def _context(self, widen: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.mode != "no_grad"))
            if self.mode == "inference":
                stack.enter_context(torch.inference_mode())
            if self.mode == "autocast" and not widen:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            yield


def check(case: Case, mode: str, patterns: str | Sequence[str] = "all") -> None:
    """Raise AssertionError if the graph under Optimus does what it does not in eager mode."""
    inner = "aot_eager" if mode == "aot" else "eager"
    run = _Run(case, mode)
    expected = run.outcomes()
    backend = OptimusBackend(patterns, knobs=GATES, inner=inner, strict=True, verify=False)
    try:
        actual = run.outcomes(backend)
    except Exception:
        run.outcomes(OptimusBackend("none", inner=inner))  # must raise no less
        raise
    assert backend.report.graphs, "nothing was compiled"
    for graph in backend.report.graphs:
        assert not graph.fallback, graph.fallback
    reason = _difference(run, expected, actual)
    # A compiler's view of memory is not always eager's: F.dropout(x, p=0) is x itself in eager.
    for kind in dict.fromkeys((inner, "aot_eager")):
        if reason is not None:
            plain = run.outcomes(OptimusBackend("none", inner=kind))
            reason = _difference(run, expected, actual, plain)
    assert reason is None, f"{case.name}, {mode}: {reason}"


def _difference(
    run: _Run, expected: list[Outcome], actual: list[Outcome], plain: list[Outcome] | None = None
) -> str | None:
    reference: list[Outcome] | None = None
    for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
        also = plain[i] if plain else None
        if (reason := fact_difference(one, other, also)) is not None:
            return f"call {i}: {reason}"
        # PyTorch itself draws other random numbers in a compiled program.
        wanted = also or one
        if value_difference(wanted, other, None) is None:
            continue
        if reference is None:
            try:
                reference = run.outcomes(widen=True)
            except RuntimeError:  # float64 and another type that the graph names
                reference = run.outcomes()
        reason = value_difference(wanted, other, reference[i], run.precision)
        if reason is not None:
            return f"call {i}: {reason}"
    return None
