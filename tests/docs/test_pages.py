"""The code on the pages runs, and their links lead somewhere."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import optimus
from optimus.pipeline import patterns_by_name

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Where a page's blocks run one after the other, as they would in a file `my_patterns.py`."""
    torch._dynamo.reset()
    made = types.ModuleType("my_patterns")
    monkeypatch.setitem(sys.modules, "my_patterns", made)
    before = set(patterns_by_name())
    yield made
    for name in set(patterns_by_name()) - before:
        optimus.unregister(name)


def test_writing_a_pattern(module: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = code_blocks(ROOT / "docs" / "writing_a_pattern.md")
    assert len(blocks) == 3
    assert len(blocks[0].splitlines()) < 60
    for block in blocks:
        exec(block, module.__dict__)
    printed = capsys.readouterr().out
    assert "fold_swish: 1 anchors, fired 1" in printed
    assert "+ silu: f32[4, 8] = silu(y)" in printed


def test_reading_a_report(module: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for block in code_blocks(ROOT / "docs" / "reading_a_report.md"):
        exec(block, module.__dict__)
    assert "batch_linears: 5 anchors, fired 1" in capsys.readouterr().out


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_every_page_is_reached_from_the_first() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert all(page.name in index for page in PAGES if page.name != "index.md")
    assert "docs/index.md" in (ROOT / "README.md").read_text(encoding="utf-8")
