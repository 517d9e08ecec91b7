"""$OPTIMUS_TEST_TILE=N: kernels run with the Nth of their tile shapes, not with the fastest.

Memory of the GPU is given back after each test: others may run beside it, some with 15 GB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kernels import tuning
from kernels.tuning import Tile


@pytest.fixture(autouse=True)
def _tile_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = os.environ.get("OPTIMUS_TEST_TILE")
    if wanted is None:
        return

    def take(tiles: Sequence[Tile], run: Callable[[Tile], Any]) -> Tile:
        return tiles[min(int(wanted), len(tiles) - 1)]

    chosen: dict[str, int] = {}
    monkeypatch.setattr(tuning, "_fastest", take)
    monkeypatch.setattr(tuning, "_chosen", lambda: chosen)
    monkeypatch.setattr(tuning, "_save", lambda: None)


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
