"""The summary as one self-contained HTML page: no scripts, nothing loaded from outside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from optimus.charts import Bar, Series, bars, short, timeline

MIB = 2**20

STYLE = """
:root { color-scheme: light dark; --fg: #1c2330; --soft: #667085; --line: #d9dee7; --bg: #fff;
  --baseline: #8a94a6; --optimised: #1769e0; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6e9ef; --soft: #98a2b3; --line: #364052;
  --bg: #12161d; --baseline: #8a94a6; --optimised: #5aa2ff; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, dd { margin: .2rem 0; } .soft, dt { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.2rem 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .7rem 1rem; flex: 1 1 13rem; }
.card b { display: block; font-size: 1.6rem; } .card.none b { color: var(--soft); }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: var(--soft); } svg text.value { fill: var(--fg); }
svg .grid { stroke: var(--line); } svg .mark { stroke: var(--soft); stroke-dasharray: 4 3; }
svg g polyline { fill: none; stroke-width: 1.8; } svg g line { opacity: .35; }
svg g.baseline { stroke: var(--baseline); } svg g.optimised { stroke: var(--optimised); }
svg g.baseline circle, svg rect.baseline { fill: var(--baseline); }
svg g.optimised circle, svg rect.optimised { fill: var(--optimised); }
svg .whisker { stroke: var(--fg); stroke-width: 2; opacity: .55; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; } .remark { color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; } dt, dd { margin: 0; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""


def page(summary: Mapping[str, Any]) -> str:
    """The HTML of a summary as `optimus.summary.collect` gives it."""
    title = f"Optimus: {summary['model']}"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{escape(summary["status"])} after {summary["steps"]} training '
            f"batches, {escape(summary['written'])}</p>",
            _cards(summary),
            _section("Throughput", _throughput(summary)),
            _section("Over the run", _over_the_run(summary)),
            _section("Peak memory", _memory(summary)),
            _section("Phases", _phases(summary["phases"])),
            _section("Patterns", _patterns(summary["patterns"])),
            _section("Graphs", _graphs(summary["graphs"])),
            _section("Remarks", _remarks(summary["remarks"])),
            _section("Run", _run(summary)),
        ]
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        '</title><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _name(phase: Mapping[str, Any]) -> str:
    if phase["name"] == "baseline":
        return "baseline"
    return "Optimus" if phase["runs"].startswith("Optimus") else "no pattern"


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}" if content else ""


def _cards(summary: Mapping[str, Any]) -> str:
    gain, phases = summary["gain"], summary["phases"]
    phase = phases.get("optimised") or phases.get("baseline") or {}
    rate = phase.get("rate")
    cards = [
        _card("samples a second", short(rate) if rate else None, phase.get("runs", "")),
        _card(
            "throughput gain",
            _percent(gain["qps"]),
            gain["qps_note"] or "; ".join(["over the baseline", *gain["doubts"]]),
        ),
        _card(
            "peak memory saved",
            _percent(gain["peak_memory"]),
            gain["memory_note"] or "of the baseline's",
        ),
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(label: str, value: str | None, note: str) -> str:
    css = "card" if value else "card none"
    return (
        f'<div class="{css}">{label}<b>{value or "not measured"}</b>'
        f'<span class="soft">{escape(note)}</span></div>'
    )


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:+.1%}"


def _throughput(summary: Mapping[str, Any]) -> str:
    entries: list[Bar] = []
    for name, phase in summary["phases"].items():
        if phase["rates"]:
            low, _, high = phase["rates"]
            text = f"{short(phase['rate'])} {phase['unit']}"
            entries.append(Bar(_name(phase), name, phase["rate"], text, low, high))
    chart = bars(entries, "samples a second by phase")
    note = "Median of the windows; the line is their 10th to 90th percentile."
    return f'{chart}<p class="soft">{note}</p>' if chart else ""


def _over_the_run(summary: Mapping[str, Any]) -> str:
    series = [
        Series(
            _name(phase),
            name,
            [
                (
                    w["first_step"],
                    w["samples"] / w["seconds"],
                    w["step_rates"][0],
                    w["step_rates"][2],
                )
                for w in phase["windows"]
            ],
        )
        for name, phase in summary["phases"].items()
    ]
    units = {phase["unit"] for phase in summary["phases"].values()}
    return timeline(series, summary["takeover_step"], "training batch", " or ".join(sorted(units)))


