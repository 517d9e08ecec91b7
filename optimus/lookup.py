"""`optimus.report(compiled)`: the report of anything that Optimus compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from optimus.records import Report

_reports: WeakKeyDictionary[nn.Module, Report] = WeakKeyDictionary()


def remember(module: nn.Module, report: Report) -> None:
    """Calls of `module` are compiled, and `report` says what came of it."""
    _reports[module] = report


def report(compiled: Any) -> Report:
    """What the patterns did to everything that was compiled of `compiled` so far.

    `compiled`: a module after `optimus.compile` or after a run with OptimusCallback (or one that
    has such a module inside), what `torch.compile` returned with Optimus as its backend, the
    backend, or the callback. Raises TypeError for anything else.
    """
    found = list({id(each): each for each in _found(compiled)}.values())
    if not found:
        raise TypeError(
            f"Optimus did not compile this {type(compiled).__name__}: give a module that went "
            "through optimus.compile or a run with OptimusCallback, what torch.compile returned "
            "with an Optimus backend, the backend, or the callback"
        )
    if len(found) == 1:
        return found[0]
    return Report(
        [graph for each in found for graph in each.graphs],
        [explanation for each in found for explanation in each.explanations],
    )


def _found(compiled: Any) -> Iterator[Report]:
    own = getattr(compiled, "report", None)
    takeover = getattr(compiled, "takeover", None)
    if isinstance(own, Report):  # a backend
        yield own
    elif hasattr(type(compiled), "takeover"):  # a callback, before or after its run began
        yield takeover.report if takeover is not None else Report()
    else:
        backend = _backend_of(compiled)
        if backend is not None:
            yield from _found(backend)
        elif isinstance(compiled, nn.Module):
            yield from (_reports[m] for m in compiled.modules() if m in _reports)


def _backend_of(compiled: Any) -> Any:
    """The backend that `torch.compile` gave to what it returned; None where there is none.

    What is read here are private names of PyTorch: without them there is no answer.
    """
    context = getattr(compiled, "dynamo_ctx", None)  # of a module
    callback: Any = getattr(context, "callback", None) or _closure_of(compiled).get("callback")
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    named = getattr(callback, NAMED_BACKEND, None)
    return named if named is not None else getattr(callback, "compiler_fn", None)


NAMED_BACKEND = "optimus_backend"
"""Where `torch.compile(backend="optimus")` keeps its backend: on PyTorch's own wrapper of it."""


def _closure_of(function: Callable[..., Any]) -> dict[str, Any]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=False)}
