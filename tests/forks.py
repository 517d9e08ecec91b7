"""Programs forked from a server that has imported what most of them need; see tests/processes.py.

Most of a small program's time goes into importing PyTorch, Lightning and TorchRec. A fork of a
process that did this, and nothing else, starts at once. What is the project's own every program
imports for itself. `python -m tests.forks` is the server: a request a line, an answer a line.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PRELOADED = (
    "hydra",
    "lightning.pytorch",
    "matplotlib.pyplot",
    "torch._inductor.compile_fx",
    "torchrec",
)


class Server:
    """The server as a test's process sees it; it ends with that process."""

    def __init__(self, environment: Mapping[str, str], root: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.forks"],
            cwd=root,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        """Let it end; whatever still runs was killed by who started it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def start(self, command: Sequence[str], environment: Mapping[str, str], *files: str) -> Forked:
        """Start `python COMMAND`, its output and errors in two `files`."""
        return Forked(self, self._ask(command=command, environment=environment, files=files))

    def poll(self, pid: int) -> int | None:
        """The exit status of a program that ended, minus the signal that killed it."""
        return self._ask(poll=pid)

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the server of forked programs has ended; what it said is above")
        return json.loads(answer)


class Forked:
    """A running program; its parts of the interface of subprocess.Popen."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.poll(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.02)
        return code


def _serve() -> dict[str, Any]:
    """Answer until the other side is gone. Returns in a program's own process only, its request."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            _answer(os.waitstatus_to_exitcode(status) if pid else None)
        elif (pid := os.fork()) == 0:
            return request
        else:
            _answer(pid)
    os._exit(0)


def _answer(value: int | None) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _become(environment: dict[str, str], files: Sequence[str]) -> None:
    """Take on all that a program of its own would have been started with."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for path, number in zip((os.devnull, *files), (0, 1, 2), strict=True):
        opened = os.open(path, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)
    numpy = importlib.import_module("numpy")
    numpy.random.seed()
    # Lightning reads its rank when it is imported.
    rank_zero = importlib.import_module("lightning.fabric.utilities.rank_zero")
    rank_zero.rank_zero_only.rank = int(environment.get("LOCAL_RANK", 0))


def _execute(command: list[str]) -> None:
    """Be `python COMMAND`: a file, -c TEXT or -m MODULE, each with arguments."""
    what, *rest = command
    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = command
        runpy.run_path(what, run_name="__main__")


def collect_seldom() -> None:
    """Look for garbage where it costs little. By default it takes a tenth of the time of whatever
    compiles: a graph in the making is many small objects, all of them needed, and each 700 more
    are searched."""
    gc.set_threshold(50_000, 20, 20)


if __name__ == "__main__":
    collect_seldom()
    for name in PRELOADED:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "threads do not survive a fork"
    gc.freeze()  # no fork touches, and so copies, what is here for all of them
    asked = _serve()
    _become(asked["environment"], asked["files"])
    _execute(asked["command"])
