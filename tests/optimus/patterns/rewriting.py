"""One pattern, behind the normalisations, on a small program; the graph as text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optimus.ops import op_of
from optimus.pattern import Rewrite
from optimus.pipeline import PIPELINE, patterns_by_name
from tests.optimus.capture import rewritten

NORMALIZE = PIPELINE[0].patterns
Program = Callable[..., Any]


@dataclass
class Result:
    """What became of a program: its graph, how often the pattern fired and why it did not."""

    text: str
    fired: int
    misses: str
    module: GraphModule


def rewrite(
    name: str, program: Program, inputs: Sequence[Any], *also: str, dynamic: bool = False
) -> Result:
    """Run pattern `name`, those in `also` and the normalisations until nothing changes.

    Asserts that the program still does what it did, and that a second run changes nothing.
    """
    named = [patterns_by_name()[each] for each in (*also, name)]
    patterns: list[Rewrite] = [*NORMALIZE, *(p for p in named if p not in NORMALIZE)]
    module, reports = rewritten(program, inputs, *patterns, dynamic=dynamic)
    report = reports[name]
    return Result(listing(module), report.fired, "; ".join(report.misses), module)


def fired(name: str, program: Program, *inputs: Any, dynamic: bool = False) -> int:
    """How often a pattern fires."""
    return rewrite(name, program, inputs, dynamic=dynamic).fired


def missed(name: str, program: Program, *inputs: Any, dynamic: bool = False) -> str:
    """Why a pattern does not fire; asserts that it does not."""
    result = rewrite(name, program, inputs, dynamic=dynamic)
    assert result.fired == 0, f"{name} fired {result.fired} times:\n{result.text}"
    return result.misses


def text(golden: str) -> str:
    """An indented listing as it stands in a test."""
    return textwrap.dedent(golden).strip()


def listing(module: GraphModule) -> str:
    """The graph, one call a line, by canonical names of operations."""
    lines: list[str] = []
    for node in module.graph.nodes:
        if node.op == "output":
            (returned,) = node.args
            lines.append("return " + ", ".join(map(_said, returned)))
        elif node.op != "placeholder":
            said = [_said(a) for a in node.args]
            said += [f"{key}={_said(value)}" for key, value in node.kwargs.items()]
            lines.append(f"{_name(node)} = {_operation(node)}({', '.join(said)})")
    return "\n".join(lines)


def _operation(node: Node) -> str:
    op = op_of(node)
    return op.name if op is not None else str(getattr(node.target, "__name__", node.target))


def _said(value: Any) -> str:
    if isinstance(value, Node):
        return _name(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_said, value)) + "]"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(value)


def _name(node: Node) -> str:
    return re.sub(r"^l_|_$", "", node.name)
