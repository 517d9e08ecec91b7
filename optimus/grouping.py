"""One pass of all group patterns over a graph, by one agenda.

Every node gets the key of the first pattern that has company for it; the schedule then stands each
group as one block, and the blocks are rewritten in that order. So when a group's turn comes, what
it reads has been merged already, and a chain of N equal branches is merged from end to end in one
pass. A node that its pattern leaves alone is tried once more with the next pattern it suits.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, Node

from optimus.editor import Editor, Refused
from optimus.facts import Facts
from optimus.gradients import differentiated
from optimus.history import source_line
from optimus.legality import Context, Legality, tensor_of
from optimus.ops import arguments, op_of
from optimus.pattern import GroupPattern, Miss, Rewrite
from optimus.records import ALONE, APART, OWN, REFUSED, PatternReport
from optimus.schedule import Schedule, schedule

log = logging.getLogger(__name__)

Candidate = tuple[GroupPattern, int]
"""A pattern that a node suits, and the number of the key that it has for it."""
LONELY = Miss("no other node like it can run beside it")


class Keys:
    """The keys of one graph's nodes, as numbers: long ones are compared once, not wherever nodes
    are."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._common: dict[tuple[Node, tuple[str, ...]], tuple[Any, Any, int | Miss]] = {}

    def number(self, key: Hashable) -> int:
        """The number that stands for `key`."""
        return self._numbers.setdefault(key, len(self._numbers))

    def common(self, node: Node, legality: Legality, optional: tuple[str, ...] = ()) -> int | Miss:
        """The number of `common_key`, read anew when the node's call is another: no rewrite changes
        the type of a value, or the context of a node."""
        args, kwargs = node.args, node.kwargs
        known = self._common.get((node, optional))
        if known is None or known[0] is not args or known[1] is not kwargs:
            key = common_key(node, legality.context(node), optional)
            number = key if isinstance(key, Miss) else self.number(key)
            known = self._common[node, optional] = (args, kwargs, number)
        return known[2]


