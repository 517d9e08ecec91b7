"""Softmaxes of parts of one tensor become one."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "batch_softmaxes"
X = torch.randn(5, 12, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([part.softmax(-1) for part in x.split(4, 1)], 1)

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
softmax_3 = softmax(unflatten, 2)
unbind = unbind(softmax_3, 1)
getitem = getitem(unbind, 0)
getitem_1 = getitem(unbind, 1)
getitem_2 = getitem(unbind, 2)
stack = stack([getitem, getitem_1, getitem_2], 1)
return stack""",
    )


def test_over_the_batch() -> None:
    """Parts of unequal widths, where the softmax runs over another dimension."""

    def program(x: Tensor) -> Tensor:
        parts = x.split([2, 4, 6], 1)
        return torch.cat([torch.log_softmax(parts[i], 0) for i in (2, 0, 1)], 1)

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
log_softmax_3 = log_softmax(x, 0)
split_1 = split(log_softmax_3, [2, 4, 6], 1)
getitem_3 = getitem(split_1, 0)
getitem_4 = getitem(split_1, 1)
getitem_5 = getitem(split_1, 2)
cat = cat([getitem_5, getitem_3, getitem_4], 1)
return cat""",
    )


def test_sizes() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([part.softmax(-1, dtype=torch.float64) for part in x.split(4, -1)])

    for x in (torch.randn(12), torch.randn(2, 3, 12), torch.randn(0, 12)):
        assert fired(NAME, program, x) == 1
    assert fired(NAME, program, X, dynamic=True) == 1


OTHER: list[Program] = [
    lambda x: x[:, :4].softmax(0) + x[:, 4:8].softmax(1),
    lambda x: x[:, :4].softmax(1) + x[:, 4:8].log_softmax(1),
    lambda x: x[:, :4].softmax(1) + x[:, 4:8].softmax(1, dtype=torch.float64),
    lambda x: x[:, :4].softmax(1).sum() + x[:, 4:10].softmax(1).sum(),
    lambda x: x[:, :4].softmax(1) + (x[:, 4:8] + 1).softmax(1),
    lambda x: (x[:, :4].softmax(1) + x[:, 4:8]).softmax(1),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(NAME, program, X)
