"""Reorderings in a row become one, and none where they cancel."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "compose_permutes"
X = torch.randn(2, 3, 4, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        a = x.transpose(0, 1).permute(0, 2, 1).relu()
        b = x.mT.mT.relu().permute(1, 2, 0)
        return a + b + x.movedim(0, 2).movedim(0, 1).mT.tanh().sum()

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
permute_1 = permute(x, [1, 2, 0])
a = relu(permute_1)
relu_1 = relu(x)
b = permute(relu_1, [1, 2, 0])
add = add(a, b)
permute_2 = permute(x, [2, 0, 1])
tanh = tanh(permute_2)
sum_1 = sum(tanh)
add_1 = add(add, sum_1)
return add_1""",
    )


def test_used_in_between() -> None:
    def program(x: Tensor) -> Tensor:
        turned = x.mT
        return turned.mT.relu() + turned.sum()

    assert fired(NAME, program, X) == 1


def test_apart() -> None:
    missed(NAME, lambda x: x.mT.relu().mT + x, X)


def test_view_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        x.mT.mT[0] = 1
        return x.transpose(0, 1).transpose(0, 1).add_(2)

    rewrite(NAME, program, (X.detach(),))


def test_returned() -> None:
    rewrite(NAME, lambda x: (x.mT.mT, x.permute(1, 0, 2).mT), (X,))


def test_grad_modes() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            turned = x.mT
        return turned.mT * x

    missed(NAME, program, X)


def test_dynamic_batch() -> None:
    assert fired(NAME, lambda x: x.mT.mT.relu(), X, dynamic=True) == 1
