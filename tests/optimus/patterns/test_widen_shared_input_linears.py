"""Linears of one input become one wide linear."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "widen_shared_input_linears"
X = torch.randn(5, 4, requires_grad=True)
W = [torch.randn(n, 4, requires_grad=True) for n in (3, 2, 3)]
B = [torch.randn(n, requires_grad=True) for n in (3, 2, 3)]
F = torch.nn.functional


def test_golden() -> None:
    """Outputs that are used alike stand side by side; a missing bias is zero."""

    def program(x: Tensor, w: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        one, gate = F.linear(x, w[0], b[0]), F.linear(x, w[1])
        return [one.relu(), gate.softmax(1), F.linear(x, w[2], b[2]).relu()]

    assert_expected_inline(
        rewrite(NAME, program, (X, W, B)).text,
        """\
cat = cat([w_0, w_2, w_1])
new_zeros = new_zeros(b_0, [2])
cat_1 = cat([b_0, b_2, new_zeros])
linear = linear(x, cat, cat_1)
split = split(linear, [3, 3, 2], 1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
getitem_2 = getitem(split, 2)
relu = relu(getitem)
softmax = softmax(getitem_2, 1)
relu_1 = relu(getitem_1)
return relu, softmax, relu_1""",
    )


def test_views_of_one_input() -> None:
    """Equal views are one input; weights stored transposed are joined as a linear reads them."""

    def program(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return x.transpose(1, 2) @ a, x.mT @ b

    x = torch.randn(2, 4, 3, requires_grad=True)
    weights = [torch.randn(4, n, requires_grad=True) for n in (2, 5)]
    assert_expected_inline(
        rewrite(NAME, program, (x, *weights)).text,
        """\
transpose = transpose(x, 1, 2)
transpose_1 = transpose(a, 0, 1)
transpose_2 = transpose(b, 0, 1)
cat = cat([transpose_1, transpose_2])
linear_2 = linear(transpose, cat)
split = split(linear_2, [2, 5], 2)
getitem = getitem(split, 0)
clone = clone(getitem, memory_format=torch.contiguous_format)
getitem_1 = getitem(split, 1)
clone_1 = clone(getitem_1, memory_format=torch.contiguous_format)
return clone, clone_1""",
    )


def test_parts_of_one_weight() -> None:
    """Weights that lie one above the other are not copied."""

    def program(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = w.chunk(3)
        return torch.stack([F.linear(x, q).tanh(), F.linear(x, k).exp(), F.linear(x, v).sin()])

    result = rewrite(NAME, program, (X, torch.randn(9, 4, requires_grad=True)))
    assert result.fired == 1 and "cat" not in result.text


def test_equal_calls() -> None:
    """A weight that is applied twice is computed with once."""

    def program(x: Tensor, w: list[Tensor]) -> Tensor:
        return F.linear(x, w[0]).relu() + F.linear(x, w[2]).relu() + F.linear(x, w[0]).tanh()

    result = rewrite(NAME, program, (X, W))
    assert result.fired == 1 and "cat([w_0, w_2])" in result.text

    def twice(x: Tensor, w: list[Tensor]) -> Tensor:
        return F.linear(x, w[0]).relu() + F.linear(x, w[0]).tanh()

    missed(NAME, twice, X, W)


def test_shapes() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [F.linear(x, *wb) for wb in zip(W, B, strict=True)]

    for x in (torch.randn(4), torch.randn(2, 3, 4), torch.randn(0, 4)):
        assert fired(NAME, program, x) == 1
    assert fired(NAME, program, X, dynamic=True) == 1


OTHER: list[Program] = [
    lambda x, w, b: (F.linear(x, w[0]), F.linear(x + 1, w[1])),
    lambda x, w, b: (F.linear(x, w[0]), F.linear(x, w[1].detach())),
    lambda x, w, b: (F.linear(x, w[0], b[0]), F.linear(x, w[1], b[1].detach())),
    lambda x, w, b: (F.linear(x, w[0]), F.linear(x, w[1][0])),
    lambda x, w, b: (y := F.linear(x, w[0]), F.linear(x, w[1] + y.sum())),
    lambda x, w, b: (F.linear(x, w[0]), F.linear(x.detach(), w[1])),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(NAME, program, X, W, B)


def test_written_in_between() -> None:
    def program(x: Tensor, w: list[Tensor]) -> tuple[Tensor, Tensor]:
        x = x.clone()
        one = F.linear(x, w[0])
        x[0] = 1.0
        return one, F.linear(x, w[1])

    missed(NAME, program, X, [w.detach() for w in W])


def test_autocast() -> None:
    def program(x: Tensor, w: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [F.linear(x, w[0], b[0]), F.linear(x, w[1], b[1])]

    assert fired(NAME, program, X, W, B) == 1
