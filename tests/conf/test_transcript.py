"""What goes past Hydra's handlers is in its log file all the same, and on the console once."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import processes

# Loggers as they are in a run: Lightning's are made first, with a handler of their own, then Hydra
# sets up the root logger.
PROGRAM = """
import logging, sys, warnings
from lightning.pytorch.utilities import rank_zero_info
from conf import transcript
from optimus.logbook import SAID
lightning = logging.getLogger("lightning.pytorch")
lightning.handlers, lightning.propagate = [logging.StreamHandler()], False
logging.basicConfig(
    force=True,
    level="INFO",
    handlers=[logging.StreamHandler(sys.stdout), logging.FileHandler(sys.argv[1])],
)
transcript.begin()
transcript.begin()
rank_zero_info("of Lightning")
SAID.info("of Optimus")
warnings.simplefilter("always")
warnings.warn("of a library")
logging.getLogger("own").info("of somebody")
transcript.stopped("no more")
"""
LINES = ("of Lightning", "of Optimus", "UserWarning: of a library", "of somebody", "no more")


def test_everything_is_in_the_file_and_nothing_new_on_the_console(tmp_path: Path) -> None:
    program, file = tmp_path / "program.py", tmp_path / "train.log"
    program.write_text(PROGRAM)
    done = processes.run([sys.executable, str(program), str(file)], forked=True)
    assert done.returncode == 0, done.stderr
    kept = file.read_text()
    assert [kept.count(line) for line in LINES] == [1, 1, 1, 1, 1]
    assert [done.stdout.count(line) for line in LINES] == [0, 0, 0, 1, 0]
    assert [done.stderr.count(line) for line in LINES] == [1, 0, 1, 0, 0]
