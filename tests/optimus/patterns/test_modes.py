"""Every pattern under bf16 autocast, in float64, in eval mode and under no_grad.

test_generic.py has the rest of the matrix: float32 in training, a static and a dynamic batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from optimus.backend import OptimusBackend
from optimus.outcome import Outcome, fact_difference, observe, value_difference
from optimus.pattern import Example, Rewrite
from optimus.pipeline import patterns_by_name, select_alone

MODES = ("autocast", "double", "eval", "no_grad")
HALF_ONLY = ("pad_gemms", "round_before_relu")


@pytest.mark.parametrize("name", patterns_by_name())
def test_pattern(name: str) -> None:
    pattern = patterns_by_name()[name].ungated()
    example = next(e for e in pattern.examples() if e.fires)
    for mode in MODES:
        _check(pattern, example, mode)


def _check(pattern: Rewrite, example: Example, mode: str) -> None:
    backend = OptimusBackend("none", inner="eager", strict=True, verify=False)
    backend.selection = select_alone(pattern)
    expected, actual = _run(example, mode), _run(example, mode, backend)
    where = f"{pattern.name()}, {mode}"
    if mode == "double" and pattern.name() not in HALF_ONLY:
        assert backend.report.fired(pattern.name()), f"{where}: never fired"
    plain = OptimusBackend("none", inner="aot_eager")
    reason = fact_difference(expected, actual) and fact_difference(
        expected, actual, _run(example, mode, plain)
    )
    assert reason is None, f"{where}: {reason}"
    coarse = torch.finfo(torch.bfloat16).eps if mode == "autocast" else 0.0
    coarse = max(coarse, pattern.gradient_error())
    if value_difference(expected, actual, None) is None:
        return
    reason = value_difference(expected, actual, _run(example, mode, widen=True), coarse)
    assert reason is None, f"{where}: {reason}"


def _run(example: Example, mode: str, backend: Any = None, widen: bool = False) -> Outcome:
    torch.manual_seed(0)
    module, inputs = copy.deepcopy(example.build())
    module.train(example.train and mode != "eval")
    if widen or mode == "double":
        module, inputs = module.double(), pytree.tree_map(_double, inputs)
    call = module
    if backend is not None:
        torch._dynamo.reset()
        call = torch.compile(module, backend=backend)
    with _active("none" if widen and mode == "autocast" else mode):
        return observe(module, inputs, call)


def _double(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


@contextmanager
def _active(mode: str) -> Iterator[None]:
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")
    with autocast, torch.set_grad_enabled(mode != "no_grad"):
        yield
