"""Two linears in a row become one, where that is less work."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from optimus.testing import check_program
from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "fold_consecutive_linears"
X = torch.randn(16, 4, requires_grad=True)
A, B = torch.randn(12, 4, requires_grad=True), torch.randn(3, 12, requires_grad=True)
BIAS_A, BIAS_B = torch.randn(12, requires_grad=True), torch.randn(3, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, first: Tensor, a: Tensor, second: Tensor, b: Tensor) -> Tensor:
        y = F.linear(F.linear(x, first, a), second, b)
        return y + F.linear(x @ first.t(), second, b) + F.linear(F.linear(x, first, a), second)

    assert_expected_inline(
        rewrite(NAME, program, (X, A, BIAS_A, B, BIAS_B)).text,
        """\
transpose = transpose(first, 0, 1)
linear_6 = linear(second, transpose)
linear_7 = linear(a, second, b)
linear_8 = linear(x, linear_6, linear_7)
transpose_1 = transpose(first, 0, 1)
linear_9 = linear(second, transpose_1)
linear_10 = linear(x, linear_9, b)
add = add(linear_8, linear_10)
transpose_2 = transpose(first, 0, 1)
linear_11 = linear(second, transpose_2)
linear_12 = linear(a, second)
linear_13 = linear(x, linear_11, linear_12)
add_1 = add(add, linear_13)
return add_1""",
    )


OTHER: list[Program] = [
    lambda x, v, w: F.linear(F.linear(x, v).relu(), w),
    lambda x, v, w: F.linear((y := F.linear(x, v)), w).sum() + y.sum(),
    lambda x, v, w: F.linear(F.linear(x[0], v), w),
    lambda x, v, w: F.linear(F.linear(x[:2], v), w),
    lambda x, v, w: F.linear(F.linear(x, v[:1]), w[:, :1]),
    lambda x, v, w: F.linear(F.linear(x.bfloat16(), v.bfloat16()), w.bfloat16()),
    lambda x, v, w: F.linear(w, F.linear(w.t().repeat(4, 2)[:16, :4], v).repeat(1, 1)),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(NAME, program, X, A, B)


def test_three_in_a_row_and_more_dimensions() -> None:
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 3))
    assert check_program(model, (torch.randn(32, 4),), [NAME]).fired(NAME) == 2
    assert check_program(model, (torch.randn(4, 8, 4),), [NAME]).fired(NAME) == 2


def test_sizes_and_types() -> None:
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 3))
    x = torch.randn(16, 4)
    assert check_program(model, (x,), [NAME], dynamic=True).fired(NAME) == 1
    assert check_program(model, (x[:0],), [NAME]).fired(NAME) == 0
    assert check_program(model.double(), (x.double(),), [NAME]).fired(NAME) == 1


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(16, 4)
    x[3] = torch.nan
    model = nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 3))
    assert check_program(model, (x,), [NAME]).fired(NAME) == 1


def test_autocast() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(F.linear(x, v), w)

    missed(NAME, program, X, A, B)


def test_autocast_ends_in_between() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x, v)
        return F.linear(y.float(), w)

    missed(NAME, program, X, A, B)


def test_gradients_stop_in_between() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.linear(x, v)
        return F.linear(y, w)

    missed(NAME, program, X, A, B)


def test_a_weight_is_written_in_between() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, v)
        v.mul_(2)
        return F.linear(y, w)

    missed(NAME, program, X.detach(), A.detach().clone(), B.detach())


def test_without_gradients_there_is_less_to_save() -> None:
    assert fired(
        NAME, lambda x, v, w: F.linear(F.linear(x, v), w), *(t.detach() for t in (X, A, B))
    )
