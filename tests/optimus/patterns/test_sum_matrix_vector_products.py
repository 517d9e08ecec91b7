"""Products with one column or row become sums of products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from optimus.testing import check_program
from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "sum_matrix_vector_products"
X = torch.randn(5, 3, 4, requires_grad=True)
W, B = torch.randn(1, 4, requires_grad=True), torch.randn(1, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.linear(x, w, b)
        return y, torch.bmm(x, x[:, :1].mT), torch.bmm(y.mT, x)

    assert_expected_inline(
        rewrite(NAME, program, (X, W, B)).text,
        """\
mul = mul(x, w)
sum_1 = sum(mul, 2, True)
add = add(sum_1, b)
getitem = narrow(x, 1, 0, 1)
getattr_1 = transpose(getitem, 1, 2)
transpose = transpose(getattr_1, 1, 2)
mul_1 = mul(x, transpose)
sum_2 = sum(mul_1, 2, True)
getattr_2 = transpose(add, 1, 2)
transpose_1 = transpose(getattr_2, 1, 2)
mul_2 = mul(transpose_1, x)
sum_3 = sum(mul_2, 1, True)
return add, sum_2, sum_3""",
    )


def test_half_precision() -> None:
    """Factors are read as the GEMM would read them; the sum is rounded once."""

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w, b)

    assert_expected_inline(
        rewrite(NAME, program, (X.detach(), W.detach(), B)).text,
        """\
_enter_autocast = _enter_autocast('cpu', bfloat16, True, None)
to = to(x, dtype=bfloat16)
to_1 = to(to, dtype=float32)
to_2 = to(w, dtype=bfloat16)
to_3 = to(to_2, dtype=float32)
to_4 = to(b, dtype=bfloat16)
to_5 = to(to_4, dtype=float32)
mul = mul(to_1, to_3)
sum_1 = sum(mul, 2, True)
add = add(sum_1, to_5)
to_6 = to(add, dtype=bfloat16)
_exit_autocast = _exit_autocast(_enter_autocast)
return to_6""",
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        module = nn.Linear(64, 1).to(dtype)
        report = check_program(module, (torch.randn(7, 64, dtype=dtype),), [NAME])
        assert report.fired(NAME) == 1


def test_sizes() -> None:
    def program(x: Tensor) -> Tensor:
        return F.linear(x, W, B)

    assert fired(NAME, program, torch.randn(0, 4)) == fired(NAME, program, X, dynamic=True) == 1


OTHER: list[Program] = [
    lambda x, w, b: F.linear(x[0, 0], w, b),
    lambda x, w, b: F.linear(x, x[0]),
    lambda x, w, b: torch.bmm(x, x.mT),
    lambda x, w, b: torch.baddbmm(b, x, x.mT[..., :1], beta=2),
    lambda x, w, b: F.linear(x.long(), w.long()),
    lambda x, w, b: F.linear(x.repeat(1, 1, 300), w.repeat(1, 300)),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(NAME, program, X, W, B)
