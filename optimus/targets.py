"""Compile sub-modules or methods of a model in place, so that nobody but their callers can tell.

`torch.compile(LightningModule)` crashes at `self.log`, wrapping a sub-module changes the keys of
the state dict, and `module.compile()` compiles nothing for PyTorch's own containers. Here the calls
of a module go through a small function of our own instead, and the module itself stays what it was:
same keys, same pickle, same deepcopy. Taking the function away again leaves no trace.

A method may be a target, too: one that calls the layers and computes the loss needs no module
around both, which would change the keys.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import types
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import count
from typing import Any, cast

import torch
from torch import nn

from optimus.lookup import remember

_CALL = "_compiled_call_impl"  # where nn.Module.compile() itself puts the compiled call
_serial = count()

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Target:
    """A module to compile and its dotted name below the LightningModule ("" is that itself).

    With `method` it is not the module's call that is compiled but that method, and the name ends in
    it.
    """

    name: str
    module: nn.Module
    method: str = ""

    @property
    def label(self) -> str:
        """The name to show."""
        return self.name or type(self.module).__name__

    @property
    def slot(self) -> str:
        """The attribute of the module that its callers reach the target through."""
        return self.method or _CALL

    def own(self) -> Callable[..., Any]:
        """What is called where nothing stands in the slot."""
        if self.method:
            return types.MethodType(getattr(type(self.module), self.method), self.module)
        return cast("Callable[..., Any]", cast("Any", self.module)._call_impl)


def named_targets(root: nn.Module, wanted: object) -> list[Target]:
    """The targets that `wanted` asks for, one or several: a dotted name of a sub-module of `root`
    or of a method (`"loss_and_logits"`, `"net.score"`), or a sub-module itself.

    Raises ValueError for a name or module that `root` does not have (naming the nearest names), and
    for a target that lies inside another one.
    """
    several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    entries: list[object] = list(cast("Any", wanted)) if several else [wanted]
    found = {t.name: t for t in (_find(root, entry) for entry in entries)}
    for name in found:
        outer = next((o for o in found if is_inside(name, o)), None)
        if outer is not None:
            raise ValueError(
                f"compile target {name!r} lies inside target {outer!r}; leave one of them out"
            )
    return list(found.values())


def is_inside(name: str, outer: str) -> bool:
    """Whether dotted `name` lies strictly below `outer`."""
    return name != outer and (outer == "" or name.startswith(outer + "."))


def _find(root: nn.Module, entry: object) -> Target:
    modules: dict[str, nn.Module] = dict(cast("Any", root).named_modules(remove_duplicate=False))
    if isinstance(entry, str):
        if entry in modules:
            return Target(entry, modules[entry])
        owner, _, method = entry.rpartition(".")
        if owner in modules and _is_method(modules[owner], method):
            return Target(entry, modules[owner], method)
        near = get_close_matches(entry, modules, n=3, cutoff=0.5) or sorted(modules)[1:6]
        raise ValueError(
            f"compile target {entry!r} is no sub-module or method of {type(root).__name__}; "
            f"nearest: {', '.join(near) or 'it has no sub-modules'}"
        )
    if not isinstance(entry, nn.Module):
        raise ValueError(
            f"a compile target is a dotted name or a module, not {type(entry).__name__}"
        )
    names = [name for name, module in modules.items() if module is entry]
    if not names:
        raise ValueError(
            f"compile target {type(entry).__name__} is not part of {type(root).__name__}"
        )
    return Target(names[0], entry)


def _is_method(module: nn.Module, name: str) -> bool:
    """Whether it can be a target. A `forward` cannot: the module's call, hooks and all, is one."""
    return name != "forward" and inspect.isfunction(getattr(type(module), name, None))


