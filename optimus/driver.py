"""The only loop: runs patterns over a graph, checks every rewrite and counts what happened."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

from torch.fx import Graph, GraphModule, Node

from optimus.editor import Editor
from optimus.effects import turns_in_place
from optimus.facts import changed, kept
from optimus.functionalize import functionalize
from optimus.gradients import GradientContract, keeps_grad_under_no_grad, leaves_no_grad
from optimus.grouping import GroupPass, Keys, attempt, decides_in_context, record
from optimus.history import History
from optimus.layout import OutputContract, settle
from optimus.legality import Legality
from optimus.ops import is_understood
from optimus.pattern import (
    EVERY_CALL,
    GroupPattern,
    Match,
    Miss,
    Pattern,
    Rewrite,
    SweepPattern,
)
from optimus.records import OWN, REFUSED, PatternReport
from optimus.values import fake_mode_of, is_transformed

log = logging.getLogger(__name__)

_NOT_UNDERSTOOD = Miss("writes in place, or says something else that the canonical form cannot")

MAX_ROUNDS = 16
"""How often a phase is repeated at most; the patterns of a phase settle within two or three."""

MAX_CYCLES = 4
"""How often all phases are repeated at most: what one makes may be work for an earlier one."""


MAX_GROWTH = 4
"""How many times its size a graph may reach, and some more for a small one."""


class Endless(Exception):
    """A pattern makes work for itself again and again; the text says how the graph grew."""


@dataclass(frozen=True)
class Phase:
    """Patterns that run one after another, again and again until none of them fires.

    Group patterns that stand side by side run together, by one agenda (optimus.grouping).
    """

    name: str
    patterns: tuple[Rewrite, ...]


def rewrite(
    module: GraphModule,
    phases: Sequence[Phase],
    strict: bool = False,
    history: History | None = None,
) -> list[PatternReport]:
    """Run `phases` over `module.graph` in place; the module is recompiled.

    The graph needs fake values (`node.meta["example_value"]`), as Dynamo leaves them; one that runs
    torch.func's transforms inside stays as it is, as does one that lets gradients out of the
    caller's no_grad, or turns a tensor in place. A pattern that raises is left out from there on
    and its record says so; `strict` lets it raise. Raises Refused when what the graph returns
    cannot be kept as it was, and Endless when the graph grows without end; the graph is then of no
    use.
    """
    with kept():
        return _rewrite(module, phases, strict, history)


def _rewrite(
    module: GraphModule, phases: Sequence[Phase], strict: bool, history: History | None
) -> list[PatternReport]:
    graph = module.graph
    mode = fake_mode_of(graph)
    if mode is None or is_transformed(graph) or leaves_no_grad(graph):
        return []
    legality = Legality(graph)
    if any(map(turns_in_place, graph.nodes)) or keeps_grad_under_no_grad(graph, legality):
        return []
    contract = OutputContract(graph)
    first = functionalize(graph, mode, legality)
    if first.fired:
        changed()  # in other ways than through an editor
        legality = Legality(graph)
    legality.pin(contract.pinned(graph, legality))
    editor = Editor(graph, legality, mode, strict)
    editor.history = history
    editor.sweep(graph.nodes)  # what nobody needs must not be merged with what somebody does
    gradients = GradientContract(graph, legality)
    run = _Run(editor, {first.name: first}, strict)
    for _ in range(MAX_CYCLES):
        before = editor.edits
        for phase in phases:
            run.phase(phase)
        if editor.edits == before:
            break
    contract.enforce(editor)  # first: a copy of an input can be given what the input cannot
    gradients.enforce(editor)
    contract.enforce(editor)
    graph.lint()
    module.recompile()
    return list(run.reports.values())


def copy_graph_module(module: GraphModule) -> GraphModule:
    """A module with a graph of its own; parameters, constants and fake values are shared."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = GraphModule(module, graph)
    copy.meta = dict(module.meta)
    # Attributes by which Dynamo tells AOTAutograd what each input is. Without them no parameter is
    # known to keep its address: CUDA graphs copy them all, and what is saved beside them counts.
    if hasattr(module, _SOURCES):
        setattr(copy, _SOURCES, getattr(module, _SOURCES))
    nodes = (m.graph.find_nodes(op="placeholder") for m in (module, copy))
    for node, twin in zip(*nodes, strict=True):
        if hasattr(node, DYNAMO_SOURCE):
            setattr(twin, DYNAMO_SOURCE, getattr(node, DYNAMO_SOURCE))
    return copy


_SOURCES = "_param_name_to_source"
DYNAMO_SOURCE = "_dynamo_source"
"""Private attributes of PyTorch's, on a graph module from Dynamo and on its placeholders."""


