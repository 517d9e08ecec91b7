"""Linears of odd sizes are padded, if that is faster."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from optimus.patterns.kernels.pad_gemms import PadGemms, forms
from optimus.pipeline import select
from tests.optimus.patterns.kernels import fuse, missed
from tests.optimus.patterns.rewriting import Program, rewrite

PATTERN = PadGemms()
X = torch.randn(3, 6, requires_grad=True)
W, B = torch.randn(5, 6, requires_grad=True), torch.randn(5, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.linear(x, w, b), F.linear(x[:, :4], w[:, :4]), x @ w[:4].t()

    assert_expected_inline(
        fuse(PATTERN, program, (X, W, B)).text,
        """\
pad = pad(x, [0, 2])
pad_1 = pad(w, [0, 2, 0, 3])
pad_2 = pad(b, [0, 3])
linear_3 = linear(pad, pad_1, pad_2)
narrow = narrow(linear_3, 1, 0, 5)
clone = clone(narrow, memory_format=torch.contiguous_format)
getitem = narrow(x, 1, 0, 4)
getitem_1 = narrow(w, 1, 0, 4)
pad_3 = pad(getitem_1, [0, 0, 0, 3])
linear_4 = linear(getitem, pad_3)
narrow_1 = narrow(linear_4, 1, 0, 5)
clone_1 = clone(narrow_1, memory_format=torch.contiguous_format)
getitem_2 = narrow(w, 0, 0, 4)
pad_4 = pad(x, [0, 2])
pad_5 = pad(getitem_2, [0, 2, 0, 0])
linear_5 = linear(pad_4, pad_5)
return clone, clone_1, linear_5""",
    )


def test_sizes_and_types() -> None:
    """Eight of a half type, four of float32; a multiple of one's own; an empty batch."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).relu()

    for dtype, pads in ((torch.float32, "[0, 2, 0, 3]"), (torch.bfloat16, "[0, 2, 0, 3]")):
        result = fuse(PATTERN, program, (X.to(dtype).detach(), W.to(dtype).detach()))
        assert pads in result.text
    assert "[0, 10, 0, 11]" in fuse(PadGemms(multiple=16), program, (X, W)).text
    assert fuse(PATTERN, program, (X[:0].detach(), W)).fired == 1
    assert fuse(PATTERN, torch.nn.Linear(6, 5), (X,), dynamic=True).fired == 1


def test_under_autocast() -> None:
    """The type of the result counts."""

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w, b)

    inputs = (torch.randn(3, 8), torch.randn(12, 8), torch.randn(12))
    assert "[0, 0, 0, 4]" in fuse(PATTERN, program, inputs).text


def test_what_is_not_finite_stays_where_it_is() -> None:
    x, w = X.detach().clone(), W.detach().clone()
    x[0, 1], w[1, 2] = torch.inf, torch.nan

    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    assert fuse(PATTERN, program, (x.requires_grad_(), w.requires_grad_())).fired == 1


OTHER: list[Program] = [
    lambda x, w, b: F.linear(x[0], w, b),
    lambda x, w, b: F.linear(x.double(), w.double()),
    lambda x, w, b: F.linear(x[:, :4], w[:4, :4]),
    lambda x, w, b: F.linear(x.long(), w.long()),
    lambda x, w, b: F.linear(x, w[0]),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(PATTERN, program, X, W, B)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is measured")
def test_never_unasked_on_a_cpu() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    wide = (torch.randn(2, 33), torch.randn(35, 33))
    assert "no GPU" in rewrite("pad_gemms", program, wide).misses
    assert "less than 32" in rewrite("pad_gemms", program, (X, W)).misses


def test_what_is_timed_is_what_is_put_in() -> None:
    for inputs in ((X, W), (X, W, B)):
        for form in forms("torch.float32", 2, 3):
            torch.testing.assert_close(form(*inputs), F.linear(*inputs))


def test_names_of_pytorch() -> None:
    for name in ("pad_aten_mm_pass", "shape_padding_multiplier"):
        assert "pad_gemms" in select(name).names
