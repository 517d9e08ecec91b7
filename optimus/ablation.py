"""The cases of an ablation, generated from PIPELINE: with and without each pattern."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from optimus.pipeline import PRESETS, pattern_names, select

KINDS = ("leave_one_out", "one_at_a_time")
_WITHOUT = "without_"
_ONLY = "only_"


@dataclass(frozen=True)
class Case:
    """One job of an ablation: `patterns` and `disable` as `optimus.pipeline.select` takes them."""

    name: str
    patterns: str
    disable: tuple[str, ...] = ()


def cases(kind: str) -> tuple[Case, ...]:
    """All cases of `kind`, the baseline `none` first.

    leave_one_out: none, all, then all without each pattern in turn.
    one_at_a_time: none, each pattern alone (with the normalisations), then all.
    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown ablation {kind!r}; valid: {', '.join(KINDS)}")
    none, everything = Case("none", "none"), Case("all", "all")
    if kind == "leave_one_out":
        chosen = select("all").names
        names = [name for name in pattern_names() if name in chosen]
        without = (Case(_WITHOUT + name, "all", (name,)) for name in names)
        return (none, everything, *without)
    return (none, *(Case(_ONLY + name, name) for name in pattern_names()), everything)


def case(name: str) -> Case:
    """The case called `name`: a preset, `without_` or `only_` and a pattern's name.

    Raises ValueError naming the nearest cases for anything else.
    """
    known = {c.name: c for kind in KINDS for c in cases(kind)}
    known |= {preset: Case(preset, preset) for preset in PRESETS}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4) or list(PRESETS)
    raise ValueError(f"unknown ablation case {name!r}; nearest valid: {', '.join(near)}")
