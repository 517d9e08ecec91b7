"""What a report keeps and how it reads."""

from __future__ import annotations

import json

import pytest

from optimus.records import (
    ALONE,
    NOT_FASTER,
    OWN,
    REFUSED,
    Explanation,
    GraphReport,
    PatternReport,
    Report,
)


def record(fired: int = 0, lacks: tuple[str, ...] = ()) -> PatternReport:
    made = PatternReport("a_pattern", "vertical", anchors=9, fired=fired, lacks=lacks)
    for _ in range(3):
        made.miss("wrong shape", "node_1", "model.py:3: f(x)", OWN)
    for _ in range(2):
        made.miss("alone", "node_2", "", ALONE)
    made.miss("somebody writes", "node_3", "model.py:7: g(x)", REFUSED)
    made.miss("also wrong", "node_4", "", OWN)
    return made


def test_the_nearest_miss_comes_first() -> None:
    reasons = [miss.reason for miss in record().sorted_misses()]
    assert reasons == ["somebody writes", "alone", "also wrong", "wrong shape"]


def test_the_first_node_of_a_reason_is_its_example() -> None:
    made = record()
    made.miss("alone", "node_9", "model.py:9: h(x)", ALONE)
    assert made.misses["alone"].example == "node_2" and made.misses["alone"].count == 3


def test_text() -> None:
    text = str(Report([GraphReport(0, 20, 12, patterns=[record(fired=2)])]))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0].startswith("graph 0: 20 nodes became 12, 2 rewrites")
    assert lines[1:4] == [
        "a_pattern: 9 anchors, fired 2",
        "1 missed  nearest miss: somebody writes",
        "e.g. node_3, model.py:7: g(x)",
    ]
    assert str(Report()) == "no graph has been compiled yet"


def test_what_is_left_out_is_said() -> None:
    graph = GraphReport(1, dropped={"one": "output 0"}, broken={"two": "KeyError"})
    for text in (str(Report([graph])), Report([graph]).table()):
        assert "one is left out, it changed the result: output 0" in text
        assert "two is left out, it broke the graph: KeyError" in text
    assert graph.left_out == ("two", "one")


def named(name: str, fired: int = 0, **more: object) -> PatternReport:
    return PatternReport(name, "kernels", anchors=2, fired=fired, **more)  # type: ignore[arg-type]


def test_the_short_form_has_what_fired_first_and_counts_what_did_not() -> None:
    gated = named("gated")
    for reason in ("wrong shape", "wrong type", "too wide", f"{NOT_FASTER}: 2 ms against 1 ms"):
        for _ in range(1 if reason.startswith(NOT_FASTER) else 5):
            gated.miss(reason)
    patterns = [named("idle"), gated, named("first", 3), record(), named("last", 1)]
    patterns += [named("lacking", lacks=("another",))]
    graph = GraphReport(0, patterns=patterns, dropped={"wrong": "output 0"})
    _, _, *lines = Report([graph]).table("look there").splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["first", "last", "gated", "lacking"]
    assert f"{NOT_FASTER}: 2 ms against 1 ms (1); wrong shape (5)" in lines[2]
    assert "needs another, not selected" in lines[3]
    assert lines[4:] == [
        "graph 0: wrong is left out, it changed the result: output 0",
        "2 more patterns fired nowhere: look there",
    ]


def test_the_short_form_of_little() -> None:
    only_idle = Report([GraphReport(0, patterns=[named("idle")])])
    assert only_idle.table("look there") == "1 pattern fired nowhere: look there"
    everything = Report([GraphReport(0, patterns=[named("first", 3)])]).table()
    assert "fired nowhere" not in everything
    assert Report([GraphReport(0)]).table() == ""


def test_totals_over_graphs() -> None:
    lacking = GraphReport(0, patterns=[record(lacks=("another",))])
    (total,) = Report([lacking, GraphReport(1, patterns=[record()])]).totals()
    assert (total.anchors, total.misses["alone"].count, total.lacks) == (18, 4, ("another",))
    assert total.sorted_misses()[0].reason == "somebody writes"
    (total,) = Report([lacking, GraphReport(1, patterns=[record(fired=1)])]).totals()
    assert total.fired == 1 and total.lacks == ()


def test_plain_data_and_explanations() -> None:
    report = Report([GraphReport(0, patterns=[record()])], [Explanation("a", 0, "text", "<svg/>")])
    assert "svg" not in json.dumps(report.to_dict())
    assert report.explain("a") == "text"
    with pytest.raises(ValueError, match=r"explain='b' \(known: a\)"):
        report.explain("b")
