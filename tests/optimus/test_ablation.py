"""The cases of an ablation come from PIPELINE and select what their names say."""

from __future__ import annotations

import pytest

from optimus.ablation import case, cases
from optimus.pipeline import pattern_names, select


def test_leave_one_out_leaves_each_pattern_out_once() -> None:
    none, everything, *without = cases("leave_one_out")
    assert (none.name, everything.name) == ("none", "all")
    assert not select(none.patterns, none.disable)
    selected = [n for n in select("all").names if n in pattern_names()]  # normalisations stay
    assert set(select(everything.patterns, everything.disable).names) >= set(selected)
    left_out = [set(selected) - set(select(c.patterns, c.disable).names) for c in without]
    assert sorted(left_out, key=str) == sorted(({name} for name in selected), key=str)


def test_one_at_a_time_selects_each_pattern_alone() -> None:
    none, *single, everything = cases("one_at_a_time")
    assert (none.name, everything.name) == ("none", "all")
    selectable = set(pattern_names())
    alone = [selectable & set(select(c.patterns, c.disable).names) for c in single]
    assert alone == [{name} for name in pattern_names()]


@pytest.mark.parametrize("kind", ["leave_one_out", "one_at_a_time"])
def test_cases_are_found_by_name(kind: str) -> None:
    assert [case(c.name) for c in cases(kind)] == list(cases(kind))
    assert case("vertical").patterns == "vertical"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    name = pattern_names()[0]
    with pytest.raises(ValueError, match=f"nearest valid: without_{name}"):
        case(f"without{name}")
    with pytest.raises(ValueError, match="leave_one_out"):
        cases("leave_two_out")
