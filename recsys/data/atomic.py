"""Files that are either whole or not there, and work that only one process does."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO


def flush(file: IO[Any]) -> None:
    """Have everything written so far on the disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` in one step when the block ends without an error."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with temporary.open("wb") as file:
            yield file
            flush(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold a lock on `path`; others wait. A process loses it when it ends, however it ends.

    The file is gone afterwards, unless the process was killed: then the next one removes it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_still(path, file):
                continue  # whoever had it before removed it: others lock another file by now
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # before it is let go, or it would be another's
            return


def _is_still(path: Path, file: IO[Any]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
