"""The benchmark of the loop runs, and compares like with like."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import loop


@pytest.mark.slow
def test_every_loop_is_measured_against_the_bare_one(tmp_path: Path) -> None:
    out = tmp_path / "loop.csv"
    sizes = ["--batch", "16", "--layers", "8", "--steps", str(loop.WARM_UP + 2 * loop.BLOCK)]
    loop.main([*sizes, "--rounds", "1", "--inner", "eager", "--commit", "abc", "--out", str(out)])
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["loop"] for row in rows] == list(loop.LOOPS)
    for row in rows:
        assert row["commit"] == "abc"
        assert int(row["steps"]) == 2 * loop.BLOCK
        assert float(row["ms"]) > 0 and float(row["cpu_ms"]) > 0
        assert float(row["overhead"]) == pytest.approx(
            float(row["ms"]) / float(rows[0]["ms"]) - 1, abs=1e-3
        )
