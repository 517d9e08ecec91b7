"""What a program did, all of it, and how two runs of one program differ.

Noted are values and gradients; types, strides, requires_grad and identity of what is returned;
which memory it shares with inputs, parameters and other outputs; what was written to inputs and
buffers; the state of the random number generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from optimus.legality import storages_of

TOLERANCE = 2.0
"""How many times eager's own error to float64 a rewritten program may have."""


@dataclass
class Outcome:
    """What one run left behind, all tensors detached. `facts` must be equal, `values` nearly."""

    values: dict[str, torch.Tensor | None] = field(default_factory=dict[str, torch.Tensor | None])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


def observe(module: torch.nn.Module, inputs: Sequence[Any], call: Callable[..., Any]) -> Outcome:
    """Run `call(*inputs)`, which runs `module`, forward and backward, and note what it did.

    The loss is a fixed random projection of all floating-point outputs that require gradients.
    """
    outcome = Outcome()
    torch.manual_seed(1)
    result = call(*inputs)
    outcome.facts["random state"] = hash(torch.get_rng_state().numpy().tobytes())
    outputs, structure = pytree.tree_flatten(result)
    outcome.facts["structure"] = str(structure)
    known = _named(module, inputs)
    _note_outputs(outcome, known, outputs)
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode(False), torch.enable_grad():  # of a caller's own, whatever the run's
        terms = [_project(out, generator) for out in outputs if _is_differentiable(out)]
        if terms:
            torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
    for name, tensor in known.items():
        outcome.values[name] = as_real(tensor.detach().clone())
        if tensor.is_leaf and tensor.requires_grad:
            gradient = tensor.grad
            outcome.values[f"gradient of {name}"] = None if gradient is None else as_real(gradient)
    return outcome


