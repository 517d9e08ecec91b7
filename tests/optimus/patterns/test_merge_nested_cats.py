"""Everything is put together at once."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "merge_nested_cats"
X, Y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 2, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        inner = torch.cat([x.relu(), torch.cat([y, x], -1)], 1)
        return torch.cat([inner, y.relu(), inner, x], 1)

    assert_expected_inline(
        rewrite(NAME, program, (X, Y)).text,
        """\
relu = relu(x)
relu_1 = relu(y)
cat_4 = cat([relu, y, x, relu_1, relu, y, x, x], 1)
return cat_4""",
    )


def test_used_elsewhere() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        inner = torch.cat([x, y], 1)
        return torch.cat([inner, y], 1).sum() + inner

    missed(NAME, program, X, Y)


def test_other_dimension() -> None:
    missed(NAME, lambda x: torch.cat([torch.cat([x, x], 0), torch.cat([x, x], 0)], 1), X)


def test_dtype_in_between() -> None:
    def program(number: Tensor, half: Tensor) -> Tensor:
        inner = torch.cat([number, half], 0)
        return torch.cat([inner, half.double()], 0)

    number = torch.tensor([2**24 + 1, 2**24 + 3])
    missed(NAME, program, number, torch.randn(3, requires_grad=True))


def test_part_is_written_in_between() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        inner = torch.cat([x, y], 1)
        x.mul_(2)
        return torch.cat([inner, x], 1)

    assert "writes to memory" in missed(NAME, program, X.detach(), Y)


def test_inner_is_written() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        inner = torch.cat([x, y], 1)
        inner[0] = 1
        return torch.cat([inner, x], 1)

    missed(NAME, program, X.detach(), Y)


def test_grad_modes() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            inner = torch.cat([x, y], 1)
        return torch.cat([inner, x], 1)

    assert "grad modes" in missed(NAME, program, X, Y)


def test_dynamic_batch() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([torch.cat([x, y], 1), y], 1)

    assert fired(NAME, program, X, Y, dynamic=True) == 1
