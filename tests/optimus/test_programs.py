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

pytestmark = pytest.mark.xdist_group("programs")  # one process tallies
NUM_PROGRAMS = int(os.environ.get("OPTIMUS_FUZZ_PROGRAMS", "300"))
TALLY: Counter[str] = Counter()


@pytest.mark.slow
@pytest.mark.timeout(0)
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
def test_random_programs(rng: Random) -> None:
    program = random_program(rng)
    note(str(program))
    try:
        check(program, "aot_eager" if rng.randrange(4) == 3 else "eager")
        TALLY["checked"] += 1
    except Discarded as reason:
        TALLY[f"discarded: {reason}"] += 1
        reject()


@pytest.mark.slow  # as the one above, which it comes after
def test_few_programs_are_discarded() -> None:
    discarded = sum(n for kind, n in TALLY.items() if kind.startswith("discarded"))
    print(dict(TALLY))
    assert TALLY["checked"] > 0
    assert discarded <= 0.15 * TALLY.total(), dict(TALLY)
