"""What was put together is taken as it was."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "cancel_cat_split"
X, Y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 2, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        a, b = torch.split(torch.cat([x, y], 1), [6, 2], 1)
        c, d = torch.split(torch.cat([x, y, x.tanh(), y.tanh()], 1), [8, 8], 1)
        e = torch.cat([y.exp(), x.exp()], 1)
        f = torch.cat([x.sin(), y.sin()], 1)
        return [part.relu() for part in (a, b, c, d, e[:, 1:5], e[:, 7], f[:, 6:], f)]

    assert_expected_inline(
        rewrite(NAME, program, (X, Y)).text,
        """\
tanh = tanh(x)
tanh_1 = tanh(y)
cat_2 = cat([x, y], 1)
cat_3 = cat([tanh, tanh_1], 1)
exp = exp(y)
exp_1 = exp(x)
narrow = narrow(exp, 1, 1, 1)
narrow_1 = narrow(exp_1, 1, 0, 3)
cat_4 = cat([narrow, narrow_1], 1)
select = select(exp_1, 1, 5)
sin = sin(x)
sin_1 = sin(y)
f = cat([sin, sin_1], 1)
relu = relu(x)
relu_1 = relu(y)
relu_2 = relu(cat_2)
relu_3 = relu(cat_3)
relu_4 = relu(cat_4)
relu_5 = relu(select)
relu_6 = relu(sin_1)
relu_7 = relu(f)
return relu, relu_1, relu_2, relu_3, relu_4, relu_5, relu_6, relu_7""",
    )


def test_whole_is_used_too() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        joined = torch.cat([x, y], 1)
        a, b = torch.split(joined, [4, 4], 1)
        return (a + b).sum() + joined

    missed(NAME, program, X, Y)


def test_parts_that_overlap_too_much() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        joined = torch.cat([x, y, x], 1)
        return joined[:, :10].sum() + joined[:, 3:13].sum()

    missed(NAME, program, X, Y)


def test_other_dimension() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a, b = torch.split(torch.cat([x, y], 1), [2, 2], 0)
        return a * b

    missed(NAME, program, X, Y)


def test_same_part_twice() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.split(torch.cat([x, x], 1), 6, 1)
        return a * b.relu()

    assert "cat" not in rewrite(NAME, program, (X,)).text


def test_part_is_written_in_between() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        joined = torch.cat([x, y], 1)
        x.mul_(2)
        a, b = torch.split(joined, [6, 2], 1)
        return a + b.sum() + x

    assert "writes to memory" in missed(NAME, program, X.detach(), Y.detach())


def test_piece_is_written() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a, b = torch.split(torch.cat([x, y], 1), [6, 2], 1)
        a[0] = 1
        return a + b.sum() + x

    reason = missed(NAME, program, X.detach(), Y.detach())
    assert "writes to memory" in reason or "tensor of its own" in reason


def test_dtype_and_gradient_of_the_whole() -> None:
    def program(x: Tensor, n: Tensor) -> Tensor:
        a, b = torch.split(torch.cat([x, n], 1), [6, 6], 1)
        return a * b

    assert fired(NAME, program, X.detach(), torch.ones(4, 6, dtype=torch.int64)) == 1
    result = rewrite(NAME, program, (X, torch.ones(4, 6)))
    assert result.fired == 1 and "cat" in result.text


def test_grad_modes() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            joined = torch.cat([x, y], 1)
        a, b = torch.split(joined, [6, 2], 1)
        return a * x + b.sum()

    missed(NAME, program, X, Y)


def test_empty_parts() -> None:
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        joined = torch.cat([x, y[:, :0].relu(), y], 1)
        return [part + 1 for part in torch.split(joined, [6, 0, 2], 1)]

    rewrite(NAME, program, (X, Y))


def test_returned_parts() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.split(torch.cat([x, y], 1), [6, 2], 1)

    rewrite(NAME, program, (X, Y))


def test_dynamic_batch() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a, b = torch.split(torch.cat([x, y], 1), [6, 2], 1)
        return a + b.sum()

    assert fired(NAME, program, X, Y, dynamic=True) == 1