class CompiledTarget:
    """What stands in for a module's call, or for a method, while it is installed.

    A call goes to the compiled function while `active`, and to the module's own call otherwise.
    When the compiled function fails and the module's own call does not, the module runs uncompiled
    from then on and `failure` says why; an error of the user's own comes out of the module's own
    call unchanged.
    """

    def __init__(self, target: Target, backend: Backend, tag: str, dynamic: bool | None) -> None:
        self.target = target
        self.active = True
        self.calls = 0
        self.graphs = 0
        self.first_graphs = 0
        self.no_grad_graphs = 0
        self.compile_seconds = 0.0
        self.failure = ""
        self._backend = backend
        report = getattr(backend, "report", None)
        if report is not None:
            remember(target.module, report)
        self._own = target.own()
        self._before: Any = None
        self._compiled: Callable[..., Any] = cast("Any", torch).compile(
            _call_of(self._own, f"optimus_{tag}_{next(_serial)}"),
            backend=self._counted_backend(),
            dynamic=dynamic,
        )

    @property
    def recompiles(self) -> int:
        """Graphs compiled after those of the first call that compiled any."""
        return self.graphs - self.first_graphs

    @property
    def compiled_nothing(self) -> bool:
        """Whether calls went through the compiler and yet no graph came out of it."""
        return self.calls > 0 and not self.graphs and not self.failure

    def install(self) -> None:
        """Put this in the place of the module's call, or of the method."""
        attributes, slot = self.target.module.__dict__, self.target.slot
        self._before = attributes.get(slot)
        self._own = self._before or self.target.own()
        attributes[slot] = self

    def uninstall(self) -> None:
        """Put back what was there before, unless somebody else has replaced this meanwhile."""
        attributes, slot = self.target.module.__dict__, self.target.slot
        if attributes.get(slot) is not self:
            return
        del attributes[slot]
        if self._before is not None:
            attributes[slot] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if not self.active or torch.compiler.is_compiling() or self._is_redirected:
            return self._own(*args, **kwargs)
        before, began = self.graphs, time.perf_counter()
        snapshot = None if self.calls else _Snapshot(self.target.module)
        self.calls += 1
        try:
            result = self._compiled(*args, **kwargs)
        except Exception as error:  # whatever it is: the module's own call decides
            reason = describe(error)
        else:
            if self.graphs != before:
                self._compiled_in_this_call(before, time.perf_counter() - began)
            return result
        # Outside the except block, so that the failed call's memory is free again.
        return self._rescue(reason, snapshot, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled or copied with a module, this is what was there without Optimus."""
        if self.target.method:
            return getattr, (self.target.module, self.target.method)
        return type(None), ()

    @property
    def _is_redirected(self) -> bool:
        return not self.target.method and is_redirected(self.target.module)

    def _compiled_in_this_call(self, graphs_before: int, seconds: float) -> None:
        self.compile_seconds += seconds
        if graphs_before == 0:
            self.first_graphs = self.graphs

    def _rescue(
        self, reason: str, snapshot: _Snapshot | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if snapshot is not None:
            snapshot.restore()
        result = self._own(*args, **kwargs)
        self.failure = reason
        self.active = False
        warnings.warn(
            f"Optimus: {self.target.label} failed under torch.compile and runs uncompiled from "
            f"now on: {reason}",
            stacklevel=3,
        )
        return result

    def _counted_backend(self) -> Backend:
        def optimus_target(
            graph: torch.fx.GraphModule, example_inputs: list[Any]
        ) -> Callable[..., Any]:
            self.graphs += 1
            self.no_grad_graphs += not torch.is_grad_enabled()
            with _backward_compiled_at_once():
                return self._backend(graph, example_inputs)

        return optimus_target


def _call_of(own: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that calls `own`, with a code object of its own.

    Dynamo keeps compiled graphs, the limit on recompiles and what it learnt about dynamic shapes by
    code object, file line and name: sharing them would let one target or phase spend another's.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    code = call.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, globals(), name, None, call.__closure__)


def is_redirected(module: nn.Module) -> bool:
    """Whether `module.forward` is for one call something other than its own.

    Lightning calls `training_step` under DDP by lending the LightningModule another `forward`; that
    is no call of the model and must not be compiled.
    """
    lent = module.__dict__.get("forward")
    return lent is not None and getattr(lent, "__func__", None) is not type(module).forward


class _Snapshot:
    """What a failing first call may have changed before it failed: buffers and random states."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [(b, b.detach().clone()) for b in module.buffers()]
        self._random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, saved in self._buffers:
                buffer.copy_(saved)
        torch.set_rng_state(self._random)
        if self._cuda_random is not None:
            torch.cuda.set_rng_state(self._cuda_random)


@contextlib.contextmanager
def _backward_compiled_at_once() -> Generator[None]:
    """Compile a graph's backward together with its forward, inside the backend.

    By default it is compiled in the first `loss.backward()`, where a failure can't fall back.
    """
    config = cast("Any", torch)._functorch.config
    if not hasattr(config, "force_non_lazy_backward_lowering"):  # a private name
        yield
        return
    with config.patch(force_non_lazy_backward_lowering=True):
        yield


def describe(error: BaseException) -> str:
    """An exception in one line; that of a compiler stage is named by what it wraps."""
    error = getattr(error, "inner_exception", None) or error
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:400]}" if words else type(error).__name__


class CompiledTargets:
    """All targets of one phase, compiled by one backend."""

    def __init__(
        self, targets: Sequence[Target], backend: Backend, tag: str, dynamic: bool | None = None
    ) -> None:
        self.backend = backend
        self.recordings: Callable[[], int] = int  # CUDA graphs so far: none unless told otherwise
        self.targets = [CompiledTarget(target, backend, tag, dynamic) for target in targets]

    def install(self) -> None:
        """Put all in place."""
        for target in self.targets:
            target.install()

    def uninstall(self) -> None:
        """Put everything back as it was."""
        for target in self.targets:
            target.uninstall()

    def activate(self, active: bool) -> None:
        """Let calls go to the compiled functions or, if not `active`, to the modules themselves."""
        for target in self.targets:
            target.active = active and not target.failure

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return sum(target.graphs for target in self.targets)

    @property
    def recompiles(self) -> int:
        """Graphs compiled after the first ones of each target."""
        return sum(target.recompiles for target in self.targets)

    @property
    def compile_seconds(self) -> float:
        """Seconds of the calls in which something was compiled."""
        return sum(target.compile_seconds for target in self.targets)

    def remarks(self) -> list[str]:
        """What a user should know: failures, targets that gave no graph, the recompile limit."""
        return [remark for target in self.targets for remark in _remarks(target)]


def _remarks(target: CompiledTarget) -> Iterator[str]:
    label = target.target.label
    if target.failure:
        yield f"{label} failed under torch.compile and ran uncompiled: {target.failure}"
    if target.compiled_nothing:
        yield f"{label}: torch.compile made no graph of it, so it runs uncompiled"
    limit = getattr(cast("Any", torch)._dynamo.config, "recompile_limit", None)  # a private name
    if limit is not None and target.graphs - target.first_graphs + 1 >= limit:
        yield (
            f"{label}: {target.graphs} graphs; PyTorch compiles no more than {limit} and runs "
            "further shapes uncompiled"
        )
    if target.first_graphs > 1:
        yield (
            f"{label} runs as {target.first_graphs} graphs because it breaks the graph; a rewrite "
            "cannot reach across a break"
        )
