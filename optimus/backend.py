"""The torch.compile backend: rewrite the graph, then hand it to the inner compiler.

`torch.compile(fn, backend="optimus", options={"patterns": "all"})`, an `OptimusBackend` of one's
own, or `optimus.compile(module)`. Nothing here raises for a graph: if a rewritten graph cannot be
built or compiled, the original is compiled, and if that fails too it runs in eager mode. The report
says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule

from optimus.driver import rewrite
from optimus.pipeline import Selection, select
from optimus.report import GraphReport, Report

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]
INNER = ("inductor", "aot_eager", "eager")


class OptimusBackend:
    """A torch.compile backend with a selection of patterns.

    `report` grows by one record for each graph compiled. `inner` compiles what was rewritten;
    `inner_options` are inductor's config entries. Raises ValueError for unknown patterns, knobs,
    inner compilers and options, naming the valid ones.
    """

    def __init__(
        self,
        patterns: str | Sequence[str] = "all",
        *,
        disable: Sequence[str] = (),
        knobs: Mapping[str, Mapping[str, Any]] | None = None,
        inner: str = "inductor",
        inner_options: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> None:
        if inner not in INNER:
            raise ValueError(f"unknown inner compiler {inner!r}; valid: {', '.join(INNER)}")
        if inner_options and inner != "inductor":
            raise ValueError(f"inner_options are inductor's; inner={inner!r} takes none")
        self.selection: Selection = select(patterns, disable, knobs)
        self.report = Report()
        self._inner = inner
        self._options = dict(inner_options or {})
        self._strict = strict

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile one graph, as Dynamo hands it over."""
        report = GraphReport(len(self.report.graphs), nodes_before=len(module.graph.nodes))
        self.report.graphs.append(report)
        for candidate in (self._rewritten(module, report), module):
            if candidate is None:
                continue
            report.nodes_after = len(candidate.graph.nodes)
            start = time.perf_counter()
            try:
                return self._compile(candidate, inputs)
            except Exception as error:
                if self._strict:
                    raise
                what = "the original graph" if candidate is not module else "eager mode"
                self._fall_back(report, what, f"compiling failed: {error!r}", error)
            finally:
                report.compile_seconds += time.perf_counter() - start
        return module.forward

    def _rewritten(self, module: GraphModule, report: GraphReport) -> GraphModule | None:
        if not self.selection:
            return None
        start = time.perf_counter()
        try:
            copy = copy_graph_module(module)
            report.patterns = rewrite(copy, self.selection.phases, self._strict)
            return copy
        except Exception as error:
            if self._strict:
                raise
            self._fall_back(report, "the original graph", f"rewriting failed: {error!r}", error)
            return None
        finally:
            report.rewrite_seconds = time.perf_counter() - start

    def _compile(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        if self._inner == "inductor":
            from torch._inductor.compile_fx import compile_fx

            compiled: Any = compile_fx(module, list(inputs), config_patches=self._options or None)
        else:
            compiled = torch._dynamo.lookup_backend(self._inner)(module, list(inputs))
        return cast(Compiled, compiled)

    def _fall_back(self, report: GraphReport, what: str, why: str, error: Exception) -> None:
        report.fallback = f"{what} runs: {why}"
        log.warning("graph %d: %s", report.index, report.fallback, exc_info=error)


def copy_graph_module(module: GraphModule) -> GraphModule:
    """A module with a graph of its own; parameters, constants and fake values are shared."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = GraphModule(module, graph)
    copy.meta = dict(module.meta)
    return copy


def optimus(
    module: GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Compiled:
    """Entry point of `torch.compile(fn, backend="optimus", options={...})`.

    `options` are OptimusBackend's arguments.
    """
    return OptimusBackend(**dict(options or {}))(module, inputs)
