"""Run a rewritten graph beside the original on the inputs at hand, before it is used.

Both run eagerly on copies of the same inputs, forward and backward, from the same random state.
Values and gradients may differ from a float64 run by at most twice what the original's own do;
dtypes, shapes, strides, requires_grad, shared memory and what is written to inputs must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from optimus.gaps import (
    Gap,
    Trace,
    compare,
    describe,
    gradient_error,
    on_average,
    pool,
    rounding_of,
    same,
    worst,
)
from optimus.legality import storages_of, value_of
from optimus.outcome import as_real

FEWEST_RUNS = 8
MOST_RUNS = 32
MOST_SECONDS = 60.0
"""Runs on data nearby that decide where one run is near the limit, and how long they may take."""

NEARBY = 1 / 16
"""How far, relative to itself, a number is moved for that: by many roundings, never over 0 or 1."""


class CannotVerify(Exception):
    """The original does not run on these inputs outside the compiler; the text says why."""


class Verifier:
    """Holds the original's results on one set of inputs, to compare any rewritten graph with.

    Raises CannotVerify when the original cannot be run on them (fake inputs, out of memory, an
    operation that only compiles).
    """

    def __init__(self, original: GraphModule, inputs: Sequence[Any]) -> None:
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if any(is_fake(x) for x in tensors):
            raise CannotVerify("the inputs hold no data")
        self._original = original
        self._inputs = list(inputs)
        try:
            self._expected = trace(original, self._inputs)
        except Exception as error:
            raise CannotVerify(f"the original graph fails in eager mode: {error}") from error
        self._compare = partial(compare, rounding=rounding_of(original.graph))
        self._promised = _facts_when_compiled(original)
        self._reference = self._run_in_double(self._inputs)

    def difference(self, rewritten: GraphModule, gradient_error: float = 0.0) -> str | None:
        """The first thing that `rewritten` does otherwise than the original; None if nothing.

        Gradients may be off by `gradient_error` of their norm besides.
        """
        try:
            actual = trace(rewritten, self._inputs)
        except Exception as error:
            return f"the rewritten graph fails: {error}"
        reason = differing_facts(self._expected, actual, self._promised)
        if reason is not None:
            return reason
        gaps = self._compare(self._expected, actual, self._reference, gradient_error=gradient_error)
        if worst(gaps) is None:
            return None
        try:
            return self._more_runs(rewritten, gaps, gradient_error)
        except Exception as error:
            return f"the rewritten graph fails on data nearby: {error}"

    def gradient_error(self, rewritten: GraphModule) -> tuple[float, str]:
        """How far the gradient that differs most from the original's is off, relative to its norm,
        and its name."""
        return gradient_error(self._expected, trace(rewritten, self._inputs))

    def _more_runs(
        self, rewritten: GraphModule, gaps: dict[str, Gap], gradient_error: float
    ) -> str | None:
        """The first difference in many runs, the first of which went as `gaps` say.

        Near the limit a single run proves nothing: two draws of rounding errors of one number
        differ by more than a factor of two three times in ten. Only other data draw anew what is
        rounded on the way to the outputs, such as the few rows of a small table in front of a norm.
        """
        first, started = gaps, time.monotonic()
        for seed in range(1, MOST_RUNS + 1):
            found = worst(gaps)
            if found is not None and (found[1].reason or (seed > 2 and found[1].is_plain)):
                return describe(found)
            # Looked at once: whoever looks often enough finds what he hopes for.
            if found is None and seed == FEWEST_RUNS + 1:
                break
            if time.monotonic() - started > MOST_SECONDS:
                break
            gaps = pool(gaps, self._compare_nearby(rewritten, seed, gradient_error))
        return describe(worst(gaps)) or describe(worst(on_average(first, gaps, seed)))

    def _compare_nearby(
        self, rewritten: GraphModule, seed: int, gradient_error: float
    ) -> dict[str, Gap]:
        inputs = nearby(self._inputs, seed)
        try:
            expected = trace(self._original, inputs, seed=seed)
        except Exception:  # not for such data: the same once more, seen from another side
            inputs = self._inputs
            expected = trace(self._original, inputs, seed=seed)
        actual = trace(rewritten, inputs, seed=seed)
        reference = self._run_in_double(inputs, seed)
        return self._compare(expected, actual, reference, gradient_error=gradient_error)

    def _run_in_double(self, inputs: Sequence[Any], seed: int = 0) -> Trace | None:
        """The reference; None for a graph that float64 cannot run, such as one with casts."""
        try:
            with _no_autocast(inputs):
                return trace(self._original, inputs, widen=True, seed=seed)
        except Exception:
            return None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no data."""
    return isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta


def trace(module: GraphModule, inputs: Sequence[Any], widen: bool = False, seed: int = 0) -> Trace:
    """Run `module` on copies of `inputs`, forward and backward from a random projection of its
    outputs that `seed` decides; `widen` makes every floating-point input float64 first."""
    copies = _copy_inputs(inputs, widen)
    devices = [x.device for x in copies if isinstance(x, torch.Tensor) and x.is_cuda]
    result = Trace()
    rng = torch.random.fork_rng(devices=[d.index for d in dict.fromkeys(devices)])
    with rng, _modes_restored():
        torch.manual_seed(0)
        outputs = pytree.tree_leaves(module(*copies))
        result.facts["random state"] = _random_state(dict.fromkeys(devices))
    _note_outputs(result, copies, outputs)
    generator = torch.Generator().manual_seed(seed)
    terms = [_project(out, generator) for out in outputs if _differentiable(out)]
    if terms:
        torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
    for i, copy in enumerate(copies):
        if isinstance(copy, torch.Tensor):
            gradient = copy.grad if copy.is_leaf else None
            result.values[f"input {i}"] = as_real(copy.detach())
            strided = copy.layout is torch.strided
            if not widen and strided and same(copy.detach(), inputs[i].detach()):
                result.untouched.add(f"input {i}")
            result.values[f"gradient of input {i}"] = (
                None if gradient is None else as_real(gradient)
            )
    return result


