"""A kernel pattern with its gate open, behind the normalisations, on a small program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimus.pattern import Rewrite
from tests.optimus.capture import rewritten
from tests.optimus.patterns.rewriting import NORMALIZE, Program, Result, listing


def fuse(
    pattern: Rewrite, program: Program, inputs: Sequence[Any], dynamic: bool = False
) -> Result:
    """The graph after `pattern`, which must still do what it did, on the CPU."""
    module, reports = rewritten(program, inputs, *NORMALIZE, pattern.ungated(), dynamic=dynamic)
    report = reports[pattern.name()]
    return Result(listing(module), report.fired, "; ".join(report.misses), module)


def missed(pattern: Rewrite, program: Program, *inputs: Any) -> str:
    """Why it does not fire; asserts that it does not."""
    result = fuse(pattern, program, inputs)
    assert result.fired == 0, f"fired {result.fired} times:\n{result.text}"
    return result.misses
