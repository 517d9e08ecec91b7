"""The torch.compile backend: rewrite the graph, then hand it to the inner compiler.

`torch.compile(fn, backend="optimus", options={"patterns": "all"})`, an `OptimusBackend` of one's
own, or `optimus.compile(module)`. Nothing here raises for a graph: if a rewritten graph cannot be
built or compiled, the original is compiled, and if that fails too it runs in eager mode. The report
says so.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.fx import GraphModule

from optimus.capture import Graphs
from optimus.driver import copy_graph_module as copy_graph_module  # noqa: PLC0414 (as ever)
from optimus.driver import rewrite
from optimus.explain import Case, explain, names_to_explain
from optimus.graphed_call import fixed_inputs
from optimus.history import History
from optimus.lookup import NAMED_BACKEND
from optimus.packed_optimizer import PackedOptimizer
from optimus.packing import Packing
from optimus.partitioning import Recompute, inductor_options, saving
from optimus.pipeline import Selection, nearest, select
from optimus.records import GraphReport, PatternReport, Report
from optimus.settled import settled
from optimus.targets import CompiledTarget, Target, describe
from optimus.verify import CannotVerify, Verifier, guilty

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]
INNER = ("inductor", "aot_eager", "eager")


class OptimusBackend:
    """A torch.compile backend with a selection of patterns.

    `report` grows by one record for each graph compiled. `inner` compiles what was rewritten,
    `inner_options` are inductor's config entries. With `verify` a rewritten graph is run beside the
    original on the inputs at hand first, and patterns that change the result are left out. With
    `recompute`, inductor's backward pass makes anew what takes no GEMM to make, such as casts of
    weights and activations: less is kept, more is computed; "auto" chooses for each graph by an
    estimate of the memory it needs (optimus.partitioning). With `packing`, parameters that the
    rewritten graph stacks are stored as one tensor. With `graphs`, what was compiled is replayed as
    CUDA graphs in the steps that these are told of. `explain` names patterns of which
    `report.explanations` shall tell all about each graph.

    Raises ValueError for unknown patterns, knobs, inner compilers and options, naming valid ones.
    """

    def __init__(
        self,
        patterns: str | Sequence[str] = "all",
        *,
        disable: Sequence[str] = (),
        knobs: Mapping[str, Mapping[str, Any]] | None = None,
        inner: str = "inductor",
        inner_options: Mapping[str, Any] | None = None,
        verify: bool = True,
        recompute: Recompute = "auto",
        packing: Packing | None = None,
        graphs: Graphs | None = None,
        explain: str | Sequence[str] | None = None,
        strict: bool = False,
    ) -> None:
        if inner not in INNER:
            raise ValueError(f"unknown inner compiler {inner!r}; valid: {', '.join(INNER)}")
        if recompute not in (True, False, "auto"):
            raise ValueError(f"recompute is True, False or 'auto', not {recompute!r}")
        _check_options(inner, inner_options or {})
        self.selection: Selection = select(patterns, disable, knobs)
        self.report = Report()
        self._explained = names_to_explain(explain)
        self._everything = select("all", (), knobs)
        self._history = History()
        self._inner = inner
        self._options = dict(inner_options or {})
        self._verify = verify
        self._recompute = recompute
        self._packing = packing
        self._graphs = graphs
        self._strict = strict

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile one graph, as Dynamo hands it over."""
        report = GraphReport(len(self.report.graphs), nodes_before=len(module.graph.nodes))
        self.report.graphs.append(report)
        with _unwatched():
            rewritten = self._rewritten(module, inputs, report)
            self._explain(module, rewritten or module, report)
        for candidate in (rewritten, module):
            if candidate is None:
                continue
            report.nodes_after = len(candidate.graph.nodes)
            start = time.perf_counter()
            try:
                return settled(candidate, inputs, self._packed)
            except (RestartAnalysis, SkipFrame):
                # No failure: Dynamo traces the code once more, another way, and asks again.
                self.report.drop_last()
                raise
            except Exception as error:
                if self._strict:
                    raise
                what = "the original graph" if candidate is not module else "eager mode"
                self._fall_back(report, what, f"compiling failed: {error!r}", error)
            finally:
                report.compile_seconds += time.perf_counter() - start
        return module.forward

    def _rewritten(
        self, module: GraphModule, inputs: Sequence[Any], report: GraphReport
    ) -> GraphModule | None:
        if not self.selection:
            return None
        start = time.perf_counter()
        try:
            rewritten = self._rewrite_unbroken(module, report)
            if self._verify:
                checked = self._checked(module, rewritten, inputs, report)
                if any(isinstance(x, torch.Tensor) and x.is_cuda for x in inputs):
                    torch.cuda.empty_cache()  # runs in float64 need more than training will
                return checked
            report.approximated = dict.fromkeys(self._approximate(report), "not measured")
            return rewritten
        except Exception as error:
            if self._strict:
                raise
            self._fall_back(report, "the original graph", f"rewriting failed: {error!r}", error)
            return None
        finally:
            report.rewrite_seconds = time.perf_counter() - start

    def _rewrite_unbroken(
        self, module: GraphModule, report: GraphReport, without: Collection[str] = ()
    ) -> GraphModule:
        """The graph after all patterns, less those that break it or are left out."""
        while True:
            left_out = {*report.left_out, *without}
            try:
                return self._rewrite(module, report, left_out)
            except Exception as error:
                names = [name for name in self.selection.names if name not in left_out]
                name = None if self._strict else guilty(names, self._breaks(module))
                if name is None:
                    raise
                report.broken[name] = describe(error)
                log.warning("pattern %s broke the graph and is left out", name, exc_info=error)

    def _breaks(self, module: GraphModule) -> Callable[[Sequence[str]], bool]:
        def breaks(prefix: Sequence[str]) -> bool:
            without = set(self.selection.names) - set(prefix)
            try:
                self._rewrite(module, GraphReport(0), without)
            except Exception:  # whatever it is
                return True
            return False

        return breaks

    def _rewrite(
        self, module: GraphModule, report: GraphReport, without: Collection[str]
    ) -> GraphModule:
        copy = copy_graph_module(module)
        selection = self.selection.without(without)
        self._history = History()
        history = self._history if self._explained else None
        report.patterns = rewrite(copy, selection.phases, self._strict, history)
        note_lacking(report.patterns, selection)
        return copy

    def _explain(self, module: GraphModule, after: GraphModule, report: GraphReport) -> None:
        history = self._history if after is not module else History()
        case = Case(module, after, self.selection, self._everything, history, report)
        for name in self._explained:
            try:
                self.report.explanations.append(explain(name, case))
            except Exception as error:  # a text is not worth a run
                if self._strict:
                    raise
                log.warning("pattern %s could not be explained", name, exc_info=error)

    def _checked(
        self,
        module: GraphModule,
        rewritten: GraphModule,
        inputs: Sequence[Any],
        report: GraphReport,
    ) -> GraphModule | None:
        """The rewritten graph, less the patterns that change its result on these inputs."""
        if not report.fired:
            return rewritten
        approximate = self._approximate(report)
        try:
            verifier = Verifier(module, inputs)
        except CannotVerify as reason:
            report.verified = f"not verified: {reason}"
            report.approximated = dict.fromkeys(approximate, "not measured")
            return rewritten
        if approximate:  # what the others do must be exact
            rewritten = self._rewrite_unbroken(module, report, approximate)
        while (difference := verifier.difference(rewritten)) is not None:
            if self._strict:
                raise AssertionError(difference)
            name = self._guilty(module, report, verifier, approximate)
            if name is None:
                self._fall_back(report, "the original graph", f"verification failed: {difference}")
                return None
            report.dropped[name] = difference
            log.warning("pattern %s changes the result and is left out: %s", name, difference)
            rewritten = self._rewrite_unbroken(module, report, approximate)
        report.verified = "verified"
        return self._approximated(module, rewritten, report, verifier, approximate)

    def _approximate(self, report: GraphReport) -> dict[str, float]:
        """How far gradients may be off for the sake of approximate patterns that fired."""
        fired = {pattern.name for pattern in report.patterns if pattern.fired}
        return {n: e for n, e in self.selection.gradient_errors().items() if n in fired}

    def _approximated(
        self,
        module: GraphModule,
        exact: GraphModule,
        report: GraphReport,
        verifier: Verifier,
        approximate: Mapping[str, float],
    ) -> GraphModule:
        """`exact` with approximate patterns, one after another, as far as they keep their word."""
        for name, own in approximate.items():
            pending = [n for n in approximate if n not in (*report.approximated, name)]
            trial = self._rewrite(module, report, {*report.left_out, *pending})
            # What those before it may cost comes on top.
            allowed = own + sum(approximate[n] for n in report.approximated)
            difference = verifier.difference(trial, allowed)
            if difference is None:
                error, where = verifier.gradient_error(trial)
                report.approximated[name] = (
                    f"{where} is off by {error:.2%} of its norm on the inputs at hand "
                    f"(allowed: {allowed:.2%})"
                )
                exact = trial
                continue
            if self._strict:
                raise AssertionError(difference)
            report.dropped[name] = difference
            log.warning("pattern %s is too inaccurate and is left out: %s", name, difference)
            exact = self._rewrite(module, report, {*report.left_out, *pending})
        return exact

    def _guilty(
        self,
        module: GraphModule,
        report: GraphReport,
        verifier: Verifier,
        approximate: Collection[str],
    ) -> str | None:
        left_out = {*report.left_out, *approximate}
        names = [name for name in self.selection.names if name not in left_out]

        def is_wrong(prefix: Sequence[str]) -> bool:
            trial = GraphReport(report.index)
            without = set(self.selection.names) - set(prefix)
            try:
                return verifier.difference(self._rewrite(module, trial, without)) is not None
            except Exception:  # what all patterns together do not break, some of them may
                return True

        return guilty(names, is_wrong)

    def _packed(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        if self._packing is None:
            return self._graphed(module, inputs)
        with _unwatched():
            copy = copy_graph_module(module)
            module, packed_inputs, wrap = self._packing.pack_graph(copy, inputs)
        return wrap(self._graphed(module, packed_inputs))

    def _graphed(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        # The compiler may take the module apart.
        fixed = fixed_inputs(module)
        compiled = self._compile(module, inputs)
        return compiled if self._graphs is None else self._graphs.wrap(compiled, fixed)

    def _compile(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        if self._inner == "inductor":
            from torch._inductor.compile_fx import compile_fx

            options = self._options
            if self._recompute == "auto" and self.selection:
                options = {**inductor_options(), **options}
            with saving(less=self._recompute is True):
                compiled: Any = compile_fx(module, list(inputs), config_patches=options or None)
        else:
            compiled = torch._dynamo.lookup_backend(self._inner)(module, list(inputs))
        return cast(Compiled, compiled)

    def _fall_back(
        self, report: GraphReport, what: str, why: str, error: Exception | None = None
    ) -> None:
        report.fallback = f"{what} runs: {why}"
        log.warning("graph %d: %s", report.index, report.fallback, exc_info=error)


def _unwatched() -> AbstractContextManager[Any]:
    """No watcher of what calls save for backward, such as a checkpoint, sees what is saved here."""
    enabled = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)
    if enabled is not None and not enabled():  # a private name
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def note_lacking(reports: Sequence[PatternReport], selection: Selection) -> None:
    """Note of patterns that never fired what they need (`Rewrite.needs`) and is not selected."""
    names = set(selection.names)
    needs = {p.name(): p.needs for phase in selection.phases for p in phase.patterns}
    for report in reports:
        if not report.fired:
            report.lacks = tuple(n for n in needs.get(report.name, ()) if n not in names)


def _check_options(inner: str, options: Mapping[str, Any]) -> None:
    if not options:
        return
    if inner != "inductor":
        raise ValueError(f"inner_options are inductor's; inner={inner!r} takes none")
    valid = torch._inductor.list_options()
    for name in options:
        nearest("inductor option", name, valid)


_OPTIONS = tuple(inspect.signature(OptimusBackend).parameters)


def optimus(
    module: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Compiled:
    """Entry point of `torch.compile(fn, backend="optimus", options={...})`.

    `options` are OptimusBackend's arguments. All graphs of one torch.compile share one backend,
    kept on the object through which PyTorch calls this function. Raises ValueError for an unknown
    option, naming the nearest ones.
    """
    for name in options or {}:
        nearest("option", name, _OPTIONS)
    frame = inspect.currentframe()
    caller = frame.f_back.f_locals.get("self") if frame is not None and frame.f_back else None
    if getattr(caller, "compiler_fn", None) is not optimus:  # a private name
        return OptimusBackend(**dict(options or {}))(module, inputs)
    backend = getattr(caller, NAMED_BACKEND, None) or OptimusBackend(**dict(options or {}))
    setattr(caller, NAMED_BACKEND, backend)
    return cast(Compiled, backend(module, inputs))


def compile(
    target: nn.Module | Callable[..., Any],
    patterns: str | Sequence[str] = "all",
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    packing: bool = True,
    dynamic: bool | None = None,
    **options: Any,
) -> Any:
    """Compile a module in place, or a function, with Optimus, for a training loop of one's own.

    A module is returned as it was given: calls of it run compiled, its state dict, pickles and
    copies are unchanged. With `packing` its parameters are stored together where the rewritten
    graph stacks them, and those of `optimizers` that update element by element step on them as one:
    gradients are then found in the `param_groups` of these, not at the module's parameters, which
    is where to clip, zero or read them.
    `options` are OptimusBackend's. Raises ValueError as it does, and for unknown ones.
    """
    for name in options:
        nearest("option of optimus.compile", name, _COMPILE_OPTIONS)
    packs = Packing() if packing else None
    if packs is not None and optimizers:
        packs.adopt = PackedOptimizer(optimizers).adopt
    backend = OptimusBackend(patterns, packing=packs, **options)
    if not isinstance(target, nn.Module):
        return torch.compile(target, backend=cast(Any, backend), dynamic=dynamic)
    CompiledTarget(Target("", target), cast(Any, backend), "compile", dynamic).install()
    return target


_COMPILE_OPTIONS = {*inspect.signature(compile).parameters, *_OPTIONS} - {"target", "options"}