class _Run:
    """One graph's way through the phases. `reports` keep each pattern's first misses: they tell
    what it saw in the user's graph."""

    def __init__(self, editor: Editor, reports: dict[str, PatternReport], strict: bool) -> None:
        self.reports = reports
        self._editor = editor
        self._strict = strict
        self._limit = MAX_GROWTH * len(editor.graph.nodes) + 200
        self._failed: set[str] = set()
        self._idle: dict[tuple[str, ...], tuple[int, bool, bool]] = {}
        self._keys = Keys()
        self._passes: dict[tuple[str, ...], GroupPass] = {}

    def phase(self, phase: Phase) -> None:
        """Repeat until a round changes nothing, not even one that allows for copies."""
        patient = True
        for _ in range(MAX_ROUNDS):
            before, postponed = self._editor.edits, False
            for step in self._steps(phase):
                postponed |= self._step(step, patient)
            if self._editor.edits != before:
                patient = True
            elif patient and postponed:
                patient = False
            else:
                return
        log.warning("phase %s still changes the graph after %d rounds", phase.name, MAX_ROUNDS)

    def _steps(self, phase: Phase) -> Iterator[Sequence[Rewrite]]:
        """What runs together: one local pattern, or group patterns that stand side by side."""
        patterns = [p for p in phase.patterns if p.name() not in self._failed]
        for are_groups, run in groupby(patterns, lambda p: isinstance(p, GroupPattern)):
            side_by_side = tuple(run)
            yield from [side_by_side] if are_groups else [(pattern,) for pattern in side_by_side]

    def _step(self, patterns: Sequence[Rewrite], patient: bool) -> bool:
        """Run them once, unless they found nothing in this very graph; whether groups were
        postponed because they cost copies."""
        editor, size = self._editor, len(self._editor.graph.nodes)
        names, before = tuple(p.name() for p in patterns), self._editor.edits
        edits, was_patient, was_postponed = self._idle.get(names, (-1, False, False))
        if edits == before and (patient or not was_patient or not was_postponed):
            return was_postponed
        reports = {p.name(): PatternReport(p.name(), p.family, 0, 0, {}, size) for p in patterns}
        for report in reports.values():
            report.nodes_after = size
        postponed = False
        if isinstance(patterns[0], Pattern | SweepPattern):
            self._run_alone(patterns[0], reports[patterns[0].name()])
        else:
            groups = cast(Sequence[GroupPattern], patterns)
            step = self._passes.get(names)
            if step is None or not step.holds:
                step = self._passes[names] = GroupPass(groups, editor, self._strict, self._keys)
            step.run(reports, patient)
            self._failed |= {pattern.name() for pattern in step.failed}
            postponed = step.postponed
        settle(editor)
        if len(editor.graph.nodes) > self._limit:
            raise Endless(f"{', '.join(names)}: {size} nodes became {len(editor.graph.nodes)}")
        for name, report in reports.items():
            _accumulate(self.reports.setdefault(name, report), report)
        if editor.edits == before:
            self._idle[names] = (before, patient, postponed)
        return postponed

    def _run_alone(self, pattern: Pattern | SweepPattern, report: PatternReport) -> None:
        start = time.perf_counter()
        try:
            if isinstance(pattern, SweepPattern):
                self._sweep(pattern, report)
            else:
                for node in self._editor.anchors(pattern.anchors):
                    if self._editor.is_alive(node):
                        report.anchors += 1
                        self._try(pattern, self._match(pattern, node), node, report)
        except Exception as error:
            self._editor.rollback()
            if self._strict:
                raise
            log.warning("pattern %s failed and is left out", report.name, exc_info=error)
            report.miss(f"internal error: {error!r}")
            self._failed.add(report.name)
        report.nodes_after = len(self._editor.graph.nodes)
        report.seconds = time.perf_counter() - start

    def _match(self, pattern: Pattern, node: Node) -> Match | Miss:
        if not is_understood(node):
            return _NOT_UNDERSTOOD
        if not decides_in_context(pattern):
            return pattern.match(node)
        with self._editor.legality.context(node).active():
            return pattern.match(node)

    def _sweep(self, pattern: SweepPattern, report: PatternReport) -> None:
        by_context: dict[object, list[Node]] = defaultdict(list)
        every, lonely = pattern.anchors == EVERY_CALL, Miss(pattern.loner)
        for node in self._editor.calls() if every else self._editor.anchors(pattern.anchors):
            context = self._editor.legality.context(node)
            by_context[context.grad, context.autocast].append(node)
            report.anchors += 1
        for nodes in by_context.values():
            matched: set[Node] = set()
            for match in pattern.matches(nodes):
                matched.update(match.nodes)
                self._try(pattern, match, match.anchor, report)
            for node in nodes:
                if node not in matched:
                    record(report, lonely, node)

    def _try(
        self,
        pattern: Pattern | SweepPattern,
        found: Match | Miss,
        node: Node,
        report: PatternReport,
    ) -> None:
        reached = REFUSED if isinstance(found, Match) else OWN
        if isinstance(found, Match):
            self._editor.begin(found.nodes, node, found.drops, pattern.replaces_effects)
            found = attempt(self._editor, pattern, found)
        if isinstance(found, Miss):
            record(report, found, node, reached)
        else:
            report.fired += 1


def _accumulate(kept: PatternReport, later: PatternReport) -> None:
    if kept is not later:
        if not kept.misses and not kept.fired:
            kept.misses = later.misses
        kept.fired += later.fired
        kept.seconds += later.seconds
        kept.nodes_after += later.nodes_after - later.nodes_before
        kept.anchors = max(kept.anchors, later.anchors)
