"""What all tests share: GPU tests are skipped without a GPU, slow ones run last.

Where processes share the files of tests, those with slow ones go first: none is left with a long
file of its own at the end.
"""

from __future__ import annotations

import gc
import os

# Before torch reads it, and for the processes that tests start: threads that wait for each other
# make small steps several times slower wherever something else uses a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter then, which has to be said before anything loads Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device, and put them in order."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    shared = "PYTEST_XDIST_WORKER" in os.environ
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None, reverse=shared)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the million objects of all imports, which stay anyway."""
    gc.collect()
    gc.freeze()
