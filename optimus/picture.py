"""A graph before and after its rewrite as one SVG picture, with no part outside the file.

Nodes that do the same with the same (equal operation, shapes and inputs) are one box, with their
number: a model of forty towers is drawn as one. Time runs downwards; parameters are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from torch.fx import Graph, Node

from optimus.history import source_line
from optimus.listing import is_part, is_state, name_of, operation, shown, type_of

LETTER, HEIGHT, PADDING = 7.3, 36.0, 8.0
ROW_GAP, BOX_GAP, MARGIN = 26.0, 14.0, 24.0
WIDEST_ROW = 900.0
NARROWEST_HALF = 300.0
TOP = 70.0
FILLS = {"": "#f4f6f8", "input": "#ffffff", "taken": "#ffd9b3", "made": "#c8ecc9"}


@dataclass
class Box:
    """Nodes that are drawn as one. `layer`: the longest way to it from any input, in boxes."""

    index: int
    title: str
    kind: str
    fill: str
    layer: int
    inputs: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list[Node])
    x: float = 0.0
    y: float = 0.0

    @property
    def lines(self) -> tuple[str, str]:
        """What it says: the operation and how many there are; the shape."""
        times = f" x {len(self.nodes)}" if len(self.nodes) > 1 else ""
        return self.title + times, self.kind

    @property
    def width(self) -> float:
        """In pixels."""
        return LETTER * max(map(len, self.lines)) + 2 * PADDING


def picture(
    title: str, before: Graph, taken: Collection[str], after: Graph, made: Collection[str]
) -> str:
    """Both graphs side by side; nodes named in `taken` and `made` are coloured."""
    left, right = boxes(before, taken, "taken"), boxes(after, made, "made")
    middle = place(left, MARGIN) + 2 * MARGIN
    width = max(place(right, middle) + MARGIN, 560.0)
    height = max((box.y + HEIGHT for box in (*left, *right)), default=TOP) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        _text(MARGIN, 22, title, "font-size='15' font-weight='bold'"),
        *_heading(MARGIN, "before", before, "taken", "taken over"),
        *_heading(middle, "after", after, "made", "made by it"),
        *(line for half in (left, right) for line in _edges(half)),
        *(line for half in (left, right) for box in half for line in _drawn(box)),
        "</svg>",
    ]
    return "\n".join(parts)


def boxes(graph: Graph, marked: Collection[str], fill: str) -> list[Box]:
    """The boxes that stand for `graph`, inputs first."""
    found: dict[object, Box] = {}
    box_of: dict[Node, Box] = {}
    for node in filter(shown, graph.nodes):
        sources = [box_of[source] for source in _sources(node)]
        inputs = tuple(dict.fromkeys(source.index for source in sources))
        colour = fill if node.name in marked else "input" if node.op == "placeholder" else ""
        title = {"placeholder": "input", "output": "output"}.get(node.op) or operation(node)
        key = (title, type_of(node), colour, inputs)
        if key not in found:
            layer = 1 + max((source.layer for source in sources), default=-1)
            found[key] = Box(len(found), title, type_of(node), colour, layer, inputs)
        found[key].nodes.append(node)
        box_of[node] = found[key]
    made = list(found.values())
    _bring_near(made)
    return made


def _bring_near(found: Sequence[Box]) -> None:
    """Move what depends on parameters alone down to where it is read."""
    constant: set[int] = set()
    readers: dict[int, list[Box]] = {}
    for box in found:
        if box.title != "input" and constant.issuperset(box.inputs):
            constant.add(box.index)
        for source in box.inputs:
            readers.setdefault(source, []).append(box)
    for box in reversed(found):
        if box.index in constant and box.index in readers:
            box.layer = min(reader.layer for reader in readers[box.index]) - 1


def _sources(node: Node) -> Iterator[Node]:
    """The steps whose results `node` reads, through tuples."""
    for source in node.all_input_nodes:
        if is_part(source):
            yield from _sources(source)
        elif not is_state(source):
            yield source


def place(found: Sequence[Box], left: float) -> float:
    """Give every box its place, the leftmost at `left`; where the right end is.

    Layer below layer; a box stands near the middle of those that it reads, and a layer that is too
    wide goes on in a second row.
    """
    y, widest = TOP, NARROWEST_HALF
    rows: list[list[Box]] = []
    for number in range(max((box.layer for box in found), default=-1) + 1):
        layer = [box for box in found if box.layer == number]
        layer.sort(key=lambda box: _wanted(box, found))
        for row in _rows(layer):
            x = left
            for box in row:
                box.x, box.y = x, y
                x += box.width + BOX_GAP
            widest = max(widest, x - BOX_GAP - left)
            y += HEIGHT + ROW_GAP
            rows.append(row)
    for row in rows:  # in the middle of the widest
        shift = (widest - (row[-1].x + row[-1].width - left)) / 2
        for box in row:
            box.x += shift
    return left + widest


def _wanted(box: Box, found: Sequence[Box]) -> float:
    centres = [found[i].x + found[i].width / 2 for i in box.inputs]
    return sum(centres) / len(centres) if centres else 0.0


def _rows(layer: Iterable[Box]) -> Iterator[list[Box]]:
    row: list[Box] = []
    for box in layer:
        if row and sum(b.width + BOX_GAP for b in row) + box.width > WIDEST_ROW:
            yield row
            row = []
        row.append(box)
    if row:
        yield row


def _heading(x: float, title: str, graph: Graph, fill: str, words: str) -> Iterator[str]:
    steps = sum(1 for node in graph.nodes if node.op.startswith("call") and shown(node))
    yield _text(x, 48, f"{title}: {steps} calls", "font-weight='bold'")
    at = x + LETTER * 22
    yield f'<rect x="{at:.0f}" y="38" width="12" height="12" fill="{FILLS[fill]}" stroke="#888"/>'
    yield _text(at + 18, 48, words)


def _edges(found: Sequence[Box]) -> Iterator[str]:
    for box in found:
        x2, y2 = box.x + box.width / 2, box.y
        for source in (found[i] for i in box.inputs):
            x1, y1 = source.x + source.width / 2, source.y + HEIGHT
            bend = max((y2 - y1) / 2, 10.0)
            yield (
                f'<path d="M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} '
                f'{x2:.0f} {y2:.0f}" fill="none" stroke="#9aa5b1"/>'
            )


def _drawn(box: Box) -> Iterator[str]:
    title, kind = box.lines
    yield (
        f'<g><title>{escape(_tip(box))}</title><rect x="{box.x:.0f}" y="{box.y:.0f}" '
        f'width="{box.width:.0f}" height="{HEIGHT:.0f}" rx="4" fill="{FILLS[box.fill]}" '
        'stroke="#5c6773"/>'
    )
    yield _text(box.x + PADDING, box.y + 15, title, "font-weight='bold'")
    yield _text(box.x + PADDING, box.y + 29, kind, "fill='#444'") + "</g>"


def _tip(box: Box) -> str:
    """What is shown when the mouse rests on a box: names and lines of the first few nodes."""
    shown_nodes = box.nodes[:12]
    lines = [f"{name_of(node)}  {source_line(node)}".strip() for node in shown_nodes]
    more = len(box.nodes) - len(shown_nodes)
    return "\n".join([*lines, f"and {more} more"] if more else lines)


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(words)}</text>'
