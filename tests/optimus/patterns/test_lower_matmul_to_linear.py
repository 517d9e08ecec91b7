"""Products with a matrix become linears."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "lower_matmul_to_linear"
X, W, B = torch.randn(4, 6), torch.randn(6, 3, requires_grad=True), torch.randn(3)
CUBE = torch.randn(2, 4, 6, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor, cube: Tensor) -> tuple[Tensor, ...]:
        y = x @ w + torch.mm(x, w) + torch.addmm(b, x, w) + torch.ops.aten.mm(x, w)
        stacks = torch.matmul(cube, cube.mT)
        return y, cube @ w, y.t() @ cube, stacks, torch.matmul(cube, w.t().t())

    assert_expected_inline(
        rewrite(NAME, program, (X, W, B, CUBE)).text,
        """\
transpose = transpose(w, 0, 1)
linear = linear(x, transpose)
transpose_1 = transpose(w, 0, 1)
linear_1 = linear(x, transpose_1)
add = add(linear, linear_1)
transpose_2 = transpose(w, 0, 1)
linear_2 = linear(x, transpose_2, b)
add_1 = add(add, linear_2)
transpose_3 = transpose(w, 0, 1)
linear_3 = linear(x, transpose_3)
y = add(add_1, linear_3)
getattr_1 = transpose(cube, 1, 2)
bmm = bmm(cube, getattr_1)
transpose_4 = transpose(w, 0, 1)
linear_4 = linear(cube, transpose_4)
t = transpose(y, 0, 1)
transpose_5 = transpose(cube, 1, 2)
linear_5 = linear(transpose_5, t)
transpose_6 = transpose(linear_5, 1, 2)
clone = clone(transpose_6, memory_format=torch.contiguous_format)
transpose_7 = transpose(w, 0, 1)
linear_6 = linear(cube, transpose_7)
return y, linear_4, clone, bmm, linear_6""",
    )


OTHER: list[Program] = [
    lambda x, w: x[0] @ w,
    lambda x, w: x @ w[:, 0],
    lambda x, w: x[0] @ x[0],
    lambda x, w: torch.addmm(x[:, :3], x, w),
    lambda x, w: torch.addmm(x[0, :1], x, w),
    lambda x, w: torch.addmm(w[0], x, w, beta=0.5),
    lambda x, w: torch.addmm(w[0], x, w, alpha=2),
    lambda x, w: x.expand(2, 2, 4, 6) @ x.mT.expand(2, 2, 6, 4),
    lambda x, w: x.expand(2, 4, 6) @ x.mT.unsqueeze(0),
    lambda x, w: x.expand(2, 4, 6) @ x[0],
]


@pytest.mark.parametrize("program", OTHER)
def test_other_product(program: Program) -> None:
    missed(NAME, program, X, W)


def test_integers() -> None:
    missed(NAME, lambda x: x @ x.t(), torch.arange(6).view(2, 3))


def test_dynamic_batch() -> None:
    def program(cube: Tensor, w: Tensor) -> Tensor:
        return (cube @ w).sum() + torch.bmm(cube, cube.mT).sum() + (cube @ cube.mT).sum()

    assert fired(NAME, program, CUBE, W, dynamic=True) == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast(enabled: bool) -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = torch.addmm(b, x, w) + x @ w
        return y.float() @ w.t()

    result = rewrite(NAME, program, (X, W.detach(), B))
    assert result.fired == 3 and "matmul" not in result.text


def test_low_precision() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x, w) + x @ w

    rewrite(NAME, program, (X.bfloat16(), W.detach().bfloat16(), B.bfloat16()))


def test_empty_batch() -> None:
    rewrite(NAME, lambda x, w: x @ w, (X[:0].clone(), W))


def test_operand_is_written_later() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        w.mul_(2)
        return y + x @ w

    assert fired(NAME, program, X, W.detach()) == 2
