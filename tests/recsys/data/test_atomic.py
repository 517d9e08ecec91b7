"""Work that only one process does, and a lock that leaves nothing behind."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from recsys.data.atomic import only_one


def _count(folder: Path) -> None:
    total = folder / "total"
    for _ in range(200):
        with only_one(folder / "own.lock"):
            total.write_text(str(int(total.read_text()) + 1))


def test_one_at_a_time_and_the_lock_is_gone_afterwards(tmp_path: Path) -> None:
    (tmp_path / "total").write_text("0")
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_count, args=(tmp_path,), daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "total").read_text() == "800"
    assert [file.name for file in tmp_path.iterdir()] == ["total"]
