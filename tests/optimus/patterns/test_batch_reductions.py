"""Reductions of parts of one tensor become one."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "batch_reductions"
X = torch.randn(5, 3, 4, requires_grad=True)


def test_golden() -> None:
    """Of items; of unequal parts along a dimension that stays."""

    def items(x: Tensor) -> Tensor:
        return torch.stack([part.sum(-1) for part in x.unbind(1)][::-1])

    assert_expected_inline(
        rewrite(NAME, items, (X,)).text,
        """\
sum_4 = sum(x, [2])
unbind_1 = unbind(sum_4, 1)
getitem = getitem(unbind_1, 0)
getitem_1 = getitem(unbind_1, 1)
getitem_2 = getitem(unbind_1, 2)
stack = stack([getitem_2, getitem_1, getitem])
return stack""",
    )

    def parts(x: Tensor) -> Tensor:
        return torch.cat([part.mean(0, keepdim=True) for part in x.split([1, 3], 2)][::-1], 2)

    assert_expected_inline(
        rewrite(NAME, parts, (X,)).text,
        """\
mean_2 = mean(x, [0], True)
split_1 = split(mean_2, [1, 3], 2)
getitem = getitem(split_1, 0)
getitem_1 = getitem(split_1, 1)
cat = cat([getitem_1, getitem], 2)
return cat""",
    )


SAME: list[Program] = [
    lambda x: x.sum(),
    lambda x: x.sum(dim=[]),
    lambda x: x.mean((0, -1)),
    lambda x: x.amax(1),
    lambda x: x.amin(),
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.sum(1, dtype=torch.float64),
]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("reduce", SAME)
def test_same(reduce: Program, dim: int) -> None:
    """Whatever is reduced, and along whatever dimension the items lie."""

    def program(x: Tensor) -> Tensor:
        return torch.stack([reduce(part) for part in x.unbind(dim)])

    assert fired(NAME, program, X) == 1


def test_sizes() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([part.sum(1) for part in x.unbind(1)])

    assert fired(NAME, program, torch.randn(0, 3, 4)) == 1
    assert fired(NAME, program, X, dynamic=True) == 1


OTHER: list[Program] = [
    lambda x: x[:, 0].sum(0).sum() + x[:, 1].sum(1).sum(),
    lambda x: x[:, 0].sum(0) + x[:, 1].mean(0),
    lambda x: x[:, 0].sum(0) + x[:, 1].sum(0, keepdim=True),
    lambda x: x[:, 0].sum(0) + x[:, 1].sum(0, dtype=torch.float64),
    lambda x: x[:, 0].sum(0) + x[:, 1].exp().sum(0),
    lambda x: x[:, :1].sum(1) + x[:, 1:].sum(1),
    lambda x: torch.stack([x[0, 0, i].sum() for i in range(3)]),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(NAME, program, X)