def _memory(summary: Mapping[str, Any]) -> str:
    entries = [
        Bar(f"{_name(phase)}, {kind}", name, size / MIB, f"{size / MIB:,.1f} MiB")
        for name, phase in summary["phases"].items()
        for kind, size in phase["peak_memory"].items()
    ]
    notes = sorted({p["memory_note"] for p in summary["phases"].values()})
    return bars(entries, "peak memory by phase") + _paragraphs(notes)


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f'<p class="soft">{escape(t[:1].upper() + t[1:])}.</p>' for t in texts if t)


def _phases(phases: Mapping[str, Any]) -> str:
    rows = [
        [
            _name(phase),
            phase["runs"],
            phase["source"],
            _number(phase["steps"]),
            _number(phase["windows_measured"]),
            _number(phase["step_ms"], ".3g"),
            _number(phase["kernels_per_step"]) or "not counted",
            _number(phase["graphs"]),
            _number(phase["recompiles"]),
            _number(phase["compile_seconds"], ".1f"),
        ]
        for name, phase in phases.items()
    ]
    head = (
        "phase|runs|source|steps|windows|ms a step|kernels a step|graphs|recompiles|compile seconds"
    )
    notes = sorted({phase["kernels_note"] for phase in phases.values()})
    return _table(head.split("|"), rows, numbers_from=3) + _paragraphs(notes)


def _patterns(patterns: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            p["name"],
            p["family"],
            _number(p["anchors"]),
            _number(p["fired"]),
            f"{p['nodes_after'] - p['nodes_before']:+d}",
            _number(p["seconds"], ".3f"),
            "; ".join([*_needs(p), *(f"{m['reason']} ({m['count']})" for m in _by_count(p))]),
        ]
        for p in patterns
        if _has_row(p)
    ]
    head = ["pattern", "family", "anchors", "fired", "nodes", "seconds", "missed because"]
    idle = [p["name"] for p in patterns if not _has_row(p)]
    note = f"nothing to look at for: {', '.join(idle)}" if idle else ""
    return _table(head, rows, numbers_from=2, numbers_to=6) + _paragraphs([note])


def _has_row(pattern: Mapping[str, Any]) -> bool:
    return bool(pattern["anchors"] or pattern["fired"] or pattern["lacks"])


def _needs(pattern: Mapping[str, Any]) -> list[str]:
    return [f"needs {', '.join(pattern['lacks'])}, not selected"] if pattern["lacks"] else []


def _by_count(pattern: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(pattern["misses"].values(), key=lambda m: -m["count"])


def _graphs(graphs: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            str(g["index"]),
            _number(g["nodes_before"]),
            _number(g["nodes_after"]),
            _number(g["rewrite_seconds"], ".3f"),
            _number(g["compile_seconds"], ".2f"),
            g["fallback"],
        ]
        for g in graphs
    ]
    head = ["graph", "nodes before", "nodes after", "rewriting, s", "compiling, s", "fallback"]
    return _table(head, rows, numbers_from=0, numbers_to=5)


def _remarks(remarks: Sequence[str]) -> str:
    items = "".join(f'<li class="remark">{escape(r)}</li>' for r in remarks)
    return f"<ul>{items}</ul>" if items else ""


def _run(summary: Mapping[str, Any]) -> str:
    given = {k: v for k, v in summary["settings"].items() if v not in (None, [], {})}
    devices = {f"{p['device']} x {p['world_size']}" for p in summary["phases"].values()}
    entries = {
        "targets": ", ".join(summary["targets"]) or "none",
        "device": ", ".join(sorted(devices)),
        "settings": json.dumps(given),
        **summary["environment"],
    }
    items = (f"<dt>{escape(k)}</dt><dd><code>{escape(v)}</code></dd>" for k, v in entries.items())
    return f"<dl>{''.join(items)}</dl>"


def _number(value: float | None, form: str = ",d") -> str:
    return "" if value is None else format(value, form)


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int, numbers_to: int = 99
) -> str:
    if not rows:
        return ""

    def cell(tag: str, index: int, text: str) -> str:
        css = ' class="n"' if numbers_from <= index < numbers_to else ""
        return f"<{tag}{css}>{escape(text)}</{tag}>"

    def line(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, i, text) for i, text in enumerate(cells))}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="wide"><table>{line("th", head)}{body}</table></div>'
