"""Small charts as inline SVG, drawn from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 14, 40


@dataclass(frozen=True)
class Series:
    """Points of one colour class: (x, y, lowest y, highest y)."""

    label: str
    css: str
    points: Sequence[tuple[float, float, float, float]]


@dataclass(frozen=True)
class Bar:
    """One horizontal bar with its whisker from `low` to `high`, and the text beside it."""

    label: str
    css: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


def short(value: float) -> str:
    """A number in at most four digits: 950, 12.3k, 4.5M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def ticks(highest: float) -> list[float]:
    """Round values from 0 up to the first one that is not below `highest`: three to six of them."""
    if highest <= 0:
        return [0.0, 1.0]
    magnitude = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= highest / 4)
    return [i * step for i in range(math.ceil(highest / step) + 1)]


def timeline(series: Sequence[Series], mark: float | None, x_label: str, y_label: str) -> str:
    """Lines with their spread over x, and a vertical line at `mark`. Both axes begin at zero."""
    points = [p for s in series for p in s.points]
    if not points:
        return ""
    right = max(*(p[0] for p in points), mark or 0) or 1
    levels = ticks(max(p[3] for p in points))

    def x(value: float) -> float:
        return LEFT + value / right * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / levels[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(levels, y), _axis_labels(x_label, y_label, right)]
    for one in series:
        spread = "".join(
            f'<line x1="{x(p[0]):.1f}" x2="{x(p[0]):.1f}" y1="{y(p[2]):.1f}" y2="{y(p[3]):.1f}"/>'
            for p in one.points
        )
        path = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in one.points)
        dots = "".join(
            f'<circle cx="{x(p[0]):.1f}" cy="{y(p[1]):.1f}" r="2.6">'
            f"<title>{escape(one.label)}, step {p[0]:.0f}: {short(p[1])}</title></circle>"
            for p in one.points
        )
        parts.append(f'<g class="{one.css}">{spread}<polyline points="{path}"/>{dots}</g>')
    if mark:
        parts.append(
            f'<line class="mark" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP}" '
            f'y2="{HEIGHT - BOTTOM}"/><text x="{x(mark) + 5:.1f}" y="{TOP + 10}">take-over</text>'
        )
    return _svg(HEIGHT, parts, y_label)


def bars(entries: Sequence[Bar], title: str) -> str:
    """Horizontal bars from zero, one a row."""
    if not entries:
        return ""
    left, row = 120, 42
    highest = max(max(b.value, b.high or 0) for b in entries) or 1
    scale = (WIDTH - left - 150) / highest
    parts: list[str] = []
    for i, bar in enumerate(entries):
        top = 8 + i * row
        end = left + bar.value * scale
        parts.append(
            f'<text x="{left - 8}" y="{top + 18}" text-anchor="end">{escape(bar.label)}</text>'
            f'<rect class="{bar.css}" x="{left}" y="{top}" width="{bar.value * scale:.1f}" '
            'height="26" rx="3"/>'
        )
        if bar.low is not None and bar.high is not None:
            low, high = left + bar.low * scale, left + bar.high * scale
            end = max(end, high)
            parts.append(
                f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" '
                f'y1="{top + 13}" y2="{top + 13}"/>'
            )
        parts.append(f'<text class="value" x="{end + 8:.1f}" y="{top + 18}">{bar.text}</text>')
    return _svg(8 + len(entries) * row, parts, title)


def _grid(levels: Sequence[float], place: Callable[[float], float]) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place(v):.1f}" '
        f'y2="{place(v):.1f}"/><text x="{LEFT - 8}" y="{place(v) + 4:.1f}" '
        f'text-anchor="end">{short(v)}</text>'
        for v in levels
    )


def _axis_labels(x_label: str, y_label: str, right: float) -> str:
    middle = (HEIGHT - BOTTOM + TOP) / 2
    return (
        f'<text x="{LEFT}" y="{HEIGHT - 20}">0</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 20}" text-anchor="end">{short(right)}</text>'
        f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
