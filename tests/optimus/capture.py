"""Torch-IR graphs of small programs as Dynamo hands them over, for tests of the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optimus.backend import copy_graph_module
from optimus.driver import Phase, rewrite
from optimus.ops import op_of
from optimus.pattern import Rewrite
from optimus.records import PatternReport
from optimus.verify import Verifier


class Captured:
    """The graph of `function(*inputs)` and the inputs that the graph itself takes."""

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False
    ) -> None:
        self.modules: list[GraphModule] = []
        self.inputs: list[Any] = []
        inputs = copy.deepcopy(inputs)
        if dynamic:
            for tensor in inputs:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch._dynamo.reset()
        torch.compile(function, backend=self._backend)(*inputs)
        assert len(self.modules) == 1, "the program breaks the graph"

    def _backend(self, module: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.modules.append(module)
        plain = [x.node.hint if isinstance(x, torch.SymInt) else x for x in inputs]
        self.inputs = copy.deepcopy(plain)
        return module.forward

    @property
    def module(self) -> GraphModule:
        """The graph as captured."""
        return self.modules[0]


def rewritten(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *patterns: Rewrite,
    dynamic: bool = False,
) -> tuple[GraphModule, dict[str, PatternReport]]:
    """The graph of `function` after `patterns` alone, and their records.

    Asserts that it still does what it did: values, gradients, types, strides, memory, random
    numbers.
    """
    captured = Captured(function, inputs, dynamic)
    module = copy_graph_module(captured.module)
    reports = rewrite(module, (Phase("test", patterns),), strict=True)
    allowed = max((pattern.gradient_error() for pattern in patterns), default=0.0)
    difference = Verifier(captured.module, captured.inputs).difference(module, allowed)
    assert difference is None, difference
    return module, {report.name: report for report in reports}


def refused(function: Callable[..., Any], inputs: Sequence[Any], *patterns: Rewrite) -> str:
    """Why the first of `patterns` never fires on `function`; asserts that it does not."""
    _, reports = rewritten(function, inputs, *patterns)
    report = reports[patterns[0].name()]
    assert report.fired == 0, f"{report.name} fired {report.fired} times"
    return "; ".join(report.misses)


def names(module: GraphModule) -> list[str]:
    """Operations of the graph in order, by their canonical names."""
    return [_name(node) for node in module.graph.nodes if node.op.startswith("call")]


def _name(node: Node) -> str:
    op = op_of(node)
    return op.name if op is not None else str(getattr(node.target, "__name__", node.target))
