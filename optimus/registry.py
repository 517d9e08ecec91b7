"""Patterns that users add to the pipeline: by `optimus.register`, or by an entry point.

A package brings patterns along by naming, in the entry point group `optimus.patterns`, either a
pattern class or a function without arguments that calls `optimus.register` itself. Entry points are
loaded when the pipeline is first asked for; one that cannot be loaded is left out with a warning.
Files that call `optimus.register` may also be named in the environment, in `OPTIMUS_PATTERNS`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, get_args

from optimus.driver import Phase
from optimus.names import nearest
from optimus.ops import OPS
from optimus.pattern import EVERY_CALL, Family, GroupPattern, Pattern, Rewrite, SweepPattern

log = logging.getLogger(__name__)

ENTRY_POINTS = "optimus.patterns"
FILES = "OPTIMUS_PATTERNS"


@dataclass(frozen=True)
class Place:
    """Where in the pipeline: in `phase`, in front of or behind another pattern of it."""

    phase: str | None = None
    before: str | None = None
    after: str | None = None


class Registry:
    """The patterns that were added, and the pipeline with them in their places."""

    def __init__(self) -> None:
        self._patterns: dict[str, Rewrite] = {}
        self._arranged: tuple[Phase, ...] = ()
        self._base: tuple[Phase, ...] = ()

    def add(self, pattern: Rewrite, place: Place, base: tuple[Phase, ...]) -> None:
        """Add a pattern to the pipeline `base`; raises TypeError and ValueError as `register`."""
        check(pattern)
        phases = self.arranged(base)
        names = [p.name() for phase in phases for p in phase.patterns]
        if pattern.name() in names:
            again = f"; optimus.unregister({pattern.name()!r}) takes it out"
            raise ValueError(
                f"there is a pattern {pattern.name()!r} already"
                + (again if pattern.name() in self._patterns else " in Optimus; rename yours")
            )
        self._arranged = placed(pattern, place, phases)
        self._patterns[pattern.name()] = pattern

    def remove(self, name: str) -> None:
        """Take a pattern out again; raises ValueError for one that was not added."""
        if name not in self._patterns:
            added = ", ".join(self._patterns) or "none"
            raise ValueError(f"no pattern {name!r} was registered; registered are: {added}")
        del self._patterns[name]
        self._arranged = tuple(
            Phase(phase.name, tuple(p for p in phase.patterns if p.name() != name))
            for phase in self._arranged
        )

    def arranged(self, base: tuple[Phase, ...]) -> tuple[Phase, ...]:
        """`base` with the added patterns in their places."""
        if self._base != base:
            assert not self._patterns, "one registry serves one pipeline"
            self._base = self._arranged = base
        return self._arranged


def placed(pattern: Rewrite, place: Place, phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """`phases` with `pattern` in its place. Raises ValueError for a place that there is not.

    Without any place it stands at the end of the phase called as its family, or of the last one.
    """
    home = {p.name(): phase.name for phase in phases for p in phase.patterns}
    names = [phase.name for phase in phases]
    neighbours = [nearest("pattern", n, home) for n in (place.before, place.after) if n is not None]
    wanted = [place.phase] if place.phase is not None else []
    wanted = list(dict.fromkeys([*wanted, *(home[n] for n in neighbours)]))
    if len(wanted) > 1:
        raise ValueError(f"{place} asks for more than one phase: {', '.join(wanted)}")
    default = pattern.family if pattern.family in names else names[-1]
    name = nearest("phase", wanted[0] if wanted else default, names)
    return tuple(
        Phase(phase.name, _inserted(pattern, place, phase.patterns))
        if phase.name == name
        else phase
        for phase in phases
    )


def _inserted(pattern: Rewrite, place: Place, others: Sequence[Rewrite]) -> tuple[Rewrite, ...]:
    names = [p.name() for p in others]
    low = names.index(place.after) + 1 if place.after is not None else 0
    high = names.index(place.before) if place.before is not None else len(names)
    if low > high:
        raise ValueError(f"{place.after!r} does not stand in front of {place.before!r}")
    return (*others[:high], pattern, *others[high:])


def check(pattern: object) -> None:
    """Refuse what is no pattern: TypeError for a wrong type, ValueError for wrong contents."""
    if isinstance(pattern, type) and issubclass(pattern, Rewrite):
        raise TypeError(f"{pattern.__name__} is a class; give an instance, {pattern.__name__}()")
    kinds = (Pattern, SweepPattern, GroupPattern)
    if not isinstance(pattern, kinds):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"a pattern is an instance of {wanted}, not {type(pattern).__name__}")
    cls: Any = type(pattern)
    parameters: Any = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{cls.__name__} must be a frozen dataclass: its fields are its knobs")
    for name in ("anchors", "family"):
        if not hasattr(cls, name):
            raise TypeError(f"{cls.__name__} does not say its `{name}`")
    anchors: Any = cls.anchors
    if not isinstance(anchors, tuple) or not anchors:
        raise TypeError(f"`anchors` of {cls.__name__} must be a tuple of operations' names")
    nearest("family", cls.family, get_args(Family))
    for anchor in anchors if anchors != EVERY_CALL else ():
        nearest("operation", anchor, OPS)


def load_entry_points(register: Callable[[Rewrite], None]) -> None:
    """Register what installed packages bring along; what cannot be is left out with a warning."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            _load(point, register)
        except Exception as error:  # somebody else's package must not stop a training run
            log.warning("the pattern of entry point %s is left out: %s", point.value, error)


def load_files() -> None:
    """Run the files that the environment names, separated by commas, each once.

    Raises ValueError for one that cannot be run, saying why: it was asked for.
    """
    for path in map(Path, filter(None, os.environ.get(FILES, "").split(","))):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        try:
            if spec is None or spec.loader is None or path.suffix != ".py":
                raise ImportError("it is no Python file")
            module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except Exception as error:
            raise ValueError(f"{FILES} names {path}, which cannot be run: {error}") from error


def _load(point: EntryPoint, register: Callable[[Rewrite], None]) -> None:
    found = point.load()
    if isinstance(found, type):
        register(found())
    elif isinstance(found, Rewrite):
        register(found)
    else:
        found()
