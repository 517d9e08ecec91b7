"""What says which files of tests go first is about files that there are."""

from __future__ import annotations

from tests.conftest import HERE, LONGEST


def test_the_longest_files_are_there() -> None:
    assert [name for name in LONGEST if not (HERE / name).is_file()] == []
