"""Tiles are chosen by time, once, and the choice outlives the process; a bad cache is no cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels import tuning
from kernels.tuning import Tile, choose, pinned, tile

SLOW, FAST = tile(BLOCK=16), tile(BLOCK=32)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tile]]:
    """Every launch, timed by a clock on which FAST takes half of what SLOW does."""
    launched: list[Tile] = []

    def clock(run: Callable[[], None], **options: object) -> float:
        run()
        return 1.0 if launched[-1] == FAST else 2.0

    monkeypatch.setenv("OPTIMUS_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("triton.testing.do_bench", clock)
    tuning._chosen.cache_clear()
    yield launched
    tuning._chosen.cache_clear()


def _choose(runs: list[Tile], rows: int = 1000) -> Tile:
    return choose("op", (rows, 13), torch.float32, (SLOW, FAST), runs.append)


def test_the_fastest_is_chosen_and_measured_once(runs: list[Tile]) -> None:
    assert _choose(runs) == FAST
    assert set(runs) == {SLOW, FAST}
    runs.clear()
    assert _choose(runs, rows=1024) == FAST, "1000 and 1024 rows share a choice"
    assert not runs


def test_the_choice_outlives_the_process(runs: list[Tile]) -> None:
    _choose(runs)
    tuning._chosen.cache_clear()  # what a new process starts with
    runs.clear()
    assert _choose(runs) == FAST
    assert not runs
    assert _choose(runs, rows=2000) == FAST
    assert runs, "other sizes are measured anew"


def test_what_another_process_measured_meanwhile_is_not_measured_again(
    runs: list[Tile], tmp_path: Path
) -> None:
    _choose(runs, rows=2000)
    mine = (tmp_path / "tiles.json").read_text()
    _choose(runs)
    both = (tmp_path / "tiles.json").read_text()
    (tmp_path / "tiles.json").write_text(mine)
    tuning._chosen.cache_clear()
    _choose(runs, rows=2000)  # this process has read the file
    (tmp_path / "tiles.json").write_text(both)
    runs.clear()
    assert _choose(runs) == FAST
    assert not runs


@pytest.mark.parametrize("content", ["", "[]", '{"x": "y"}', "\x00"])
def test_an_unreadable_cache_is_measured_anew(
    content: str, runs: list[Tile], tmp_path: Path
) -> None:
    (tmp_path / "tiles.json").write_text(content)
    assert _choose(runs) == FAST


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    runs: list[Tile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPTIMUS_KERNEL_CACHE", str(tmp_path / "file" / "below"))
    assert _choose(runs) == FAST


def test_tiles_that_do_not_fit_are_passed_over(runs: list[Tile]) -> None:
    def run(choice: Tile) -> None:
        if choice == FAST:
            raise RuntimeError("out of shared memory")
        runs.append(choice)

    assert choose("op", (8,), torch.float32, (SLOW, FAST), run) == SLOW


def test_when_nothing_fits_the_error_says_why() -> None:
    def run(choice: Tile) -> None:
        raise RuntimeError("out of shared memory")

    with pytest.raises(RuntimeError, match="out of shared memory"):
        tuning._fastest((SLOW, FAST), run)


def test_nothing_is_measured_while_a_graph_is_captured(
    runs: list[Tile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _choose(runs) == SLOW
    assert not runs


def test_a_choice_can_be_pinned(runs: list[Tile]) -> None:
    other = tile(BLOCK=64)
    with pinned("op", other):
        assert _choose(runs) == other
    assert _choose(runs) == FAST
