"""Checks that a rewrite keeps a program's meaning; for our own tests and for patterns of users.

`check_pattern` runs the generic suite over a pattern's examples; `check_program` compares a module
under Optimus with eager execution: values, gradients, types, strides, sharing of memory, writes to
inputs and buffers. A value is right if its error to float64 is at most twice that of eager.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from optimus.backend import OptimusBackend
from optimus.legality import storages_of
from optimus.names import nearest
from optimus.pattern import Example, Rewrite
from optimus.pipeline import Selection, patterns_by_name, select, select_alone
from optimus.records import Report
from optimus.registry import check
from optimus.targets import describe
from optimus.values import same_strides

Inputs = tuple[Any, ...]


@dataclass
class Outcome:
    """What one run of a program left behind, all tensors detached."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]
    sharing: list[tuple[int, int]]


def check_pattern(pattern: str | Rewrite) -> None:
    """Run the generic suite on every example of a pattern: by name, or any instance.

    An instance need not be registered; it may be one of Optimus' own with other knobs. Raises
    AssertionError saying which example failed at what: it must fire as often as it says (a
    near-miss never, with the graph left as it was), keep values, gradients, types and strides, find
    nothing to do on a second run, and do all this with a dynamic batch, too. Raises TypeError and
    ValueError for what `optimus.register` would refuse.
    """
    if isinstance(pattern, str):
        pattern = patterns_by_name()[nearest("pattern", pattern, patterns_by_name())]
    check(pattern)
    rewrite = pattern.ungated()
    examples = rewrite.examples()
    assert any(e.fires for e in examples), f"{rewrite.name()} has no example that fires"
    assert any(not e.fires for e in examples), f"{rewrite.name()} has no near-miss"
    for example in examples:
        for dynamic in (False, True):
            _check_example(rewrite, example, dynamic)


def _check_example(rewrite: Rewrite, example: Example, dynamic: bool) -> None:
    torch.manual_seed(0)
    module, inputs = example.build()
    module.train(example.train)
    where = f"{rewrite.name()}, example {example.name!r}, {'dynamic' if dynamic else 'static'}"
    report = check_program(
        module,
        inputs,
        select_alone(rewrite),
        exact=example.exact,
        dynamic=dynamic,
        inner="eager" if dynamic else "aot_eager",  # both ways to differentiate the new graph
        where=where,
    )
    fired = report.fired(rewrite.name())
    assert fired == example.fires, f"{where}: fired {fired} times instead of {example.fires}"
    for graph in report.graphs:
        record = next(p for p in graph.patterns if p.name == rewrite.name())
        if not example.fires:
            unchanged = record.nodes_before == record.nodes_after
            assert unchanged, f"{where}: a near-miss changed the graph"


def check_program(
    module: torch.nn.Module,
    inputs: Inputs,
    patterns: str | Sequence[str] | Selection = "all",
    *,
    exact: bool = False,
    dynamic: bool = False,
    inner: str = "aot_eager",
    where: str = "",
) -> Report:
    """Compare `module(*inputs)` under `patterns` with eager execution, forward and backward.

    With `dynamic` the first dimension of every input tensor is dynamic. Raises AssertionError
    naming the first difference; returns the backend's report.
    """
    backend = OptimusBackend("none", inner=inner, strict=True)
    backend.selection = patterns if isinstance(patterns, Selection) else select(patterns)
    torch._dynamo.reset()
    expected = run(module, inputs)
    try:
        actual = run(module, inputs, lambda f: torch.compile(f, backend=backend), dynamic)
    except Exception as error:
        raise AssertionError(f"{where}: {describe(error)}") from error
    assert backend.report.graphs, f"{where}: nothing was compiled"
    if actual.sharing != expected.sharing:  # plain torch.compile may part from eager here, too
        plain = run(module, inputs, lambda f: torch.compile(f, backend=inner), dynamic)
        assert actual.sharing == plain.sharing, (
            f"{where}: values share memory as {actual.sharing}, in eager as {expected.sharing}"
        )
    reference = None if exact else _in_double(module, inputs)
    allowed = max(backend.selection.gradient_errors().values(), default=0.0)
    _compare(expected, actual, reference, where, gradient_error=allowed)
    return backend.report


