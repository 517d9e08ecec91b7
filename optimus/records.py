"""What a run did to its graphs: per pattern what was seen, what fired, what was missed and why.

Everything a user reads about a rewrite (the table at fit start, the summary file, `explain`) comes
from these records; patterns themselves never count or log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OWN, ALONE, APART, REFUSED = range(4)
"""How far a miss got. A condition of the pattern's own did not hold; nothing else is like it; other
nodes are, but do not lie beside it; there was a match, but the engine could not show that it is
safe."""

NOT_FASTER, UNMEASURED = "no faster here", "the kernel cannot be measured"
"""How the reason of a miss begins where a measurement decided, and where none could be made."""


@dataclass
class MissRecord:
    """Why anchors of one pattern did not fire: one record a reason.

    `example` is the name of the first node that missed for this reason and `source` the line of the
    user's program it came from (empty when the graph carries no stack traces). `reached`: how far
    it got, OWN to REFUSED.
    """

    reason: str
    count: int = 0
    example: str = ""
    source: str = ""
    reached: int = OWN

    def again(self, reached: int) -> None:
        """Count one more anchor that missed for this reason."""
        self.count += 1
        self.reached = max(self.reached, reached)

    @property
    def measured(self) -> bool:
        """Whether everything held but the gain, which was measured, or was to be."""
        return self.reason.startswith((NOT_FASTER, UNMEASURED))

    @property
    def where(self) -> str:
        """The example, with its line."""
        return f"{self.example}, {self.source}" if self.source else self.example


@dataclass
class PatternReport:
    """One pattern on one graph. `nodes_before`/`nodes_after` count the graph around its run.

    `lacks`: patterns that it needs (`Rewrite.needs`), where they are not selected and it never
    fired.
    """

    name: str
    family: str
    anchors: int = 0
    fired: int = 0
    misses: dict[str, MissRecord] = field(default_factory=dict[str, MissRecord])
    nodes_before: int = 0
    nodes_after: int = 0
    seconds: float = 0.0
    lacks: tuple[str, ...] = ()

    def miss(self, reason: str, example: str = "", source: str = "", reached: int = OWN) -> None:
        """Count one anchor that missed; the first one of a reason is kept as its example."""
        record = self.misses.get(reason)
        if record is None:
            record = self.misses[reason] = MissRecord(reason, 0, example, source)
        record.again(reached)

    @property
    def worth_a_row(self) -> bool:
        """Whether it did something, or would have but for a measurement or another pattern."""
        return bool(self.fired or self.lacks or any(m.measured for m in self.misses.values()))

    def sorted_misses(self) -> list[MissRecord]:
        """The nearest miss first: those that got furthest, and of these the rarest."""
        return sorted(self.misses.values(), key=lambda m: (-m.reached, m.count))


@dataclass
class GraphReport:
    """One compiled graph.

    `fallback` is empty when the rewritten graph runs; otherwise it says what runs instead and why.
    `verified` tells whether it was run beside the original, `dropped` which patterns failed there
    and how, `approximated` what approximate patterns cost in accuracy, `broken` which made a graph
    that cannot be used and the error; `dropped` and `broken` are left out of the graph that runs.
    `rewrite_seconds` is the time spent in Optimus, `compile_seconds` that of the inner compiler.
    """

    index: int
    nodes_before: int = 0
    nodes_after: int = 0
    rewrite_seconds: float = 0.0
    compile_seconds: float = 0.0
    fallback: str = ""
    verified: str = ""
    dropped: dict[str, str] = field(default_factory=dict[str, str])
    broken: dict[str, str] = field(default_factory=dict[str, str])
    approximated: dict[str, str] = field(default_factory=dict[str, str])
    patterns: list[PatternReport] = field(default_factory=list[PatternReport])

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the patterns that were selected and left out of the graph that runs."""
        return (*self.broken, *self.dropped)

    @property
    def fired(self) -> int:
        """Rewrites made on this graph, over all patterns."""
        return sum(p.fired for p in self.patterns)


@dataclass(frozen=True)
class Explanation:
    """What one pattern did to one graph, for people: `text`, and `picture`, an SVG document."""

    pattern: str
    graph: int
    text: str
    picture: str


