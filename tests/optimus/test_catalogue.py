"""docs/patterns.md is what the generator makes of the pattern files as they are now."""

from __future__ import annotations

import pytest

from optimus.catalogue import HEADS, PAGE, page, sections
from optimus.explain import text_of
from optimus.pattern import Rewrite
from optimus.pipeline import PIPELINE
from optimus.upstream import TRANSLATIONS

PATTERNS = [pattern for phase in PIPELINE for pattern in phase.patterns]


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    made, kept = page(), PAGE.read_text(encoding="utf-8")
    first = next(
        (n for n, o in zip(made.splitlines(), kept.splitlines(), strict=False) if n != o), ""
    )
    assert made == kept, f"run `python -m optimus.catalogue`; the first line that differs: {first}"


def test_every_pattern_has_its_section_in_the_order_of_the_pipeline() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    wanted = [f"### {pattern.name()}" for pattern in PATTERNS]
    assert [line for line in lines if line.startswith("### ")] == wanted, (
        "run `python -m optimus.catalogue`"
    )
    assert all(any(f"`{name}`" in line for line in lines) for name in TRANSLATIONS)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name())
def test_every_pattern_says_what_the_page_needs(pattern: Rewrite) -> None:
    free, found = sections(text_of(pattern))
    assert free and not free.startswith("See the module")
    assert {"Before", "After", "Gains", "Costs"} <= found.keys()


def test_sections() -> None:
    text = (
        "Do it.\n\nBefore: `a`\nAfter:  `b`,\n    `c`\n\nFree words. Gains: x. Costs: none.\n\nMore"
    )
    free, found = sections(text)
    assert free == "Do it.\n\nFree words.\n\nMore"
    assert found == {"Before": "`a`", "After": "`b`, `c`", "Gains": "x.", "Costs": "none."}
    assert set(found) <= set(HEADS)
