"""What random programs start from: their inputs, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from tests.optimus.program import Input, Program


def frame(rng: Random) -> Program:
    """A program without statements."""

    def pick(*options: Any) -> Any:
        return options[rng.randrange(len(options))]

    program = Program(seed=rng.randrange(1000))
    program.batches = pick((3,), (3,), (5, 3), (2, 4), (1,), (0,))
    program.train = rng.randrange(4) < 3
    program.grad = rng.randrange(10) < 9
    program.autocast = rng.randrange(10) == 9
    program.symbolic = rng.randrange(10) == 9
    for i in range(rng.randrange(3) + 1):
        shape = pick((-1, 8), (-1, 6), (-1, 4), (-1, 3, 4), (-1, 12), (4, 4), (-1, 1))
        dtype = pick(*[torch.float32] * 7, torch.bfloat16, torch.float64, torch.int64, torch.bool)
        grad = rng.randrange(2) == 1 and dtype.is_floating_point
        program.inputs.append(Input(f"x{i}", shape, dtype, grad))
    program.inputs += _views(pick) + _numbers(pick)
    return program


def _views(pick: Callable[..., Any]) -> list[Input]:
    """Inputs in memory that others have, too: of another input, or of one that is not given."""
    views = ("x.detach()[..., 1:]", "x", "x.detach()", "x[..., :2]", "x.mT", "x[-1:]", "x.detach()")
    if pick(*range(8)) == 7:
        return [Input("view", (), torch.float32, of="x0", view=pick(*views))]
    if pick(*range(8)) < 7:
        return []
    base = Input("base", pick((-1, 6), (4, 8)), torch.float32, given=False)
    halves = pick(("x[..., :4]", "x[..., 2:]"), ("x[..., :2]", "x[..., 2:]"), ("x.mT", "x"))
    return [
        base,
        *(Input(f"v{i}", (), base.dtype, of="base", view=v) for i, v in enumerate(halves)),
    ]


def _numbers(pick: Callable[..., Any]) -> list[Input]:
    if pick(*range(4)) < 3:
        return []
    kinds = [pick(int, int, float, bool) for _ in range(pick(1, 1, 2))]
    return [Input(f"n{i}", pick((), (-1,)), kind) for i, kind in enumerate(kinds)]
