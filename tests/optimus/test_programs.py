"""Random programs under all patterns do what they do in eager mode.

OPTIMUS_FUZZ_PROGRAMS says how many are tried (200 in CI, always the same ones); with another number
they are new ones each time, unless --hypothesis-seed is given. OPTIMUS_FUZZ_RESULTS names a CSV
file to which the run adds a row.
"""

from __future__ import annotations

import csv
import datetime
import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, reject, settings
from hypothesis import strategies as st

from benchmarks.rows import commit
from tests.optimus.comparison import Discarded, check
from tests.optimus.statements import random_program

NUM_PROGRAMS = int(os.environ.get("OPTIMUS_FUZZ_PROGRAMS", "200"))


@settings(
    max_examples=NUM_PROGRAMS,
    deadline=None,
    derandomize="OPTIMUS_FUZZ_PROGRAMS" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
    print_blob=True,
)
@given(rng=st.randoms(use_true_random=False))
def check_programs(tally: Counter[str], rng: Random) -> None:
    """Check what one random program gives, and count it under what came of it."""
    program = random_program(rng)
    note(str(program))
    try:
        inner = "aot_eager" if rng.randrange(4) == 3 else "eager"
        check(program, inner, kernels=rng.randrange(4) == 3)
        _count(tally, "checked")
    except Discarded as reason:
        _count(tally, f"discarded: {reason}")
        reject()
    except Exception:
        _count(tally, "different")
        raise


def _count(tally: Counter[str], outcome: str) -> None:
    if not tally["different"]:  # what follows is the same program made shorter
        tally[outcome] += 1


def _add_row(path: Path, tally: Counter[str], seed: str) -> None:
    row = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "seed": seed,
        "programs": tally["checked"],
        "discarded": tally.total() - tally["checked"] - tally["different"],
        "differences": tally["different"],
    }
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_programs(pytestconfig: pytest.Config) -> None:
    tally: Counter[str] = Counter()
    try:
        check_programs(tally)
    finally:
        print(dict(tally))
        if path := os.environ.get("OPTIMUS_FUZZ_RESULTS"):
            _add_row(Path(path), tally, str(pytestconfig.getoption("--hypothesis-seed")))
    discarded = tally.total() - tally["checked"]
    assert discarded <= 0.15 * tally.total(), dict(tally)