class GroupPass:
    """Runs `patterns` once over the editor's graph; again only while that `holds`.

    A pattern that raises is left out from there on and stands in `failed`, or raises on if
    `strict`. `keys` go from pass to pass.
    """

    def __init__(
        self, patterns: Sequence[GroupPattern], editor: Editor, strict: bool, keys: Keys
    ) -> None:
        self.failed: list[GroupPattern] = []
        self.postponed = False
        self._patterns = patterns
        self._editor = editor
        self._strict = strict
        self._patient = True
        self._reports: Mapping[str, PatternReport] = {}
        self._edits = editor.edits
        self._found: dict[Node, list[Candidate]] | None = None
        self._first: tuple[dict[Node, Candidate], Schedule] | None = None
        self._differentiated = differentiated(editor.graph, editor.legality)
        self._keys = keys

    @property
    def holds(self) -> bool:
        """Whether the graph is still the one that was read: what was found then need not be looked
        for again."""
        return self._editor.edits == self._edits

    def run(self, reports: Mapping[str, PatternReport], patient: bool) -> None:
        """Merge what can be merged; the graph keeps its order if nothing can.

        With `patient`, groups that cost copies (GroupPattern.copies) are left for later and
        `postponed` says so: what comes before them may still change such that they cost none.
        """
        self._reports, self._patient, self.postponed = reports, patient, False
        if self._found is None:
            self._found = self._candidates()
            self._record_lonely(self._found)
        candidates = dict(self._found)
        while chosen := _choose(candidates):
            self._sweep(chosen)
            for node, candidate in chosen.items():
                left = candidates.pop(node)
                if self._editor.is_alive(node):
                    candidates[node] = left[left.index(candidate) + 1 :]

    def _candidates(self) -> dict[Node, list[Candidate]]:
        found: dict[Node, list[Candidate]] = {}
        for pattern in self._patterns:
            with self._guarded(pattern):
                for node in self._editor.anchors(pattern.anchors):
                    self._report(pattern).anchors += 1
                    key = self._key(pattern, node)
                    if isinstance(key, Miss):
                        self._record(pattern, key, (node,))
                    else:
                        found.setdefault(node, []).append((pattern, key))
        return found

    def _record_lonely(self, candidates: Mapping[Node, Sequence[Candidate]]) -> None:
        company = _company(candidates)
        for node, found in candidates.items():
            for pattern, key in found:
                if company[key] < pattern.smallest_group:
                    self._record(pattern, LONELY, (node,), ALONE)

    def _key(self, pattern: GroupPattern, node: Node) -> int | Miss:
        common = self._keys.common(node, self._editor.legality, pattern.optional)
        own = common if isinstance(common, Miss) else pattern.key(node)
        if isinstance(own, Miss):
            return own
        differentiated = node in self._differentiated
        return self._keys.number((pattern.name(), differentiated, common, freeze(own)))

    def _sweep(self, chosen: dict[Node, Candidate]) -> None:
        graph, legality = self._editor.graph, self._editor.legality
        before, order = self._editor.edits, list(graph.nodes)[:-1]
        plan = self._schedule(chosen, order)
        grouped = {node for block in plan.groups for node in block}
        for node, (pattern, _) in chosen.items():
            if node not in grouped:
                self._record(pattern, LONELY, (node,), ALONE)
        if plan.groups:
            _reorder(graph, plan.order)
        for block in plan.groups:
            pattern, _ = chosen[block[0]]
            if pattern not in self.failed:
                context = legality.context(block[0])
                active = context.active() if decides_in_context(pattern) else nullcontext()
                with self._guarded(pattern), active:
                    self._merge(pattern, block)
        if plan.groups and self._editor.edits == before:
            _reorder(graph, order)

    def _schedule(self, chosen: dict[Node, Candidate], order: Sequence[Node]) -> Schedule:
        if self._first is not None and self.holds and self._first[0] == chosen:
            return self._first[1]
        keys = {node: key for node, (_, key) in chosen.items()}
        singles = {key for pattern, key in chosen.values() if pattern.smallest_group == 1}
        plan = schedule(order, keys, self._editor.legality.dependencies(order), singles)
        self._first = self._first or (chosen, plan)
        return plan

    def _merge(self, pattern: GroupPattern, block: Sequence[Node]) -> None:
        members = [node for node in block if self._editor.is_alive(node)]
        if len(members) < pattern.smallest_group:
            return
        for group in pattern.arrange(members):
            if len(group) < pattern.smallest_group:
                self._record(pattern, Miss(pattern.misfit), group, APART)
            elif self._patient and pattern.copies(group):
                self.postponed = True
            else:
                self._rewrite(pattern, group, members[0])

    def _rewrite(self, pattern: GroupPattern, group: Sequence[Node], first: Node) -> None:
        editor, report = self._editor, self._report(pattern)
        place = first if editor.is_alive(first) else min(group)
        size = len(editor.graph.nodes)
        nodes = [node for member in group for node in (member, *pattern.also(member))]
        editor.begin(nodes, place, (), pattern.replaces_effects)
        outcome = attempt(editor, pattern, group)
        if isinstance(outcome, Miss):
            self._record(pattern, outcome, group, REFUSED)
        else:
            report.fired += 1
            report.nodes_after += len(editor.graph.nodes) - size

    @contextmanager
    def _guarded(self, pattern: GroupPattern) -> Iterator[None]:
        """Time a pattern's own work, and leave it out if it raises."""
        start, report = time.perf_counter(), self._report(pattern)
        try:
            yield
        except Exception as error:
            self._editor.rollback()
            if self._strict:
                raise
            log.warning("pattern %s failed and is left out", report.name, exc_info=error)
            report.miss(f"internal error: {error!r}")
            self.failed.append(pattern)
        finally:
            report.seconds += time.perf_counter() - start

    def _record(
        self, pattern: GroupPattern, miss: Miss, nodes: Iterable[Node], reached: int = OWN
    ) -> None:
        for node in nodes:
            record(self._report(pattern), miss, node, reached)

    def _report(self, pattern: GroupPattern) -> PatternReport:
        return self._reports[pattern.name()]


