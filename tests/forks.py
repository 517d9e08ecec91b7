"""Programs forked from a server that has imported what most of them need; see tests/processes.py.

Most of a small program's time goes into importing PyTorch, Lightning and TorchRec. A fork of a
process that did this, and nothing else, starts at once. What is the project's own every program
imports for itself. `python -m tests.forks SOCKET` is the server. A program is a connection: what to
run and the files it has open go there, its process id and in the end its exit status come back;
whoever closes the connection before has it killed.

`Server.python` is a file to call in place of Python: it has the server do what it was asked for,
with its files, and ends as that does. To a forked program it is `sys.executable`, and so whatever
that starts itself (ranks, the jobs of a multirun) is forked, too.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PRELOADED = (
    "hydra",
    "lightning.pytorch",
    "matplotlib.pyplot",
    "torch._inductor.compile_fx",
    "torchrec",
)
PYTHON = "FORKED_PYTHON"
"""The variable that names `Server.python` to a forked program."""


# Called in place of Python: it has to start quickly, and so imports next to nothing.
CLIENT = """#!{python} -IS
import _signal, _socket, json, os, sys
command = sys.argv[1:]
while command and command[0][:2] in ("-B", "-W", "-X"):
    del command[: 2 if command[0] in ("-W", "-X") else 1]
if not command or (command[0][0] == "-" and command[0] not in ("-c", "-m")):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
files = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        os.fstat(number)
        files.append(number)
    except OSError:
        pass
server = _socket.socket(_socket.AF_UNIX)
server.connect({address!r})
request = [command, dict(os.environ), os.getcwd(), files]
text = json.dumps(request).encode()
passed = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
server.sendmsg([len(text).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, passed)])
server.sendall(text)
said = b""
while said.count(b"\\n") < 2 and (more := server.recv(100)):
    said += more
if said.count(b"\\n") < 2:
    sys.exit("the server of forked programs has ended")
code = int(said.split()[1])
if code < 0:
    if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
        _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Server:
    """The server as a test's process sees it; it ends with that process."""

    def __init__(self, environment: Mapping[str, str], root: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._address = str(Path(self._folder.name) / "socket")
        self._root = root
        self.python = str(Path(self._folder.name) / "python")
        Path(self.python).write_text(CLIENT.format(python=sys.executable, address=self._address))
        Path(self.python).chmod(0o700)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.forks", self._address],
            cwd=root,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("the server of forked programs did not start; its error is above")

    def close(self) -> None:
        """Let it end, and kill what still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def start(self, command: Sequence[str], environment: Mapping[str, str], *files: str) -> Forked:
        """Start `python COMMAND`, its output and errors in two `files`."""
        text = json.dumps([command, dict(environment), self._root, [0, 1, 2]]).encode()
        opened = [os.open(path, os.O_RDWR) for path in (os.devnull, *files)]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        socket.send_fds(connection, [len(text).to_bytes(4, "big")], opened)
        connection.sendall(text)
        for number in opened:
            os.close(number)
        return Forked(connection)


class Forked:
    """A running program; its parts of the interface of subprocess.Popen."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None
        self.pid = self._told()

    def _told(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            if not (more := self._connection.recv(1)):
                raise RuntimeError("the server of forked programs has ended")
            line += more
        return int(line)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = self._told()
            self._connection.close()
        return self.returncode


@dataclass
class _Request:
    """A program to be. `numbers`: what those of its open `files` are to be called in it."""

    files: list[int]
    command: list[str]
    environment: dict[str, str]
    folder: str
    numbers: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> _Request | None:
        """None where who asked for it was killed meanwhile."""
        size, files, _, _ = socket.recv_fds(connection, 4, 250)
        length, text = int.from_bytes(size, "big"), b""
        while len(text) < length and (more := connection.recv(length - len(text))):
            text += more
        return cls(files, *json.loads(text)) if length and len(text) == length else None

    def close(self) -> None:
        for file in self.files:
            os.close(file)


def _serve(listener: socket.socket) -> _Request:
    """Fork programs until the other side is gone. Returns in a program's own process only."""
    running: dict[socket.socket, int] = {}
    while True:
        wait = 0.02 if running else None
        ready = select.select([sys.stdin, listener, *running], [], [], wait)[0]
        if sys.stdin in ready:
            for pid in running.values():
                _kill(pid)
            os._exit(0)
        if listener in ready:
            connection = listener.accept()[0]
            if (request := _Request.receive(connection)) is not None:
                if (pid := os.fork()) == 0:
                    for other in (listener, connection, *running):
                        other.close()
                    return request
                request.close()
                running[connection] = pid
                _tell(connection, pid)
        _tell_ends(running, ready)


def _tell_ends(running: dict[socket.socket, int], ready: Sequence[object]) -> None:
    """Drop those that have ended, and kill those that nobody waits for any more."""
    for connection, pid in list(running.items()):
        if connection in ready:  # it never says more: who asked for the program is gone
            _kill(pid)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _tell(connection, os.waitstatus_to_exitcode(status))
            connection.close()
            del running[connection]


def _tell(connection: socket.socket, value: int) -> None:
    with suppress(OSError):
        connection.sendall(f"{value}\n".encode())


def _kill(pid: int) -> None:
    """The program and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # forked just now, and not yet the leader of a session


def _become(request: _Request) -> None:
    """Take on all that a program of its own would have been started with."""
    os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    beyond = max(*request.numbers, *request.files) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, beyond) for file in request.files]
    request.close()
    for file, number in zip(moved, request.numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    paths = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    if PYTHON in request.environment:
        sys.executable = request.environment[PYTHON]
        multiprocessing.set_executable(sys.executable)
    numpy = importlib.import_module("numpy")
    numpy.random.seed()
    # Lightning reads its rank when it is imported.
    rank_zero = importlib.import_module("lightning.fabric.utilities.rank_zero")
    rank_zero.rank_zero_only.rank = int(request.environment.get("LOCAL_RANK", 0))


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
        sys.path.insert(0, str(Path(what).resolve().parent))
        runpy.run_path(what, run_name="__main__")


def _status(command: list[str]) -> int:
    """Run the command, and give its exit status as Python does."""
    try:
        _execute(command)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """End as Python does, but for taking apart all that was imported: that takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 255)


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
    with socket.socket(socket.AF_UNIX) as address:
        address.bind(sys.argv[1])
        address.listen()
        print("ready", flush=True)
        asked = _serve(address)
    _become(asked)
    _end(_status(asked.command))
