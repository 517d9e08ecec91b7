"""Comparing one random program under Optimus with eager mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optimus.backend import OptimusBackend
from optimus.outcome import Outcome, fact_difference, observe, value_difference
from tests.optimus.adversarial.graphs import GATES
from tests.optimus.program import Program

NUM_TRIALS = 3
"""A value is wrong if it is off for as many sets of inputs; a bit of rounding may tip a comparison
on one of them."""


class Discarded(Exception):
    """A program that cannot be compared; the text says why."""


def check(program: Program, inner: str, patterns: str = "all", kernels: bool = False) -> None:
    """Raise AssertionError if `program` does under `patterns` what it does not in eager mode.

    `kernels`: those which a measurement decides on are used wherever they fit.
    """
    for trial in range(NUM_TRIALS):
        difference = _difference(program, inner, patterns, kernels)
        if difference is None:
            return
        if difference[1] or trial == NUM_TRIALS - 1:
            how = f"{inner}{', kernels' * kernels}"
            raise AssertionError(f"{difference[0]} ({how})\n{program}")
        program.seed += 1000


def _difference(
    program: Program, inner: str, patterns: str, kernels: bool
) -> tuple[str, bool] | None:
    """What differs, and whether no rounding can explain it."""
    try:
        expected = run(program)
    except Exception as error:
        raise Discarded("eager refuses it") from error
    knobs = GATES if kernels else None
    backend = OptimusBackend(patterns, knobs=knobs, inner=inner, strict=True, verify=False)
    try:
        actual = run(program, backend)
    except Exception as error:
        _plain(program, inner)  # raises Discarded if that fails, too
        return f"{type(error).__name__}: {str(error)[:2000]}", True
    fallbacks = [graph.fallback for graph in backend.report.graphs if graph.fallback]
    assert not fallbacks, fallbacks
    if (reason := _facts(expected, actual)) is not None:
        # A compiler's view of memory is not always eager's: F.dropout(x, p=0) is x itself in eager.
        also = [_plain(program, kind) for kind in dict.fromkeys((inner, "aot_eager"))]
        if all(_facts(expected, actual, plain) is not None for plain in also):
            return reason, True
    if (reason := _values(program, expected, actual)) is not None:
        plain = _plain(program, inner)
        # PyTorch itself draws other random numbers, or none, in a compiled program.
        if _values(program, plain, actual) is not None and not _differs_by_zeros_alone(
            program, (expected, plain), actual
        ):
            return reason, False
    return None


def _differs_by_zeros_alone(
    program: Program, right: Sequence[list[Outcome]], actual: list[Outcome]
) -> bool:
    """Whether all that is off are gradients of zeros in place of none, where any compiler gives
    zeros: behind what the first part of a broken graph returns, and a later one does not read."""
    if not any(_zeros_for_none(e, a) for e, a in zip(right[0], actual, strict=True)):
        return False
    compiled = _plain(program, "aot_eager")
    cleared = [
        without_zeros(*outcomes) for outcomes in zip(right[0], actual, compiled, strict=True)
    ]
    return any(_values(program, outcomes, cleared) is None for outcomes in right)


def without_zeros(expected: Outcome, actual: Outcome, compiled: Outcome) -> Outcome:
    """`actual` with no gradient where `expected` has none, and it and `compiled` have zeros."""
    none = _zeros_for_none(expected, actual) & _zeros_for_none(expected, compiled)
    values = {name: None if name in none else value for name, value in actual.values.items()}
    return Outcome(values, actual.facts)


def _zeros_for_none(expected: Outcome, actual: Outcome) -> set[str]:
    missing = [name for name, value in expected.values.items() if value is None]
    given = {name: actual.values.get(name) for name in missing}
    return {name for name, value in given.items() if value is not None and not value.any()}


def _facts(
    expected: list[Outcome], actual: list[Outcome], also: list[Outcome] | None = None
) -> str | None:
    for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
        reason = fact_difference(one, other, also[i] if also else None)
        if reason is not None:
            return f"call {i}: {reason}"
    return None


def _values(program: Program, expected: list[Outcome], actual: list[Outcome]) -> str | None:
    if all(value_difference(e, a, None) is None for e, a in zip(expected, actual, strict=True)):
        return None
    try:
        reference = run(program, widen=True)
    except Exception as error:
        raise Discarded("there is no float64 reference") from error
    coarse = program.autocast or "bfloat16" in str(program)
    precision = torch.finfo(torch.bfloat16).eps if coarse else 0.0
    for i, (e, a, r) in enumerate(zip(expected, actual, reference, strict=True)):
        reason = value_difference(e, a, r, precision)
        if reason is not None:
            return f"call {i}: {reason}"
    return None


def _plain(program: Program, inner: str) -> list[Outcome]:
    try:
        return run(program, OptimusBackend("none", inner=inner, strict=True))
    except Exception as error:
        raise Discarded("the plain compiler refuses it") from error


def run(
    program: Program, backend: OptimusBackend | None = None, widen: bool = False
) -> list[Outcome]:
    """One outcome for each batch, from one module."""
    module = program.build(widen)
    call = module
    if backend is not None:
        torch._dynamo.reset()
        call = torch.compile(module, backend=backend, dynamic=program.symbolic or None)
    outcomes: list[Outcome] = []
    for batch in program.batches:
        inputs = program.arguments(batch, widen)
        if len(program.batches) > 1:
            for tensor, spec in zip(inputs, program.given, strict=True):
                if -1 in spec.shape and not spec.is_number:
                    torch._dynamo.maybe_mark_dynamic(tensor, spec.shape.index(-1))
        with program.context(widen):
            outcomes.append(observe(module, inputs, call))
        for parameter in module.parameters():
            parameter.grad = None
    return outcomes