def decides_in_context(pattern: Rewrite) -> bool:
    """Whether a pattern decides under a node's grad mode and autocast: those that measure do."""
    return pattern.family == "kernels"


def _choose(candidates: Mapping[Node, Sequence[Candidate]]) -> dict[Node, Candidate]:
    """For each node the first pattern whose key it shares with enough other nodes, if any."""
    company = _company(candidates)
    chosen: dict[Node, Candidate] = {}
    for node, found in candidates.items():
        for candidate in found:
            if company[candidate[1]] >= candidate[0].smallest_group:
                chosen[node] = candidate
                break
    return chosen


def _company(candidates: Mapping[Node, Sequence[Candidate]]) -> Counter[int]:
    return Counter(key for found in candidates.values() for _, key in found)


def common_key(node: Node, context: Context, optional: Sequence[str] = ()) -> Hashable | Miss:
    """What members of any group share: operation, attributes, types, gradients and context.

    Arguments named in `optional` may differ in being there or not.
    """
    op, values = op_of(node), arguments(node)
    if op is None or values is None:
        return Miss("a spelling of the operation that is not known")
    try:
        parts = tuple([(n, _argument_key(v)) for n, v in values.items() if n not in optional])
    except TypeError:
        return Miss("an argument is no tensor, number or list of these")
    return (op.name, parts, _type_key(node), context.grad, context.autocast)


def _argument_key(value: Any) -> Hashable:
    """Tensors by type; anything else by type and value, as 1, 1.0 and True differ."""
    return _type_key(value) if isinstance(value, Node) else freeze(value, _argument_key)


def freeze(value: Any, inner: Callable[[Any], Hashable] | None = None) -> Hashable:
    """A hashable stand-in for a plain value: dynamic sizes by their expression, lists as tuples."""
    if type(value) in _PLAIN:
        return (type(value).__name__, value)
    if type(value) is Node:
        return value
    if isinstance(value, tuple | list | torch.Size):
        parts: Sequence[Any] = value
        return tuple((inner or freeze)(part) for part in parts)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return (type(value).__name__, str(value.node.expr))
    if isinstance(value, slice):
        return ("slice", *(freeze(part) for part in (value.start, value.stop, value.step)))
    hash(value)
    # The two zeros are equal numbers, but not equal arguments.
    return (type(value).__name__, repr(value) if isinstance(value, float) else value)


_PLAIN = {int, bool, str, type(None)}


def _type_key(node: Node) -> Hashable:
    tensor = tensor_of(node)
    if tensor is None:
        return object()  # a number computed in the graph: equal to nothing else
    known = _TYPES.of.get(node)
    if known is None or known[0] is not tensor:
        kind = (tensor.dtype, tensor.device, tensor.layout, type(tensor).__name__)
        known = _TYPES.of[node] = (tensor, kind)
    return (known[1], tensor.requires_grad)


_TYPES = Facts[tuple[torch.Tensor, Hashable]]()


def _reorder(graph: Graph, order: Sequence[Node]) -> None:
    """Put the graph's nodes (all but the output) into `order`."""
    last: Node | None = None
    for node in order:
        if last is not None and last.next is not node:
            last.append(node)
        last = node


def attempt(editor: Editor, pattern: Any, found: Any) -> Any:
    """Rewrite what was found: the same again if it counts, a Miss if the editor refuses it."""
    try:
        pattern.rewrite(found, editor)
        done = editor.commit()
    except Refused as reason:
        editor.rollback()
        return Miss(str(reason))
    if editor.history is not None:
        editor.history.note(pattern.name(), done.nodes, (*done.made, *done.respelled))
    return found


def record(report: PatternReport, miss: Miss, node: Node, reached: int = OWN) -> None:
    """Count a miss at `node`, which got as far as `reached`."""
    known = report.misses.get(miss.reason)
    if known is None:
        report.miss(miss.reason, node.name, source_line(node), reached)
    else:
        known.again(reached)
