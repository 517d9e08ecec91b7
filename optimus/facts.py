"""What was read of a graph's nodes, kept for as long as it holds.

Patterns ask the same of the same nodes again and again. `Facts` are kept by node; who reads them
checks in passing that they still hold. `until_change` remembers answers that depend on more than
the node itself; the editor calls `changed` when it has changed any. While a graph is rewritten all
of this lies in plain dictionaries, which are dropped at the end; at any other time facts go with
their nodes, and no answer is remembered.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch.fx import Node

T = TypeVar("T")


class Facts(Generic[T]):
    """One fact for each node that it was read of."""

    of: MutableMapping[Node, T]

    def __init__(self) -> None:
        self.drop()
        _tables.append(self)

    def drop(self) -> None:
        """Forget everything; from now on, what is read goes with its node."""
        self.of = WeakKeyDictionary()

    def keep(self) -> None:
        """Forget everything; from now on, what is read stays."""
        self.of = {}


def until_change(read: Callable[[Node], T]) -> Callable[[Node], T]:
    """`read`, which gives its last answer again if nothing has changed since."""
    answers: dict[Node, T] = {}
    _answers.append(answers)

    @wraps(read)
    def remembered(node: Node) -> T:
        if not _num_rewrites:
            return read(node)
        if node not in answers:
            answers[node] = read(node)
        return answers[node]

    return remembered


def changed() -> None:
    """Say that a node's call or value is another one now."""
    for answers in _answers:
        answers.clear()


@contextmanager
def kept() -> Iterator[None]:
    """Keep what is read, and remember answers, while the block changes a graph through an editor.

    Collecting cycles waits until the end, too: a rewrite makes many objects that stay, and each
    collection would look at all of them, and at whatever else the program holds.
    """
    global _num_rewrites  # noqa: PLW0603
    collects = gc.isenabled()
    with _lock:
        _num_rewrites += 1
        if _num_rewrites == 1:
            for table in _tables:
                table.keep()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        changed()
        with _lock:
            _num_rewrites -= 1
            if not _num_rewrites:
                for table in _tables:
                    table.drop()


_tables: list[Facts[Any]] = []
_answers: list[dict[Node, Any]] = []
_num_rewrites = 0
_lock = Lock()
