"""Random programs under all patterns do what they do in eager mode.

OPTIMUS_FUZZ_PROGRAMS says how many are tried (300 in CI, always the same ones); with another number
they are new ones each time, unless --hypothesis-seed is given.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, note, reject, settings
from hypothesis import strategies as st

from tests.optimus.comparison import Discarded, check
from tests.optimus.statements import random_program

NUM_PROGRAMS = int(os.environ.get("OPTIMUS_FUZZ_PROGRAMS", "300"))
TALLY: Counter[str] = Counter()


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
        check(program, "aot_eager" if rng.randrange(4) == 3 else "eager")
        tally["checked"] += 1
    except Discarded as reason:
        tally[f"discarded: {reason}"] += 1
        reject()


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_programs() -> None:
    tally: Counter[str] = Counter()
    check_programs(tally)
    print(dict(tally))
    discarded = tally.total() - tally["checked"]
    assert discarded <= 0.15 * tally.total(), dict(tally)