@contextmanager
def _modes_restored() -> Iterator[None]:
    """A graph that fails midway leaves the autocast regions and the grad mode that it entered."""
    grad, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    casts = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES}
    depth = torch.autocast_increment_nesting()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        while torch.autocast_decrement_nesting() >= depth:  # type: ignore[no-untyped-call]
            pass
        torch.set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cache)
        for device, (enabled, dtype) in casts.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        if depth == 1:
            torch.clear_autocast_cache()


_DEVICES = ("cpu", "cuda")


def _random_state(devices: Iterable[torch.device]) -> tuple[int, ...]:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return tuple(hash(state.numpy().tobytes()) for state in states)


def _note_outputs(result: Trace, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    everything = [*inputs, *outputs]
    storages = [storages_of(value) for value in everything]
    for i, out in enumerate(outputs):
        name = f"output {i}"
        if not isinstance(out, torch.Tensor):
            result.facts[name] = out
            continue
        result.values[name] = as_real(out.detach().clone())
        result.facts[f"{name}: dtype"] = out.dtype
        result.facts[f"{name}: stride"] = _strides(out)
        result.facts[f"{name}: requires_grad"] = out.requires_grad
        own = storages[len(inputs) + i]
        result.facts[f"{name}: memory"] = [j for j, s in enumerate(storages) if s & own]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of dimensions with more than one index, if there are elements at all."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return ()
    each = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in each if size > 1)


def _facts_when_compiled(module: GraphModule) -> Trace:
    """Strides and sharing of memory as a compiler sees them, which is not always as they are in
    eager mode (dropout that drops nothing returns its input there); none of dynamic sizes."""
    result = Trace()
    inputs = [value_of(node) for node in module.graph.find_nodes(op="placeholder")]
    outputs = pytree.tree_leaves(torch.fx.map_arg(module.graph.output_node().args, value_of))
    tensors = [v for v in (*inputs, *outputs) if isinstance(v, torch.Tensor)]
    sizes = [size for v in tensors if v.layout is torch.strided for size in (*v.shape, *v.stride())]
    if tensors and all(map(is_fake, tensors)) and all(isinstance(size, int) for size in sizes):
        _note_outputs(result, inputs, outputs)
    return result


def differing_facts(expected: Trace, actual: Trace, promised: Trace | None = None) -> str | None:
    """The first difference in what must be equal, to one of both; None if there is none."""
    also = promised.facts if promised is not None else {}
    for name, fact in expected.facts.items():
        now = actual.facts.get(name)
        if now != fact and (name not in also or now != also[name]):
            return f"{name} is {actual.facts.get(name)} instead of {fact}"
    return None


def _project(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    out = as_real(out)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return (out.double() * weight.to(out.device)).sum()


def _differentiable(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.requires_grad


def nearby(inputs: Sequence[Any], seed: int) -> list[Any]:
    """Copies of `inputs` with every floating-point number moved towards zero by a random part of
    at most NEARBY of it; zeros, signs and memory that is shared stay as they are."""
    copies = _copy_inputs(inputs, widen=False)
    moved: set[int] = set()
    for copy in copies:
        if not isinstance(copy, torch.Tensor) or copy.dtype not in _WIDE:
            continue
        storage = copy.untyped_storage()
        if storage._cdata not in moved:
            moved.add(storage._cdata)
            flat = torch.empty(0, dtype=copy.dtype, device=copy.device).set_(storage)  # type: ignore[call-overload]
            generator = torch.Generator(flat.device).manual_seed(seed)
            part = torch.rand(flat.shape, generator=generator, device=flat.device)
            flat.mul_(part.mul_(-NEARBY).add_(1).to(flat.dtype))
    return copies


_WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _copy_inputs(inputs: Sequence[Any], widen: bool) -> list[Any]:
    """Copies that share memory as the originals do and are leaves of their own graph."""
    storages: dict[int, torch.UntypedStorage] = {}
    return [_copy_input(value, widen, storages) for value in inputs]


def _copy_input(value: Any, widen: bool, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    source = value.detach()
    if widen and source.is_floating_point():
        return source.double().requires_grad_(value.requires_grad)
    storage = source.untyped_storage()
    copied = storages.setdefault(storage._cdata, storage.clone())
    copy = torch.empty(0, dtype=source.dtype, device=source.device)
    copy.set_(copied, source.storage_offset(), source.shape, source.stride())
    return copy.requires_grad_(value.requires_grad)


def _no_autocast(inputs: Sequence[Any]) -> torch.autocast:
    device = next((x.device.type for x in inputs if isinstance(x, torch.Tensor)), "cpu")
    return torch.autocast(device, enabled=False)


def guilty(names: Sequence[str], is_wrong: Callable[[Sequence[str]], bool]) -> str | None:
    """The pattern without which the prefix of `names` (in pipeline order) up to it is right.

    `is_wrong(prefix)` rewrites with these patterns alone and compares; it holds for all of
    `names`. None when the graph is wrong without any pattern. Takes log2(len(names)) + 1 calls.
    """
    if is_wrong(()):
        return None
    right, wrong = 0, len(names)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if is_wrong(names[:middle]):
            wrong = middle
        else:
            right = middle
    return names[wrong - 1]
