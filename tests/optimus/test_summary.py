"""The summary: what is in it, what is said when something could not be measured, and the page."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus import summary
from optimus.charts import Bar, Series, bars, short, ticks, timeline
from optimus.figures import Phase, Window
from optimus.records import PatternReport
from optimus.settings import PhaseName, Settings
from optimus.summary_page import page
from optimus.takeover import Takeover
from tests.optimus.foreign_modules import Regressor


def window(rate: float, step: int, memory: int = 2**20) -> Window:
    return Window.of(step, [100] * 5, [100 / rate] * 5, {"allocated": memory})


def takeover() -> Takeover:
    """A run on a GPU as it stands at its end: 1,000 and 1,630 samples a second."""
    made = Takeover(Settings(inner="eager"), Regressor(), torch.device("cpu"))
    made.step = 100
    measured: dict[PhaseName, tuple[tuple[int, ...], int]] = {
        "baseline": ((990, 1000, 1010), 50),
        "optimised": ((1630,), 9),
    }
    for name, (rates, kernels) in measured.items():
        phase = Phase(name, runs=made.settings.runs(name), device="H200", memory_note="allocator")
        phase.kernels_per_step = kernels
        for i, rate in enumerate(rates):
            phase.add(window(rate, 10 * i if name == "baseline" else 90))
        made.recorder.phases[name] = phase
    return made


class Wellformed(HTMLParser):
    """Checks that every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass


def test_the_page_is_whole_and_well_formed() -> None:
    collected = json.loads(json.dumps(summary.collect(takeover(), "finished")))
    html = page(collected)
    parser = Wellformed()
    parser.feed(html)
    assert parser.open == []
    assert html.count("<svg") == 3
    for text in ("+63.0%", "1.63k samples/s", "Optimus (all)", ">50<", ">9<", "take-over"):
        assert text in html, text


def test_the_page_has_every_pattern_with_its_reasons() -> None:
    collected = summary.collect(takeover(), "finished")
    missed = PatternReport("missed", "vertical", anchors=2, lacks=("another",))
    missed.miss("wrong shape")
    collected["patterns"] = [asdict(missed), asdict(PatternReport("idle", "vertical"))]
    html = page(collected)
    assert "needs another, not selected; wrong shape (1)" in html
    assert "Nothing to look at for: idle." in html


def test_what_users_name_cannot_break_the_page() -> None:
    made = takeover()
    made.note("<script>alert('x')</script> & more")
    html = page(summary.collect(made, "stopped by <b>"))
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "stopped by &lt;b&gt;" in html


def test_a_run_that_measured_nothing_says_so_on_the_page() -> None:
    made = Takeover(Settings(inner="eager"), Regressor(), torch.device("cpu"))
    html = page(summary.collect(made, "stopped by KeyboardInterrupt"))
    assert html.count("not measured") == 3
    assert "no baseline was run" in html
    assert "<svg" not in html


def test_the_headline_is_that_of_the_last_phase() -> None:
    row = summary.headline(summary.collect(takeover(), "finished"))
    assert row["qps_p50"] == pytest.approx(1630)
    assert row["qps_gain"] == pytest.approx(0.63)
    assert row["peak_memory_mib"] == pytest.approx(1.0)
    assert row["kernels_per_step"] == 9
    empty = summary.headline({})
    assert set(empty) == set(row)
    assert set(empty.values()) == {None}


def test_window_metrics_hold_only_what_was_measured() -> None:
    made = takeover()
    made.takeover_step = 80
    first = summary.window_metrics(made, window(1000, 10))
    assert first["qps"] == pytest.approx(1000)
    assert first["optimus/peak_allocated_mib"] == 1.0
    assert first["optimus/kernels_per_step"] == 50
    assert "optimus/qps_gain" not in first
    later = summary.window_metrics(made, window(1630, 90))
    assert later["optimus/qps_gain"] == pytest.approx(0.63)
    assert later["optimus/peak_memory_gain"] == pytest.approx(0.0)
    made.recorder.phases["optimised"].unit = "steps/s"
    assert "qps" not in summary.window_metrics(made, window(1630, 90))


