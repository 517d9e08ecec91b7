"""What became of which node, noted rewrite by rewrite where somebody wants it explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Event:
    """One rewrite: the pattern, names of the nodes it took over, and the first one's line."""

    pattern: str
    taken: tuple[str, ...]
    source: str


class History:
    """All rewrites of one graph.

    Names identify nodes: a graph gives none twice. A node that was not rewritten is its own origin.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._origins: dict[str, frozenset[str]] = {}
        self._makers: dict[str, frozenset[str]] = {}

    def note(self, pattern: str, taken: Sequence[Node], made: Iterable[Node]) -> None:
        """`pattern` put `made` in the place of `taken`."""
        names = tuple(node.name for node in taken)
        self.events.append(Event(pattern, names, source_line(taken[0])))
        origins = frozenset[str]().union(*map(self._origins_of, names))
        makers = frozenset((pattern,)).union(*map(self.makers, names))
        for node in made:
            self._origins[node.name] = origins
            self._makers[node.name] = makers

    def makers(self, name: str) -> frozenset[str]:
        """The patterns that had a part in making node `name`."""
        return self._makers.get(name, frozenset())

    def taken_by(self, pattern: str) -> frozenset[str]:
        """Names of the nodes, of the graph as it was at first, that `pattern` took over."""
        taken = (name for event in self.events if event.pattern == pattern for name in event.taken)
        return frozenset[str]().union(*map(self._origins_of, taken))

    def _origins_of(self, name: str) -> frozenset[str]:
        return self._origins.get(name, frozenset((name,)))


def source_line(node: Node) -> str:
    """The line of the user's program that the node comes from, as `file:line: code`."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith("File ") and "site-packages/torch/" not in lines[at]:
            path, line = lines[at].split(",")[:2]
            code = lines[at + 1] if at + 1 < len(lines) else ""
            return f"{path[5:].strip().strip(chr(34))}:{line.split()[-1]}: {code}"
    return ""
