"""A ReLU in float32 that autocast rounds afterwards works in bfloat16 at once."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn import functional as F

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "round_before_relu"
X = torch.randn(3, 4, requires_grad=True)
WEIGHT = torch.randn(2, 4, requires_grad=True)
STACK = torch.randn(2, 2, 5, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(torch.relu(x), weight)

    assert_expected_inline(
        rewrite(NAME, program, (X, WEIGHT)).text,
        """\
_enter_autocast = _enter_autocast('cpu', bfloat16, True, None)
to = to(x, dtype=bfloat16)
relu_1 = relu(to)
linear_1 = linear(relu_1, weight)
_exit_autocast = _exit_autocast(_enter_autocast)
return linear_1""",
    )


def test_stacks_are_seen_through_views() -> None:
    def program(x: Tensor, stack: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.bmm(x.relu().unflatten(1, (2, 2)).transpose(0, 1), stack)

    assert fired(NAME, program, X, STACK) == 1
    assert fired(NAME, program, X, STACK, dynamic=True) == 1


def test_a_part_that_is_read_in_float32_is_not_rounded() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        hidden = torch.relu(x)
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(hidden, weight) + hidden[:, :2]

    reason = "not all that reads ReLU's result rounds it to bfloat16"
    assert missed(NAME, program, X, WEIGHT) == reason


def test_outside_autocast_nothing_is_rounded() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(torch.relu(x), weight)

    assert missed(NAME, program, X, WEIGHT) == "not a product made in bfloat16"


def test_without_a_gradient_nothing_is_kept() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return F.linear(torch.relu(x), weight)

    assert missed(NAME, program, X, WEIGHT) == "ReLU has no gradient"


def test_all_layers_behind_one_relu_read_what_is_rounded() -> None:
    def program(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = torch.relu(x)
            return F.linear(hidden, weight), weight.matmul(hidden.t())

    assert fired(NAME, program, X, WEIGHT) == 2


def test_gradients_are_the_same_where_numbers_round_to_zero() -> None:
    tiny = torch.tensor([[0.0, -0.0, 2.0**-126, -(2.0**-126)]], requires_grad=True)

    def program(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(torch.relu(x), weight)

    assert fired(NAME, program, tiny, WEIGHT) == 1
