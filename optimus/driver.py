"""The only loop: runs patterns over a graph, checks every rewrite and counts what happened."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from optimus.editor import Editor, Refused
from optimus.functionalize import functionalize
from optimus.layout import OutputContract, settle
from optimus.legality import Context, Legality, tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import GroupPattern, Match, Miss, Pattern, Rewrite
from optimus.report import PatternReport
from optimus.schedule import schedule
from optimus.values import fake_mode_of

log = logging.getLogger(__name__)

MAX_ROUNDS = 8
"""How often a phase is repeated at most; the patterns of a phase settle within two or three."""


@dataclass(frozen=True)
class Phase:
    """Patterns that run one after another, again and again until none of them fires."""

    name: str
    patterns: tuple[Rewrite, ...]


def rewrite(
    module: GraphModule, phases: Sequence[Phase], strict: bool = False
) -> list[PatternReport]:
    """Run `phases` over `module.graph` in place; the module is recompiled.

    The graph needs fake values (`node.meta["example_value"]`), as Dynamo leaves them. A pattern
    that raises is left out from there on and its record says so; `strict` lets it raise. Raises
    Refused when what the graph returns cannot be kept as it was; the graph is then of no use.
    """
    graph = module.graph
    mode = fake_mode_of(graph)
    if mode is None:
        return []
    contract = OutputContract(graph)
    first = functionalize(graph, mode)
    editor = Editor(graph, Legality(graph), mode)
    reports: dict[str, PatternReport] = {first.name: first}
    for phase in phases:
        _run_phase(phase, editor, reports, strict)
    contract.enforce(editor)
    graph.lint()
    module.recompile()
    return list(reports.values())


def _run_phase(
    phase: Phase, editor: Editor, reports: dict[str, PatternReport], strict: bool
) -> None:
    """Repeat until a round changes nothing. The records keep the first round's misses: they tell
    what the pattern saw in the user's graph."""
    patterns = list(phase.patterns)
    for _ in range(MAX_ROUNDS):
        before = editor.edits
        for pattern in tuple(patterns):
            name = pattern.name()
            report = PatternReport(name, pattern.family, nodes_before=len(editor.graph.nodes))
            if not _run_pattern(pattern, editor, report, strict):
                patterns.remove(pattern)
            _accumulate(reports.setdefault(name, report), report)
        if editor.edits == before:
            return
    log.warning("phase %s still changes the graph after %d rounds", phase.name, MAX_ROUNDS)


def _accumulate(kept: PatternReport, later: PatternReport) -> None:
    if kept is not later:
        kept.fired += later.fired
        kept.seconds += later.seconds
        kept.nodes_after = later.nodes_after
        kept.anchors = max(kept.anchors, later.anchors)


def _run_pattern(pattern: Rewrite, editor: Editor, report: PatternReport, strict: bool) -> bool:
    """One pass; False when the pattern raised and must not run again."""
    start = time.perf_counter()
    sound = True
    try:
        if isinstance(pattern, Pattern):
            _run_local(pattern, editor, report)
        elif isinstance(pattern, GroupPattern):
            _run_groups(pattern, editor, report)
    except Exception as error:
        editor.rollback()
        if strict:
            raise
        log.warning("pattern %s failed and is left out", report.name, exc_info=error)
        report.miss(f"internal error: {error!r}")
        sound = False
    settle(editor)
    report.nodes_after = len(editor.graph.nodes)
    report.seconds = time.perf_counter() - start
    return sound


def _run_local(pattern: Pattern, editor: Editor, report: PatternReport) -> None:
    for node in editor.anchors(pattern.anchors):
        if not editor.is_alive(node):
            continue
        report.anchors += 1
        match = pattern.match(node)
        if isinstance(match, Match):
            editor.begin(match.nodes, node, match.drops, pattern.replaces_effects)
            match = _attempt(editor, pattern, match)
        if isinstance(match, Miss):
            _record(report, match, node)
        else:
            report.fired += 1


