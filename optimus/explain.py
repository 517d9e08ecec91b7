"""What one pattern did to one graph, told for people: `explain=` of the backend and the callback.

The text says where it fired, why it did not elsewhere, what it would have needed, and shows the
graph before and after; the picture shows the same graph, with what the pattern took over and made.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.fx import GraphModule

from optimus.driver import copy_graph_module, rewrite
from optimus.history import Event, History
from optimus.listing import listing
from optimus.needs import needed
from optimus.pattern import Rewrite
from optimus.picture import picture
from optimus.pipeline import Selection, named, patterns_by_name
from optimus.records import Explanation, GraphReport, PatternReport, Report, pattern_lines

FILE_STEM = "optimus_explain"


def names_to_explain(words: str | Sequence[str] | None) -> tuple[str, ...]:
    """The patterns that `explain=` names, one or several; PyTorch's names are understood, too.

    Raises ValueError naming the nearest valid names for an unknown one.
    """
    several = [words] if isinstance(words, str) else words or []
    return tuple(dict.fromkeys(name for word in several for name in named(word)))


@dataclass(frozen=True)
class Case:
    """One graph that was compiled: as captured and as it runs, what was selected and what happened.

    `everything`: all patterns that there are, with the user's knobs.
    """

    before: GraphModule
    after: GraphModule
    selection: Selection
    everything: Selection
    history: History
    report: GraphReport


def explain(name: str, case: Case) -> Explanation:
    """Explain pattern `name` on a graph."""
    taken = case.history.taken_by(name)
    nodes = [node.name for node in case.after.graph.nodes]
    made = {node for node in nodes if name in case.history.makers(node)}
    lines = [*_verdict(name, case), "", *_graphs(case, taken, made)]
    title = f"{name}, graph {case.report.index}"
    drawn = picture(title, case.before.graph, taken, case.after.graph, made)
    return Explanation(name, case.report.index, "\n".join(lines), drawn)


def write_explanations(report: Report, directory: Path) -> list[Path]:
    """Write what was to be explained, a text for each pattern and a picture for each graph.

    Returns the files, none where nothing was asked for. Raises OSError when one cannot be written.
    """
    written: list[Path] = []
    for name in dict.fromkeys(e.pattern for e in report.explanations):
        text = directory / f"{FILE_STEM}_{name}.txt"
        directory.mkdir(parents=True, exist_ok=True)
        text.write_text(report.explain(name) + "\n", encoding="utf-8")
        written.append(text)
        for each in report.explanations:
            if each.pattern == name:
                drawing = directory / f"{FILE_STEM}_{name}_{each.graph}.svg"
                drawing.write_text(each.picture, encoding="utf-8")
                written.append(drawing)
    return written


def _verdict(name: str, case: Case) -> Iterator[str]:
    pattern = patterns_by_name()[name]
    yield f"{name} ({pattern.family}), graph {case.report.index}"
    yield summary_of(pattern)
    yield ""
    record = next((p for p in case.report.patterns if p.name == name), None)
    if record is None:
        record = PatternReport(name, pattern.family)
    yield from _standing(name, case)
    events = [event for event in case.history.events if event.pattern == name]
    yield from pattern_lines(record)
    yield from _places(events)
    if not record.fired:
        yield f"fired 0: {_wanting(name, case)}"


def _standing(name: str, case: Case) -> Iterator[str]:
    if name not in case.selection.names:
        yield "it is not selected"
    if name in case.report.dropped:
        yield f"it is left out, it changed the result: {case.report.dropped[name]}"
    if name in case.report.broken:
        yield f"it is left out, it broke the graph: {case.report.broken[name]}"
    if case.report.fallback:
        yield case.report.fallback


def _places(events: Sequence[Event]) -> Iterator[str]:
    """Where it fired, the places with the most rewrites first."""
    times = Counter(event.source for event in events)
    for source, count in times.most_common():
        sizes = sorted({len(e.taken) for e in events if e.source == source})
        nodes = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
        first = next(e for e in events if e.source == source)
        more = ", ..." if len(first.taken) > 4 else ""
        where = f" at {source}" if source else ""
        yield f"    {count:>5} fired   {nodes} nodes each{where}"
        yield f"                  e.g. {', '.join(first.taken[:4])}{more}"


def _wanting(name: str, case: Case) -> str:
    """What the pattern needs to fire on this graph, found by trying."""
    selected = (set(case.selection.names) - set(case.report.left_out)) | {name}
    others = [n for n in case.everything.names if n not in selected]

    def fires(also: Sequence[str]) -> int:
        trial = case.everything.without([n for n in others if n not in also])
        try:
            reports = rewrite(copy_graph_module(case.before), trial.phases)
        except Exception:  # what cannot be rewritten so does not fire so
            return 0
        return sum(p.fired for p in reports if p.name == name)

    alone = fires(())
    if alone:
        return f"selected as well, it would fire {alone} times"
    found = needed(fires, others)
    if found is None:
        return "selecting more patterns would not make it fire on this graph"
    return f"needs {', '.join(found)}, not selected; with that it fires {fires(found)} times"


def _graphs(case: Case, taken: frozenset[str], made: set[str]) -> Iterator[str]:
    yield f"before, as captured (- taken over by it): {len(case.before.graph.nodes)} nodes"
    yield listing(case.before.graph, taken, "-")
    yield ""
    if case.after is case.before:
        yield "after: the graph runs as it was captured"
        return
    count = len(case.after.graph.nodes)
    yield f"after all patterns (+ made by it, or from what it made): {count} nodes"
    yield listing(case.after.graph, made, "+")


def text_of(pattern: Rewrite) -> str:
    """What a pattern's class says about it or, where that refers to it or is silent, its file."""
    own = type(pattern).__doc__ or ""
    silent = own.startswith((f"{type(pattern).__name__}(", "See the module"))
    module = sys.modules.get(type(pattern).__module__)
    return (getattr(module, "__doc__", None) or "" if silent else own).strip()


def summary_of(pattern: Rewrite) -> str:
    """The first paragraph of a pattern's text, in one line."""
    return " ".join(text_of(pattern).split("\n\n")[0].split())