def as_real(value: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, to be compared as these are."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _named(module: torch.nn.Module, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    leaves = enumerate(pytree.tree_leaves(inputs))
    named = {f"input {i}": leaf for i, leaf in leaves if isinstance(leaf, torch.Tensor)}
    return named | dict(module.named_parameters()) | dict(module.named_buffers())


def _note_outputs(outcome: Outcome, known: dict[str, torch.Tensor], outputs: Sequence[Any]) -> None:
    tensors = {f"output {i}": out for i, out in enumerate(outputs) if isinstance(out, torch.Tensor)}
    everything = known | tensors
    storages = {name: storages_of(value) for name, value in everything.items()}
    for i, out in enumerate(outputs):
        name = f"output {i}"
        if not isinstance(out, torch.Tensor):
            outcome.facts[name] = out
            continue
        partners = [n for n in everything if n != name and storages[n] & storages[name]]
        outcome.values[name] = as_real(out.detach().clone())
        outcome.facts |= {
            f"{name}: dtype": out.dtype,
            f"{name}: shape": tuple(out.shape),
            f"{name}: stride": _strides(out),
            f"{name}: requires_grad": out.requires_grad,
            f"{name}: is a leaf": out.is_leaf,
            f"{name}: shares the memory of": _sharers(out, partners, everything),
            f"{name}: offset in it": _offsets(out, [everything[n] for n in partners]),
            f"{name}: is": _Names(n for n in partners if everything[n] is out),
        }


class _Names(frozenset[str]):
    """What a tensor is the same object as; to be fewer is no difference that counts."""


def _strides(out: torch.Tensor) -> list[Any]:
    """Those that say where an element lies."""
    both = zip(out.shape, out.stride(), strict=True)
    return [stride for size, stride in both if size > 1 and out.numel()]


def _sharers(
    out: torch.Tensor, partners: Sequence[str], everything: dict[str, torch.Tensor]
) -> list[str]:
    """Those of the partners that hold an element, as `out` does: nothing else can be written to."""
    return [n for n in partners if everything[n].numel()] if out.numel() else []


def _offsets(out: torch.Tensor, partners: Sequence[torch.Tensor]) -> list[Any]:
    """Where `out` begins, counted from where each of the others does."""
    return [out.storage_offset() - other.storage_offset() for other in partners if out.numel()]


def _project(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return (out.double() * weight.to(out.device)).sum()


def _is_differentiable(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.requires_grad and out.is_floating_point()


def fact_difference(expected: Outcome, actual: Outcome, also: Outcome | None = None) -> str | None:
    """The first fact that is neither as in `expected` nor as in `also`; None if there is none."""
    for name, fact in expected.facts.items():
        now = actual.facts.get(name)
        if isinstance(fact, _Names) and isinstance(now, _Names) and now <= fact:
            continue
        if now != fact and (also is None or now != also.facts.get(name)):
            return f"{name} {now} instead of {fact}"
    if expected.facts.keys() != actual.facts.keys():
        return f"other outputs: {sorted(expected.facts.keys() ^ actual.facts.keys())}"
    return None


@dataclass(frozen=True)
class _Slack:
    """What rounding may cost, beyond eager's own error. `scale`: the largest element of all values
    of the kind; `least`: the size that every value counts as at least."""

    scale: float
    least: float
    precision: float


def value_difference(
    expected: Outcome, actual: Outcome, reference: Outcome | None, precision: float = 0.0
) -> str | None:
    """The first value that is off by more than `TOLERANCE` allows; None if there is none.

    `reference` is the outcome in float64; without it values must be bitwise equal. `precision` is
    the coarsest unit of rounding inside the program, where it is coarser than the results'.
    """
    if expected.values.keys() != actual.values.keys():
        return f"other values: {sorted(expected.values.keys() ^ actual.values.keys())}"
    scales = _scales(expected)
    for name, value in expected.values.items():
        exact = reference.values.get(name) if reference is not None else None
        # Gradients come from cotangents of size 1: what cancels leaves rounding of that size.
        least = 1.0 if _kind(name) == "gradient" else 0.0
        slack = _Slack(max(scales[_kind(name)], least), least, precision)
        reason = _difference(value, actual.values[name], exact, slack)
        if reason is not None:
            return f"{name} {reason}"
    return None


def _kind(name: str) -> str:
    return name.split(maxsplit=1)[0]


def _scales(outcome: Outcome) -> dict[str, float]:
    scales: dict[str, float] = {}
    for name, value in outcome.values.items():
        scales[_kind(name)] = max(scales.get(_kind(name), 0.0), _largest(value))
    return scales


def _difference(
    expected: torch.Tensor | None,
    actual: torch.Tensor | None,
    exact: torch.Tensor | None,
    slack: _Slack,
) -> str | None:
    if expected is None or actual is None:
        return None if expected is actual else "is missing on one side"
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return f"is {actual.dtype} {list(actual.shape)}"
    if torch.equal(_finite(expected), _finite(actual)):
        return None if torch.equal(expected.isnan(), actual.isnan()) else "has NaN elsewhere"
    if exact is None or not expected.is_floating_point():
        return f"differs by {_largest(expected.double() - actual.double()):.3g}"
    if not torch.equal(special(expected), special(actual)):
        return "has NaN or infinities elsewhere"
    return _excess(expected, actual, exact, slack)


def _excess(
    expected: torch.Tensor,
    actual: torch.Tensor,
    exact: torch.Tensor,
    slack: _Slack,
) -> str | None:
    own, error = _largest(expected.double() - exact), _largest(actual.double() - exact)
    size = _largest(expected)
    # What is zero but for rounding is measured by the size of its kind.
    size = slack.scale if own > size / 100 else max(size, slack.least)
    units = max(8 * torch.finfo(expected.dtype).eps, 2 * slack.precision) * size
    if error <= TOLERANCE * own + units:
        return None
    return f"is off by {error:.3g}, eager by {own:.3g} (largest element {size:.3g})"


def special(value: torch.Tensor) -> torch.Tensor:
    """Where a tensor is infinite, of which sign, and where it is NaN; the same shape, finite."""
    return torch.where(value.isfinite(), 0.0, value.sign()).nan_to_num(nan=2.0)


def _finite(value: torch.Tensor) -> torch.Tensor:
    return value.nan_to_num() if value.is_floating_point() else value


def _largest(value: torch.Tensor | None) -> float:
    """The largest absolute value, non-finite elements left out."""
    if value is None or not value.numel():
        return 0.0
    return value.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max().item()
