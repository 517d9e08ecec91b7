"""Products of matrices of equal shapes become one."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "batch_matmuls"
X = torch.randn(5, 3, 2, 4, requires_grad=True)
Y = torch.randn(3, 5, 4, 2, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([torch.bmm(x[:, i], y[i]) for i in (2, 0, 1)])

    assert_expected_inline(
        rewrite(NAME, program, (X, Y)).text,
        """\
flatten = flatten(x, 0, 1)
movedim = transpose(y, 0, 1)
flatten_1 = flatten(movedim, 0, 1)
bmm_3 = bmm(flatten, flatten_1)
unflatten = unflatten(bmm_3, 0, [-1, 3])
unbind_2 = unbind(unflatten, 1)
getitem_12 = getitem(unbind_2, 0)
getitem_13 = getitem(unbind_2, 1)
getitem_14 = getitem(unbind_2, 2)
stack = stack([getitem_14, getitem_12, getitem_13])
return stack""",
    )


def test_heads() -> None:
    """Stacks of any number of dimensions."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([x[:, i, None] @ y[i, :, None] for i in range(3)])

    assert fired(NAME, program, X, Y) == 1


def test_sizes() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([torch.bmm(x[:, i], x[:, i].mT) for i in range(3)])

    assert fired(NAME, program, torch.randn(0, 3, 2, 4)) == 1
    assert fired(NAME, program, X.detach(), dynamic=True) == 1


def test_copies() -> None:
    """Factors that are apart are copied, but for the knob."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([torch.bmm(x[:, i].sin(), y[i].cos()) for i in range(2)])

    result = rewrite(NAME, program, (X, Y))
    assert result.fired == 1 and result.text.count("= stack(") == 3


OTHER: list[Program] = [
    lambda x, y: torch.bmm(x[:, 0], y[0]) + torch.bmm(torch.bmm(x[:, 0], y[0]), x[:, 1, :, :2]),
    lambda x, y: torch.bmm(x[:, 0], y[0]).sum() + torch.bmm(x[:2, 0], y[0, :2]).sum(),
    lambda x, y: torch.bmm(x[:, 0], y[0]) + torch.bmm(x[:, 0], y[0]),
    lambda x, y: torch.bmm(x[:, 0], y[0]) + torch.bmm(x[:, 1].detach(), y[1]),
    lambda x, y: (x[:, 0] @ y[0]) + (x[:, 1] @ y[1, :1]),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(NAME, program, X, Y)
