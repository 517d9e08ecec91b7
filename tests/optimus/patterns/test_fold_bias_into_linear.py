"""A bias is added in the linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "fold_bias_into_linear"
X, W, B = torch.randn(4, 6), torch.randn(3, 6, requires_grad=True), torch.randn(3)


def test_golden() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = (x @ w.t() + b).relu() + (b + F.linear(x, w)).tanh()
        return y + F.linear(x.expand(2, 4, 6), w).add(b)

    assert_expected_inline(
        rewrite(NAME, program, (X, W, B)).text,
        """\
linear_3 = linear(x, w, b)
relu = relu(linear_3)
linear_4 = linear(x, w, b)
tanh = tanh(linear_4)
y = add(relu, tanh)
expand = expand(x, [2, 4, 6])
linear_5 = linear(expand, w, b)
add_4 = add(y, linear_5)
return add_4""",
    )


OTHER: list[Program] = [
    lambda x, w, b: F.linear(x, w, b) + b,
    lambda x, w, b: torch.add(F.linear(x, w), b, alpha=2),
    lambda x, w, b: F.linear(x, w) + 1,
    lambda x, w, b: F.linear(x, w) + b[:1],
    lambda x, w, b: F.linear(x, w) + b.unsqueeze(0),
    lambda x, w, b: F.linear(x, w) + b.double(),
    lambda x, w, b: F.linear(x, w) - b,
    lambda x, w, b: F.linear(x[0], w) + b,
    lambda x, w, b: F.linear(x, w) + F.linear(x, w).relu(),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(NAME, program, X, W, B)


def test_product_is_used_elsewhere() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w)
        return (y + b) * y

    missed(NAME, program, X, W, B)


def test_bias_is_made_of_the_product() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        return y + y.sum(0)

    missed(NAME, program, X, W)


def test_written_in_between() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w)
        x.mul_(2)
        return y + b

    missed(NAME, program, X, W.detach(), B)


def test_autocast() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w) + b  # float32: the product is rounded before
        return y + 1

    missed(NAME, program, X, W.detach(), B)


def test_autocast_ends_in_between() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, w)
        return y + b.bfloat16()

    missed(NAME, program, X, W.detach(), B)


def test_dynamic_batch() -> None:
    assert fired(NAME, lambda x, w, b: (x @ w.t() + b).relu(), X, W, B, dynamic=True) == 1
