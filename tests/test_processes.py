"""A forked program is like one that was started: only its imports are there before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests import processes
from tests.forks import PRELOADED

TOLD = """
    import json, os, sys
    print(json.dumps({
        "name": __name__,
        "arguments": sys.argv[1:],
        "given": os.environ["GIVEN"],
        "inherited": "TRITON_INTERPRET" in os.environ,
        "leads": os.getsid(0) == os.getpid(),
        "modules": sorted({name.split(".")[0] for name in sys.modules} | set(sys.modules)),
    }))
"""


@pytest.mark.parametrize("form", ["text", "file"])
def test_it_has_arguments_environment_and_session_of_its_own(tmp_path: Path, form: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(TOLD))
    program = [file] if form == "file" else ["-c", file.read_text()]
    done = processes.run([sys.executable, *program, "one", tmp_path], forked=True, GIVEN="this")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    modules = set(told.pop("modules"))
    assert told == {
        "name": "__main__",
        "arguments": ["one", str(tmp_path)],
        "given": "this",
        "inherited": False,
        "leads": True,
    }
    assert modules >= set(PRELOADED)
    assert not modules & {"optimus", "recsys", "kernels", "conf"}, "it imports those itself"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("raise SystemExit('no')", 1, "no"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'bye')", 0, "bye"),
    ],
)
def test_its_end_is_told(text: str, code: int, said: str) -> None:
    done = processes.run([sys.executable, "-c", text], forked=True)
    assert done.returncode == code
    assert said in done.stderr


CHILD = """
    import os, sys
    with os.fdopen(int(sys.argv[1]), "w") as pipe:
        pipe.write(f"{sys.argv[2:]} {os.getcwd()} {'torchrec' in sys.modules}")
    sys.stdout.write("out ")
    sys.stdout.flush()
    os.kill(os.getpid(), 9) if os.environ["ENDS"] == "killed" else sys.exit(7)
"""


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize(("ends", "code"), [("killed", -9), ("itself", 7)])
def test_what_it_starts_is_forked_too(tmp_path: Path, ends: str, code: int, real: bool) -> None:
    text = f"""
        import os, subprocess, sys
        read, write = os.pipe()
        done = subprocess.run(
            [sys.executable, "-B", "-X", "a", "-c", {textwrap.dedent(CHILD)!r}, str(write), "a"],
            env=os.environ | {{"ENDS": {ends!r}}}, cwd={str(tmp_path)!r}, pass_fds=[write],
            stdout=subprocess.PIPE)
        os.close(write)
        print(done.returncode, done.stdout, os.fdopen(read).read(), end="")
    """
    command = [sys.executable, "-c", textwrap.dedent(text)]
    python = {processes.PYTHON: sys.executable} if real else {}
    done = processes.run(command, forked=True, **python)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{code} b'out ' ['a'] {tmp_path} {not real}"


@pytest.mark.parametrize("forked", [True, False])
def test_one_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, forked: bool
) -> None:
    text = f"""
        import os, subprocess, sys, time
        program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        with open({str(tmp_path / "pid")!r}, "w") as file:
            file.write(child.stdout.readline().decode())
        os.rename({str(tmp_path / "pid")!r}, {str(tmp_path / "child")!r})
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(text)]
    with processes.running(command, forked=forked) as process:
        while not (tmp_path / "child").exists():
            assert process.poll() is None
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    assert process.poll() == -9
    child = int((tmp_path / "child").read_text())
    while _runs(child):  # until the time-out of the test: a signal takes its time
        time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def _runs(pid: int) -> bool:
    """Whether there is such a process that has not ended, waited for or not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rsplit(")", 1)[1].split()[0] not in "ZX"
