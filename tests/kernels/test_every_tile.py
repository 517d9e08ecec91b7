"""Each tile shape of each kernel is right on a GPU, whichever is the fastest there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernels import matmul
from tests import processes

NUM_TILES = len(matmul.TMA_TILES) + len(matmul.TILES)  # the longest list of tile shapes there is


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("index", range(NUM_TILES))
def test_every_tile_is_right(index: int) -> None:
    """In a process of its own: after an illegal access nothing works any more."""
    folder = str(Path(__file__).parent)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-x", "-q", "-k", "accurate", folder]
    done = processes.run(command, timeout=500, OPTIMUS_TEST_TILE=str(index))
    assert done.returncode == 0, done.stdout + done.stderr
