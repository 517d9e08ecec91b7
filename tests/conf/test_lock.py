"""A folder takes one run at a time, and is free again however that one ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from conf.checks import UserError
from conf.lock import hold
from tests import processes

# Holds a folder as a run with loader processes does: killed, it leaves one behind for a while.
HOLDER = """
import os, sys, time
from pathlib import Path
from conf.lock import hold
hold(Path(sys.argv[1]), "run")
if os.fork():
    (Path(sys.argv[1]) / "held").touch()
time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    program, folder = tmp_path / "holder.py", tmp_path / "run"
    program.write_text(HOLDER)
    with processes.running([sys.executable, str(program), str(folder)], forked=True) as holder:
        deadline = time.monotonic() + 60
        while not (folder / "held").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(UserError, match=f"another run is writing to {folder}: .*hydra.run.dir"):
            hold(folder, "run")
        hold(tmp_path / "other", "run")
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        hold(folder, "run")