@dataclass
class Report:
    """All graphs that one backend compiled, in order. Printed, it says all there is to say.

    `explanations`: of the patterns that `explain=` named.
    """

    graphs: list[GraphReport] = field(default_factory=list[GraphReport])
    explanations: list[Explanation] = field(default_factory=list[Explanation])

    def drop_last(self) -> None:
        """Forget the last graph, which is to be compiled anew."""
        graph = self.graphs.pop().index
        self.explanations[:] = [e for e in self.explanations if e.graph != graph]

    def totals(self) -> list[PatternReport]:
        """Per-pattern sums over the graphs, in pipeline order."""
        merged: dict[str, PatternReport] = {}
        for pattern in self._patterns():
            total = merged.setdefault(pattern.name, PatternReport(pattern.name, pattern.family))
            _add(total, pattern)
        return list(merged.values())

    def fired(self, name: str) -> int:
        """How often pattern `name` fired, over all graphs."""
        return sum(p.fired for p in self._patterns() if p.name == name)

    def explain(self, name: str) -> str:
        """What pattern `name` did, graph by graph. Raises ValueError if that was not recorded."""
        found = [e.text for e in self.explanations if e.pattern == name]
        if not found:
            known = ", ".join(dict.fromkeys(e.pattern for e in self.explanations)) or "none"
            raise ValueError(
                f"{name!r} was not to be explained: compile with explain={name!r} (known: {known})"
            )
        return "\n\n".join(found)

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph has been compiled yet"
        return "\n\n".join("\n".join(_graph_lines(graph)) for graph in self.graphs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"graphs": [asdict(g) for g in self.graphs]}

    def table(self, elsewhere: str = "print the report, or compile with explain=NAME") -> str:
        """The short form: a row for each pattern that fired, then for each that a measurement or a
        missing pattern kept from it, what is left out, and how many there are besides.

        `elsewhere`: where to read of the others.
        """
        totals = self.totals()
        shown = sorted((p for p in totals if p.worth_a_row), key=lambda p: not p.fired)
        lines = _table(shown) if shown else []
        lines += [note for graph in self.graphs for note in _notes(graph)]
        if others := len(totals) - len(shown):
            more = f"{others} {'more ' if shown else ''}pattern{'s' if others > 1 else ''}"
            lines.append(f"{more} fired nowhere: {elsewhere}")
        return "\n".join(lines)

    def _patterns(self) -> Iterator[PatternReport]:
        return (p for g in self.graphs for p in g.patterns)


def _graph_lines(graph: GraphReport) -> Iterator[str]:
    yield (
        f"graph {graph.index}: {graph.nodes_before} nodes became {graph.nodes_after}, "
        f"{graph.fired} rewrites in {graph.rewrite_seconds:.2f} s"
        + (f", {graph.verified}" if graph.verified else "")
    )
    yield from (f"  {note.split(': ', 1)[1]}" for note in _notes(graph))
    for pattern in graph.patterns:
        if pattern.anchors or pattern.fired or pattern.lacks:
            yield from (f"  {line}" for line in pattern_lines(pattern))
    idle = [p.name for p in graph.patterns if not (p.anchors or p.fired or p.lacks)]
    if idle:
        yield f"  nothing to look at for: {', '.join(idle)}"


def pattern_lines(pattern: PatternReport) -> Iterator[str]:
    """What one pattern saw, did and missed, the nearest miss first."""
    yield f"{pattern.name}: {pattern.anchors} anchors, fired {pattern.fired}{_lacking(pattern)}"
    for at, miss in enumerate(pattern.sorted_misses()):
        nearest = "nearest miss: " if at == 0 and len(pattern.misses) > 1 else ""
        yield f"    {miss.count:>5} missed  {nearest}{miss.reason}"
        if miss.example:
            yield f"                  e.g. {miss.where}"


def _lacking(pattern: PatternReport) -> str:
    return f": needs {', '.join(pattern.lacks)}, not selected" if pattern.lacks else ""


def _notes(graph: GraphReport) -> Iterator[str]:
    for name, difference in graph.dropped.items():
        yield f"graph {graph.index}: {name} is left out, it changed the result: {difference}"
    for name, error in graph.broken.items():
        yield f"graph {graph.index}: {name} is left out, it broke the graph: {error}"
    for name, accuracy in graph.approximated.items():
        yield f"graph {graph.index}: {name} is approximate: {accuracy}"
    if graph.fallback:
        yield f"graph {graph.index}: {graph.fallback}"


_HEADER = ("pattern", "family", "anchors", "fired", "nodes", "seconds", "missed because")


def _add(total: PatternReport, part: PatternReport) -> None:
    total.anchors += part.anchors
    total.fired += part.fired
    total.nodes_before += part.nodes_before
    total.nodes_after += part.nodes_after
    total.seconds += part.seconds
    for record in part.misses.values():
        kept = total.misses.setdefault(
            record.reason, MissRecord(record.reason, 0, record.example, record.source)
        )
        kept.count += record.count
        kept.reached = max(kept.reached, record.reached)
    total.lacks = () if total.fired else tuple(dict.fromkeys((*total.lacks, *part.lacks)))


def _table(patterns: Sequence[PatternReport]) -> list[str]:
    rows = [_HEADER, *map(_row, patterns)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER) - 1)]
    lines = [_line(row, widths) for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _row(pattern: PatternReport) -> tuple[str, ...]:
    misses = sorted(pattern.misses.values(), key=lambda m: (not m.measured, -m.count))
    reasons = [f"{m.reason} ({m.count})" for m in misses[:3]]
    return (
        pattern.name,
        pattern.family,
        str(pattern.anchors),
        str(pattern.fired),
        f"{pattern.nodes_after - pattern.nodes_before:+d}",
        f"{pattern.seconds:.3f}",
        "; ".join([_lacking(pattern).removeprefix(": "), *reasons][not pattern.lacks :]),
    )


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
    return "  ".join([*cells, row[-1]]).rstrip()
