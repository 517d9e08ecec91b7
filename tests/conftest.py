"""What all tests share: GPU tests are skipped without a GPU, slow ones run last.

Where processes share the files of tests, the longest go first: none is left with a long file of its
own at the end.
"""

from __future__ import annotations

import gc
import os

# Before torch reads it, and for the processes that tests start: threads that wait for each other
# make small steps several times slower wherever something else uses a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

from tests.forks import collect_seldom

HERE = Path(__file__).parent

collect_seldom()

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter then, which has to be said before anything loads Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Files that take half a minute of a processor or more, the longest first.
LONGEST = (
    "optimus/adversarial/test_graphs.py",
    "optimus/test_coverage_models.py",
    "test_train.py",
    "test_configs.py",
    "optimus/patterns/test_generic.py",
    "optimus/test_programs.py",
    "benchmarks/test_gemms.py",
    "recsys/test_resume.py",
    "optimus/test_callback_graphs.py",
    "optimus/test_callback.py",
    "optimus/patterns/test_modes.py",
    "conf/test_jobs.py",
    "optimus/test_callback_foreign.py",
    "benchmarks/test_step.py",
    "optimus/patterns/test_cuts.py",
    "optimus/test_callback_resume.py",
    "optimus/test_callback_ddp.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device, and put them in order."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    items.sort(key=_shared_order if "PYTEST_XDIST_WORKER" in os.environ else _is_slow)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _shared_order(item: pytest.Item) -> tuple[int, bool]:
    file = item.path.relative_to(HERE).as_posix()
    return LONGEST.index(file) if file in LONGEST else len(LONGEST), not _is_slow(item)


def pytest_collection_finish() -> None:
    """Leave out what takes time and serves no test."""
    from torch._dynamo import guards  # only now: it loads Triton

    # For its log alone Dynamo times the guards of whatever it compiles, on caches flushed for that:
    # a fifth of the time of a test that compiles something small.
    guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    # A million objects of all imports stay: no collection of garbage need look at them.
    gc.freeze()
