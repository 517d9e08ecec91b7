"""Products of tiny matrices become sums of products, if that is faster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from optimus.patterns.kernels.decompose_skinny_gemms import DecomposeSkinnyGemms, forms
from optimus.pipeline import select
from tests.optimus.patterns.kernels import fuse, missed
from tests.optimus.patterns.rewriting import Program, rewrite

PATTERN = DecomposeSkinnyGemms()
X = torch.randn(5, 3, 4, requires_grad=True)
W, B = torch.randn(2, 4, requires_grad=True), torch.randn(2, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, w, b)
        return torch.baddbmm(b, x, torch.bmm(x.mT, y))

    assert_expected_inline(
        fuse(PATTERN, program, (X, W, B)).text,
        """\
unsqueeze = unsqueeze(x, 2)
mul = mul(unsqueeze, w)
sum_1 = sum(mul, 3)
add = add(sum_1, b)
getattr_1 = transpose(x, 1, 2)
transpose = transpose(add, 1, 2)
unsqueeze_1 = unsqueeze(transpose, 1)
unsqueeze_2 = unsqueeze(getattr_1, 2)
mul_1 = mul(unsqueeze_2, unsqueeze_1)
sum_2 = sum(mul_1, 3)
transpose_1 = transpose(sum_2, 1, 2)
unsqueeze_3 = unsqueeze(transpose_1, 1)
unsqueeze_4 = unsqueeze(x, 2)
mul_2 = mul(unsqueeze_4, unsqueeze_3)
sum_3 = sum(mul_2, 3)
add_1 = add(sum_3, b)
return add_1""",
    )


def test_under_autocast() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w, b)

    result = fuse(PATTERN, program, (X.detach(), W.detach(), B))
    assert_expected_inline(
        result.text,
        """\
_enter_autocast = _enter_autocast('cpu', bfloat16, True, None)
to = to(x, dtype=bfloat16)
to_1 = to(to, dtype=float32)
to_2 = to(w, dtype=bfloat16)
to_3 = to(to_2, dtype=float32)
to_4 = to(b, dtype=bfloat16)
to_5 = to(to_4, dtype=float32)
unsqueeze = unsqueeze(to_1, 2)
mul = mul(unsqueeze, to_3)
sum_1 = sum(mul, 3)
add = add(sum_1, to_5)
to_6 = to(add, dtype=bfloat16)
_exit_autocast = _exit_autocast(_enter_autocast)
return to_6""",
    )


def test_sizes() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w, b)

    assert fuse(PATTERN, program, (X, W, B), dynamic=True).fired == 1
    assert fuse(PATTERN, program, (X[:0].detach(), W, B)).fired == 1
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert fuse(PATTERN, program, [t.detach().to(dtype) for t in (X, W, B)]).fired == 1


def test_what_is_not_finite_stays_where_it_is() -> None:
    x = X.detach().clone()
    x[0, 1, 2], x[2, 0, 0] = torch.inf, torch.nan
    assert fuse(PATTERN, F.linear, (x.requires_grad_(), W)).fired == 1


OTHER: list[Program] = [
    lambda x, w, b: F.linear(x[0, 0], w, b),
    lambda x, w, b: F.linear(x, w[:1]),
    lambda x, w, b: torch.bmm(x[:, :1], x.mT),
    lambda x, w, b: F.linear(x.long(), w.long()),
    lambda x, w, b: torch.baddbmm(b, x, w.t().expand(5, 4, 2), alpha=2),
    lambda x, w, b: F.linear(x.repeat(1, 1, 10), w.repeat(1, 10)),
    lambda x, w, b: F.linear(x.repeat(1, 12, 3), w.repeat(20, 3)),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(PATTERN, program, X, W, B)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is measured")
def test_never_unasked_on_a_cpu() -> None:
    misses = rewrite("decompose_skinny_gemms", F.linear, (X, W, B)).misses
    assert "no GPU" in misses


def test_what_is_timed_is_what_is_put_in() -> None:
    y, c = torch.randn(5, 4, 2), torch.randn(5, 3, 2)
    for name, inputs in (("linear", (X, W, B)), ("bmm", (X, y)), ("baddbmm", (X, y, c))):
        types = [part for t in inputs for part in (t.dim(), str(t.dtype))]
        ours, plain = forms(name, "torch.float32", *types)
        torch.testing.assert_close(ours(*inputs), plain(*inputs))


def test_name_of_pytorch() -> None:
    assert "decompose_skinny_gemms" in select("decompose_mm_pass").names
