"""Find what is worth compiling in a LightningModule by watching one training step.

The candidates are the outermost modules that `training_step` calls: the LightningModule itself if
it calls `self(x)`, else the sub-modules it calls. One that cannot be compiled well (it takes
something other than tensors, logs, updates a metric) is replaced by the outermost ones it calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from optimus.targets import Target, is_inside, is_redirected

_PLAIN = (torch.Tensor, bool, int, float, str, torch.dtype, torch.device, torch.Size)


@dataclasses.dataclass
class _Call:
    """One call of a module, and the calls made inside it."""

    target: Target
    redirected: bool
    foreign: str  # the type of the first argument that is not made of tensors, or ""
    logs: bool = False
    inner: list[_Call] = dataclasses.field(default_factory=list["_Call"])


class CallObserver:
    """Watches which modules of `root` are called between `attach` and `detach`."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._outermost: list[_Call] = []
        self._open: list[_Call] = []
        self._handles: list[Any] = []
        self._closed: list[str] = []
        self._log: Any = None

    def attach(self) -> None:
        """Begin to watch."""
        for target in self._observable():
            module = target.module
            self._handles += [
                module.register_forward_pre_hook(
                    self._entering(target), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(self._leaving, always_call=True),
            ]
        log = getattr(self._root, "log", None)
        if callable(log):
            self._log = self._root.__dict__.get("log")
            self._root.__dict__["log"] = self._noting(log)

    def detach(self) -> None:
        """Stop watching and leave no trace."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._root.__dict__.pop("log", None)
        if self._log is not None:
            self._root.__dict__["log"] = self._log

    def choose(self) -> tuple[list[Target], list[str]]:
        """The targets to compile in the order of their calls, and why others were passed over."""
        chosen: dict[str, Target] = {}
        refused = dict.fromkeys(self._closed, "compiled or scripted already")
        for call in self._outermost:
            _choose(call, chosen, refused)
        kept = [t for t in chosen.values() if not any(is_inside(t.name, o) for o in chosen)]
        return kept, [f"{label}: {reason}" for label, reason in refused.items()]

    def _observable(self) -> Iterator[Target]:
        """Modules that take hooks; what is compiled or scripted already is left alone."""
        modules = cast("Iterator[tuple[str, nn.Module]]", self._root.named_modules())
        for name, module in modules:
            if any(is_inside(name, outer) for outer in self._closed):
                continue
            if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
                self._closed.append(name)
            else:
                yield Target(name, module)

    def _entering(self, target: Target) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            foreign = _foreign((args, kwargs)) or ""
            call = _Call(target, is_redirected(module), foreign)
            (self._open[-1].inner if self._open else self._outermost).append(call)
            self._open.append(call)

        return hook

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._open:
            self._open.pop()

    def _noting(self, log: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            for call in self._open:
                call.logs = True
            return log(*args, **kwargs)

        return noted


def _choose(call: _Call, chosen: dict[str, Target], refused: dict[str, str]) -> None:
    target = call.target
    if not call.redirected:
        reason = _refusal(call)
        if not reason:
            chosen.setdefault(target.name, target)
            return
        refused.setdefault(target.label, reason)
    for inner in call.inner:
        _choose(inner, chosen, refused)


def _refusal(call: _Call) -> str:
    """Why not to compile the module of `call`; empty when there is no reason."""
    module = call.target.module
    single = next(module.children(), None) is None
    reasons = {
        "a metric": _is_metric(module),
        "has no parameters": next(module.parameters(), None) is None,
        "a single PyTorch layer": single and type(module).__module__.startswith("torch.nn."),
        "a wrapper": isinstance(module, nn.parallel.DistributedDataParallel),
        f"takes a {call.foreign}, which breaks the graph": bool(call.foreign),
        "logs while it runs, which breaks the graph": call.logs,
        "updates a metric while it runs, which breaks the graph": _updates_metric(call),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _updates_metric(call: _Call) -> bool:
    return any(_is_metric(c.target.module) or _updates_metric(c) for c in call.inner)


def _is_metric(module: nn.Module) -> bool:
    # By name: torchmetrics need not be installed.
    classes = type(module).__mro__
    return any(c.__module__.startswith("torchmetrics.") and c.__name__ == "Metric" for c in classes)


def _foreign(value: Any) -> str | None:
    """The name of the first type in `value` that is not tensors, plain values or containers."""
    if value is None or isinstance(value, _PLAIN):
        return None
    parts = _parts(value)
    if parts is None:
        return type(value).__name__
    return next((name for name in map(_foreign, parts) if name), None)


def _parts(value: Any) -> list[Any] | None:
    if isinstance(value, (list, tuple)):
        sequence: Sequence[Any] = value
        return list(sequence)
    if isinstance(value, Mapping):
        mapping: Mapping[Any, Any] = value
        return list(mapping.values())
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    return None