def test_doubts_are_told_wherever_the_gain_is() -> None:
    made = takeover()
    made.takeover_step = 80
    for rate in (1600, 1700, 17000, 17000, 17000):
        made.recorder.phases["optimised"].add(window(rate, 90))
    (doubt,) = made.gain().doubts
    assert doubt.startswith("not to be trusted: windows of the optimised phase differ 10-fold")
    assert f"% ({doubt}), peak memory" in summary.gain_line(made)
    assert summary.window_metrics(made, window(17000, 90))["optimus/qps_gain_doubts"] == 1
    collected = json.loads(json.dumps(summary.collect(made, "finished")))
    assert collected["gain"]["doubts"] == [doubt]
    assert f"over the baseline; {doubt}" in page(collected)


@pytest.mark.parametrize(
    ("memory", "words"),
    [(94, "peak memory 6.0% lower"), (106, "peak memory 6.0% higher"), (100, "the same")],
)
def test_the_gain_line_says_which_way_memory_went(memory: int, words: str) -> None:
    made = takeover()
    for name, used in (("baseline", 100), ("optimised", memory)):
        made.recorder.phases[name].windows = [window(1000, 0, used * 2**20)]  # type: ignore[index]
    assert summary.gain_line(made).endswith(words)


def test_the_gain_line_names_both_figures_and_where_they_come_from() -> None:
    made = takeover()
    made.recorder.phases["baseline"].source = "checkpoint"
    assert summary.gain_line(made) == (
        "1,630 samples/s against 1,000 under torch.compile (eager) (checkpoint): +63.0% "
        "(few windows: 3 and 1; a longer run would tell more), peak memory the same"
    )


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    collected = summary.collect(takeover(), "finished")
    summary.write(collected, tmp_path)
    summary.write(collected | {"status": "again"}, tmp_path)
    assert json.loads((tmp_path / "optimus_summary.json").read_text())["status"] == "again"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "optimus_summary.html",
        "optimus_summary.json",
    ]


@pytest.mark.parametrize(
    ("highest", "expected"),
    [(0.0, [0, 1]), (1.0, [0, 0.25, 0.5, 0.75, 1]), (7.0, [0, 2, 4, 6, 8]), (1e6, [0, 250_000])],
)
def test_ticks_are_round(highest: float, expected: list[float]) -> None:
    made = ticks(highest)
    assert made[: len(expected)] == pytest.approx(expected)
    assert made[-1] >= highest
    assert 2 <= len(made) <= 6


@pytest.mark.parametrize("highest", [0.013, 3.3, 99.0, 1234.0, 5e9])
def test_ticks_cover_any_range_with_few_lines(highest: float) -> None:
    made = ticks(highest)
    assert made[-1] >= highest > made[-2]
    assert 3 <= len(made) <= 6


def test_numbers_are_short() -> None:
    assert [short(v) for v in (0, 0.5, 950, 12_345, 4.56e6, 2e9)] == [
        "0",
        "0.5",
        "950",
        "12.3k",
        "4.56M",
        "2G",
    ]


def test_charts_stay_inside_their_frame() -> None:
    points = [(float(x), 50.0 + x, 40.0, 90.0 + x) for x in range(0, 1000, 10)]
    chart = timeline([Series("a", "baseline", points)], 500, "x", "y")
    for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', chart):
        assert 0 <= float(x) <= 720
        assert 0 <= float(y) <= 260
    chart = bars([Bar("a", "baseline", 5.0, "5", 1.0, 9.0), Bar("b", "optimised", 0.0, "0")], "t")
    assert max(float(x) for x in re.findall(r'x2="([\d.]+)"', chart)) <= 720
    assert bars([], "t") == timeline([], None, "x", "y") == ""
