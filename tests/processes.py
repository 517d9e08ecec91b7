"""Programs that tests start, alone or as several ranks: none of them outlives its test.

Each program leads a session of its own with its output in files. Whatever ends the wait for it (a
time-out, a failing test, Ctrl-C) kills the whole session, ranks that it started itself included: a
rank that waits for a dead one would otherwise hold up whoever waits for the end of the tests.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]


# What a test leaves in its own process is no matter of others: a trainer with a process group names
# its rank there, and a program that inherits the name waits for ranks that nobody starts.
_OWN = {"TRITON_INTERPRET", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "WORLD_SIZE"}


def environment(**extra: str) -> dict[str, str]:
    """The tests' own, with a port for ranks to meet at and one thread a process: threads that wait
    for each other are slow where tests share the cores."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OWN}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(_free_port())}
    return inherited | own | extra


@contextmanager
def running(
    command: Sequence[str | Path],
    out: IO[bytes] | int = subprocess.DEVNULL,
    err: IO[bytes] | int = subprocess.DEVNULL,
    **extra: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs while the block does, and is killed at its end. `extra` joins its
    environment."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(
    command: Sequence[str | Path], timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, `timeout` seconds at most, and return what it said."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with running(command, out, err, **extra) as process:
            process.wait(timeout)
        said = [_text(file) for file in (out, err)]
    return subprocess.CompletedProcess(list(command), process.returncode, *said)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _free_port() -> int:
    """One below those that the system hands out, so that nobody gets it in between."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as server, suppress(OSError):
            server.bind(("", port))
            return port
