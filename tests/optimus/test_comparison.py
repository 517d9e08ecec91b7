"""What counts as no difference: gradients of zeros for none, where compilers give them, too."""

from __future__ import annotations

import pytest
import torch

from optimus.backend import OptimusBackend
from optimus.outcome import Outcome
from tests.optimus.comparison import check, run, without_zeros
from tests.optimus.program import Input, Program

NAME = "gradient of other.weight"


def halves(*between: str) -> Program:
    """Two equal layers, one of which gets no gradient; `between` stands in front of saying so."""
    layers = [f"self.{name} = nn.Linear(4, 4)" for name in ("one", "other")]
    values = [f"{name} = torch.tanh(self.{name}(x))" for name in ("one", "other")]
    end = "return one * 2 + other.detach()"
    return Program([Input("x", (-1, 4), torch.float32)], layers, [*values, *between, end])


def gradient(program: Program, patterns: str, inner: str) -> torch.Tensor | None:
    """That of the layer which gets none in eager mode."""
    (outcome,) = run(program, OptimusBackend(patterns, inner=inner, strict=True, verify=False))
    return outcome.values[NAME]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_zeros_behind_a_break(inner: str) -> None:
    """PyTorch's own compilers give zeros there; merged layers give them by any."""
    program = halves("torch._dynamo.graph_break()")
    assert run(program)[0].values[NAME] is None
    assert gradient(program, "none", "eager") is None
    for zeros in (gradient(program, "none", "aot_eager"), gradient(program, "all", inner)):
        assert zeros is not None and not zeros.any()
    check(program, inner)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_none_within_a_graph(inner: str) -> None:
    program = halves()
    assert gradient(program, "none", "aot_eager") is None
    assert gradient(program, "all", inner) is None


def test_zeros_that_no_compiler_gives_count() -> None:
    none, zeros = Outcome({NAME: None}), Outcome({NAME: torch.zeros(2)})
    assert without_zeros(none, zeros, zeros).values[NAME] is None
    assert without_zeros(none, zeros, none).values[NAME] is not None
    assert without_zeros(none, Outcome({NAME: torch.ones(2)}), zeros).values[NAME] is not None
    assert without_zeros(zeros, zeros, zeros).values[NAME] is not None
