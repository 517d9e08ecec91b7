"""Programs that tests start, alone or as several ranks: none of them outlives its test.

Each program leads a session of its own with its output in files. Whatever ends the wait for it (a
time-out, a failing test, Ctrl-C) kills the whole session, ranks that it started itself included: a
rank that waits for a dead one would otherwise hold up whoever waits for the end of the tests.

A `forked` program is forked from a process that has imported PyTorch, Lightning and TorchRec, which
spares it most of its time; it has a process and a session of its own all the same, and so has what
it starts itself, unless it is given the real one as `PYTHON`. Whatever of a kind of programs
is tested, one at least should start as users start it: imports, command line, another order of
sets.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.forks import PYTHON, Forked, Server

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
    out: str = os.devnull,
    err: str = os.devnull,
    forked: bool = False,
    **extra: str,
) -> Iterator[subprocess.Popen[bytes] | Forked]:
    """A program that runs while the block does, and is killed at its end. `extra` joins its
    environment; `out` and `err` are files for what it says."""
    process = _start([str(word) for word in command], out, err, forked, environment(**extra))
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.poll() is None:  # forked just now, and not yet the leader of a session
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


def _start(
    command: list[str], out: str, err: str, forked: bool, variables: dict[str, str]
) -> subprocess.Popen[bytes] | Forked:
    if forked:
        assert command[0] == sys.executable, "only Python can be forked"
        return _server().start(command[1:], {PYTHON: forked_python()} | variables, out, err)
    with Path(out).open("wb") as to, Path(err).open("wb") as errors:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=to,
            stderr=errors,
            start_new_session=True,
        )


@functools.cache
def _server() -> Server:
    server = Server(environment(), str(ROOT))
    atexit.register(server.close)
    return server


def forked_python() -> str:
    """A file to start in place of Python: what it is to run is forked. A test whose program starts
    others as `sys.executable` sets that to this."""
    return _server().python


def run(
    command: Sequence[str | Path], timeout: float = 300, forked: bool = False, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, `timeout` seconds at most, and return what it said."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("out", "err")]
        for file in files:
            file.touch()
        with running(command, *map(str, files), forked=forked, **extra) as process:
            process.wait(timeout)
        said = [file.read_text(errors="replace") for file in files]
    return subprocess.CompletedProcess(list(command), process.returncode or 0, *said)


def _free_port() -> int:
    """One below those that the system hands out, so that nobody gets it in between."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as server, suppress(OSError):
            server.bind(("", port))
            return port
