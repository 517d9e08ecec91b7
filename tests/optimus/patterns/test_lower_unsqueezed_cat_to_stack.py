"""A cat of tensors that were given a dimension for it is a stack."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import missed, rewrite

NAME = "lower_unsqueezed_cat_to_stack"
X, Y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a = torch.cat([x[:, None].relu(), x.relu().unsqueeze(1)], 1)
        b = torch.cat([x.unsqueeze(1), y.view(4, 1, 6), x.unflatten(0, (4, 1))], -2)
        return a.sum(1) + b.sum(1)

    assert_expected_inline(
        rewrite(NAME, program, (X, Y)).text,
        """\
getitem = unsqueeze(x, 1)
relu = relu(getitem)
relu_1 = relu(x)
unsqueeze = unsqueeze(relu_1, 1)
a = cat([relu, unsqueeze], 1)
stack = stack([x, y, x], 1)
sum_1 = sum(a, 1)
sum_2 = sum(stack, 1)
add = add(sum_1, sum_2)
return add""",
    )


def test_dynamic_batch() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.unsqueeze(1), y.view(-1, 1, 6)], 1).sum(1)

    assert rewrite(NAME, program, (X, Y), dynamic=True).fired == 1


def test_other_dimension() -> None:
    missed(NAME, lambda x, y: torch.cat([x.unsqueeze(1), y.unsqueeze(1)], 0).sum(0), X, Y)


def test_one_part_as_it_is() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.unsqueeze(1), y[:, None].relu()], 1).sum(1)

    missed(NAME, program, X, Y)


def test_reshape_to_size_one_that_is_no_unsqueeze() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.reshape(6, 1, 4), y.reshape(6, 1, 4)], 1).sum(1)

    missed(NAME, program, X, Y)


def test_single_part() -> None:
    missed(NAME, lambda x: torch.cat([x.unsqueeze(1)], 1).sum(1), X)


def test_source_is_written_in_between() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a = x.unsqueeze(1)
        x.mul_(2)
        joined = torch.cat([a, y.unsqueeze(1)], 1)
        x.add_(1)
        return joined

    rewrite(NAME, program, (X.detach(), Y))
