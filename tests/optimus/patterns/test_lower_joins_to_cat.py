"""Every join becomes a cat or a stack."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import missed, rewrite

NAME = "lower_joins_to_cat"
X = torch.randn(4, 4, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        row, cube = x.sum(0), x.view(2, 2, 4)
        return (
            torch.hstack([x, x]),
            torch.hstack([row, row]),
            torch.vstack([x, x]),
            torch.vstack([row, row]),
            torch.dstack([x, x]),
            torch.dstack([cube, cube]),
            torch.column_stack([x, x]),
            torch.column_stack([row, row]),
        )

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
row = sum(x, 0)
cube = reshape(x, [2, 2, 4])
hstack = cat([x, x], 1)
hstack_1 = cat([row, row])
vstack = cat([x, x])
vstack_1 = stack([row, row])
dstack = stack([x, x], 2)
dstack_1 = cat([cube, cube], 2)
column_stack = cat([x, x], 1)
column_stack_1 = stack([row, row], 1)
return hstack, hstack_1, vstack, vstack_1, dstack, dstack_1, column_stack, column_stack_1""",
    )


def test_parts_of_unequal_rank() -> None:
    def program(x: Tensor) -> Tensor:
        row = x.sum(0)
        return torch.vstack([x, row]) + torch.column_stack([x, row])[:, :4].sum()

    missed(NAME, program, X)


def test_numbers_and_vectors_of_a_dstack() -> None:
    def program(x: Tensor) -> Tensor:
        row, number = x.sum(0), x.sum()
        joined = torch.dstack([row, row]).sum() + torch.hstack([number, number]).sum()
        return joined + torch.vstack([number, number]).sum()

    missed(NAME, program, X)
