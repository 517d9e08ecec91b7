"""Bar charts of the rows of `benchmarks.step`: milliseconds a step, one panel a model and batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.rows import Row, speed_ups

_COLOURS = {"optimus": "tab:green", "fused": "tab:gray", "upstream": "tab:orange"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG. Bars end with the speed-up over plain compile; hatched ones are wrong."""
    timed = [(i, row) for i, row in enumerate(rows) if row.ms > 0]
    panels = list(dict.fromkeys((row.model, row.batch) for _, row in timed))
    if not panels:
        return
    gains = speed_ups(rows)
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(6 * columns, 4.5 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):
        mine = [(row, gains.get(i)) for i, row in timed if (row.model, row.batch) == panel]
        _panel(axis, mine)
        axis.set_title(f"{panel[0]}, batch {panel[1]}")
    for axis in list(figure.axes)[len(panels) :]:
        axis.set_axis_off()
    first = rows[0]
    figure.suptitle(f"{first.gpu}, torch {first.torch}, {first.commit}, {first.date}")
    figure.savefig(path, dpi=110)


def _panel(axis: Any, rows: Sequence[tuple[Row, float | None]]) -> None:
    names = [row.provider for row, _ in rows]
    bars = axis.barh(
        names,
        [row.ms for row, _ in rows],
        xerr=[
            [max(0.0, row.ms - row.ms_p10) for row, _ in rows],
            [max(0.0, row.ms_p90 - row.ms) for row, _ in rows],
        ],
        color=[_colour(row.provider) for row, _ in rows],
        hatch=["" if row.is_right else "///" for row, _ in rows],
    )
    labels = ["" if gain is None else f" {gain:.2f}x" for _, gain in rows]
    axis.bar_label(bars, labels)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("ms a step (10th to 90th percentile)")


def _colour(provider: str) -> str:
    return _COLOURS.get(provider.split("_", maxsplit=1)[0], "tab:blue")