def run(
    module: torch.nn.Module,
    inputs: Inputs,
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    dynamic: bool = False,
) -> Outcome:
    """Run a copy of `module` forward and backward on copies of `inputs`.

    The loss is a fixed random projection of all floating-point outputs that require gradients.
    """
    module, inputs = copy.deepcopy(module), _fresh(inputs)
    if dynamic:
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
    torch.manual_seed(1)
    outputs = pytree.tree_leaves((compiler or (lambda f: f))(module)(*inputs))
    sharing = _sharing([*pytree.tree_leaves(inputs), *outputs])
    generator = torch.Generator().manual_seed(2)
    terms = [_project(out, generator) for out in outputs if _differentiable(out)]
    if terms:
        torch.stack(terms).sum().backward()
    leaves = [*module.named_parameters(), *_named_inputs(inputs)]
    gradients = {name: t.grad for name, t in leaves if t.requires_grad and t.is_leaf}
    state = {n: t.detach().clone() for n, t in (*module.named_buffers(), *_named_inputs(inputs))}
    kept = [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs]
    return Outcome(kept, gradients, state, sharing)


def _project(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return (out.double() * weight.to(out.device)).sum()


def _differentiable(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.requires_grad


def _fresh(inputs: Inputs) -> Inputs:
    """Copies that share memory as the inputs did, with the same requires_grad."""
    return copy.deepcopy(inputs)


def _named_inputs(inputs: Inputs) -> list[tuple[str, torch.Tensor]]:
    leaves = pytree.tree_leaves(inputs)
    return [(f"input {i}", t) for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)]


def _sharing(values: Sequence[Any]) -> list[tuple[int, int]]:
    """Pairs of values that live in one storage."""
    storages = [storages_of(v) for v in values]
    return [
        (i, j)
        for i in range(len(values))
        for j in range(i + 1, len(values))
        if storages[i] & storages[j]
    ]


def _in_double(module: torch.nn.Module, inputs: Inputs) -> Outcome | None:
    """The reference, or None for a program that float64 cannot run (random, mixed precision)."""

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    try:
        return run(copy.deepcopy(module).double(), pytree.tree_map(widen, inputs))
    except RuntimeError:
        return None


def _compare(
    expected: Outcome,
    actual: Outcome,
    reference: Outcome | None,
    where: str,
    *,
    gradient_error: float = 0.0,
) -> None:
    assert len(actual.outputs) == len(expected.outputs), f"{where}: number of outputs"
    for what in ("outputs", "gradients", "state"):
        left, right = _named(getattr(expected, what)), _named(getattr(actual, what))
        exact = _named(getattr(reference, what)) if reference else {}
        assert left.keys() == right.keys(), f"{where}: {what} {left.keys() ^ right.keys()}"
        for name, value in left.items():
            allowed = gradient_error if what == "gradients" else 0.0
            _compare_value(value, right[name], exact.get(name), f"{where}: {what} {name}", allowed)


def _named(values: list[Any] | dict[str, Any]) -> dict[str, Any]:
    return values if isinstance(values, dict) else {str(i): v for i, v in enumerate(values)}


def _compare_value(
    expected: Any, actual: Any, reference: Any, label: str, allowed: float = 0.0
) -> None:
    if not isinstance(expected, torch.Tensor):
        assert expected == actual, f"{label}: {actual!r} instead of {expected!r}"
        return
    assert isinstance(actual, torch.Tensor), f"{label}: no tensor"
    for aspect in ("dtype", "shape", "device"):
        want, got = getattr(expected, aspect), getattr(actual, aspect)
        assert want == got, f"{label}: {aspect} {got} instead of {want}"
    if expected.numel() > 0:
        assert same_strides(actual, expected), (
            f"{label}: stride {actual.stride()} instead of {expected.stride()}"
        )
    if not torch.equal(expected.isnan(), actual.isnan()):
        raise AssertionError(f"{label}: NaN in other places")
    if allowed and expected.numel():
        off, size = _error(actual, expected), _error(expected, torch.zeros_like(expected))
        assert off <= allowed * size + _floor(expected), f"{label}: off by {off:.3g} of {size:.3g}"
        return
    if reference is None:
        assert_equal(expected, actual, label)
        return
    own = _error(expected, reference)
    error = _error(actual, reference)
    assert error <= 2 * own + _floor(expected), f"{label}: error {error:.3g}, eager's own {own:.3g}"


def assert_equal(expected: torch.Tensor, actual: torch.Tensor, label: str) -> None:
    """Equal bit by bit (NaN equal to NaN)."""
    if not torch.equal(expected.nan_to_num(), actual.nan_to_num()):
        gap = (expected.double() - actual.double()).abs().max().item()
        raise AssertionError(f"{label}: differs by {gap:.3g} where it must be equal")


def _error(value: torch.Tensor, reference: torch.Tensor) -> float:
    gap = (value.double() - reference.double()).nan_to_num(0.0, 0.0, 0.0)
    return gap.abs().max().item() if gap.numel() else 0.0


def _floor(value: torch.Tensor) -> float:
    """What another order of summing may cost where eager happened to be exact: a few ulps."""
    if not value.is_floating_point() or not value.numel():
        return 0.0
    scale = value.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return 8 * torch.finfo(value.dtype).eps * max(scale, 1e-3)
