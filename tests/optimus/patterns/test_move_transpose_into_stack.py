"""Stacks that linears read transposed are made the way round in which they are read."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn import functional as F

from tests.optimus.patterns.rewriting import fired, rewrite

NAME = "move_transpose_into_stack"
X, Y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
W = torch.randn(5, 2)


def test_golden() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        stacked = torch.stack([x, y], 1)
        return F.linear(stacked.transpose(1, 2), w), torch.bmm(stacked, stacked.mT)

    assert_expected_inline(
        rewrite(NAME, program, (X, Y, W)).text,
        """\
stack = stack([x, y], 2)
transpose_1 = transpose(stack, 1, 2)
linear = linear(stack, w)
bmm = bmm(transpose_1, stack)
return linear, bmm""",
    )


def test_towards_the_front() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        stacked = torch.stack([x, y], 1)
        return F.linear(stacked.transpose(0, 1), w)

    assert fired(NAME, program, X, Y, torch.randn(5, 4)) == 1
    assert fired(NAME, program, X, Y, torch.randn(5, 4), dynamic=True) == 1


def test_a_stack_that_is_returned_stays() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        stacked = torch.stack([x, y], 1)
        return F.linear(stacked.transpose(1, 2), w), stacked

    assert fired(NAME, program, X, Y, W) == 0


def test_dimensions_in_between_would_be_moved() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return F.linear(torch.stack([x, y], 0).transpose(0, 2), w)

    assert fired(NAME, program, X, Y, W) == 0


def test_no_linear_reads_it() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        stacked = torch.stack([x, y], 1)
        return torch.bmm(stacked, stacked.transpose(1, 2))

    assert fired(NAME, program, X, Y) == 0