def _run_groups(pattern: GroupPattern, editor: Editor, report: PatternReport) -> None:
    keys = _keys(pattern, editor, report)
    if len(keys) < pattern.smallest_group:
        _record_alone(report, list(keys))
        return
    nodes = [node for node in editor.graph.nodes if node.op != "output"]
    plan = schedule(nodes, keys, editor.legality.dependencies(nodes))
    _record_alone(report, list(keys.keys() - {n for group in plan.groups for n in group}))
    if not plan.groups:
        return
    _reorder(editor.graph, plan.order)
    for block in plan.groups:
        members = [node for node in block if editor.is_alive(node)]
        for group in pattern.arrange(members) if len(members) > 1 else ():
            _rewrite_group(pattern, group, members[0], editor, report)


def _rewrite_group(
    pattern: GroupPattern,
    group: Sequence[Node],
    before: Node,
    editor: Editor,
    report: PatternReport,
) -> None:
    if len(group) < pattern.smallest_group:
        _record_alone(report, group)
        return
    place = min(group) if not editor.is_alive(before) else before
    editor.begin(group, place, (), pattern.replaces_effects)
    outcome = _attempt(editor, pattern, group)
    if isinstance(outcome, Miss):
        for node in group:
            _record(report, outcome, node)
    else:
        report.fired += 1


def _attempt(editor: Editor, pattern: Any, found: Any) -> Any:
    """Rewrite what was found: the same again if it counts, a Miss if the editor refuses it."""
    try:
        pattern.rewrite(found, editor)
        editor.commit()
    except Refused as reason:
        editor.rollback()
        return Miss(str(reason))
    return found


def _keys(pattern: GroupPattern, editor: Editor, report: PatternReport) -> dict[Node, Hashable]:
    keys: dict[Node, Hashable] = {}
    for node in editor.anchors(pattern.anchors):
        report.anchors += 1
        common = common_key(node, editor.legality.context(node))
        own = common if isinstance(common, Miss) else pattern.key(node)
        if isinstance(own, Miss):
            _record(report, own, node)
        else:
            keys[node] = (common, freeze(own))
    return keys


def common_key(node: Node, context: Context) -> Hashable | Miss:
    """What members of any group share: operation, attributes, types, gradients and context."""
    op, values = op_of(node), arguments(node)
    if op is None or values is None:
        return Miss("a spelling of the operation that is not known")
    try:
        parts = tuple((name, _argument_key(value)) for name, value in values.items())
    except TypeError:
        return Miss("an argument is no tensor, number or list of these")
    return (op.name, parts, _type_key(tensor_of(node)), context.grad, context.autocast)


def _argument_key(value: Any) -> Hashable:
    """Tensors by type; anything else by type and value, as 1, 1.0 and True differ."""
    return _type_key(tensor_of(value)) if isinstance(value, Node) else freeze(value, _argument_key)


def freeze(value: Any, inner: Callable[[Any], Hashable] | None = None) -> Hashable:
    """A hashable stand-in for a plain value: dynamic sizes by their expression, lists as tuples."""
    if isinstance(value, tuple | list | torch.Size):
        parts: Sequence[Any] = value
        return tuple((inner or freeze)(part) for part in parts)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return (type(value).__name__, str(value.node.expr))
    hash(value)
    return (type(value).__name__, value)


def _type_key(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return object()  # a number computed in the graph: equal to nothing else
    return (tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, type(tensor).__name__)


def _reorder(graph: Graph, order: Sequence[Node]) -> None:
    """Put the graph's nodes (all but the output) into `order`."""
    last: Node | None = None
    for node in order:
        if last is not None and last.next is not node:
            last.append(node)
        last = node


def _record_alone(report: PatternReport, nodes: Sequence[Node]) -> None:
    for node in nodes:
        _record(report, Miss("no other node like it can run beside it"), node)


def _record(report: PatternReport, miss: Miss, node: Node) -> None:
    report.miss(miss.reason, node.name, _source_line(node))


def _source_line(node: Node) -> str:
    """The line of the user's program that the node comes from, as `file:line: code`."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith("File ") and "site-packages/torch/" not in lines[at]:
            path, line = lines[at].split(",")[:2]
            code = lines[at + 1] if at + 1 < len(lines) else ""
            return f"{path[5:].strip().strip(chr(34))}:{line.split()[-1]}: {code}"
    return ""
