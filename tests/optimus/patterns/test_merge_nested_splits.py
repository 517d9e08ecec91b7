"""Parts of parts are cut at once."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "merge_nested_splits"
X = torch.randn(4, 16, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        a, b, c = torch.split(x, [8, 4, 4], 1)
        d, e = torch.split(a, [6, 2], 1)
        f, g, h = c[:, :1], c[:, 2:], torch.tanh(x)[:, 4:12][:, 1:3]
        return [part.relu() for part in (d, e, b, f, g, h)]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
split_3 = split(x, [6, 2, 4, 1, 1, 2], 1)
getitem_9 = getitem(split_3, 0)
getitem_10 = getitem(split_3, 1)
getitem_11 = getitem(split_3, 2)
getitem_12 = getitem(split_3, 3)
getitem_13 = getitem(split_3, 5)
tanh = tanh(x)
narrow = narrow(tanh, 1, 5, 2)
relu = relu(getitem_9)
relu_1 = relu(getitem_10)
relu_2 = relu(getitem_11)
relu_3 = relu(getitem_12)
relu_4 = relu(getitem_13)
relu_5 = relu(narrow)
return relu, relu_1, relu_2, relu_3, relu_4, relu_5""",
    )


def test_three_levels() -> None:
    def program(x: Tensor) -> list[Tensor]:
        a, b = torch.split(x, [12, 4], 1)
        c, d = torch.split(a, [8, 4], 1)
        return [part.relu() for part in (b, d, *torch.split(c, [2, 6], 1))]

    assert "split(x, [2, 6, 4, 4], 1)" in rewrite(NAME, program, (X,)).text


def test_place_in_a_part() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.split(x, [12, 4], 1)
        return a[:, 3] + b.sum(1) + a.sum(1) + x[:, 2:9][:, -1]

    result = rewrite(NAME, program, (X,))
    assert "select(x, 1, 3)" in result.text and "select(x, 1, 8)" in result.text


def test_part_that_is_used_whole() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.split(x, [8, 8], 1)
        c, d = torch.split(a, [4, 4], 1)
        return c + d + a.sum() + b.sum()

    missed(NAME, program, X)


def test_other_dimension() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.split(x, [8, 8], 1)
        c, d = torch.split(a, [2, 2], 0)
        return (c + d).sum() + b.sum()

    missed(NAME, program, X)


def test_overlapping_parts() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.split(x, [8, 8], 1)
        return a[:, :4] + a[:, 2:6] + b.sum()

    missed(NAME, program, X)


def test_two_cuts_of_one_part() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.split(x, [8, 8], 1)
        c, d = torch.split(a, [4, 4], 1)
        e, f = torch.split(a, [2, 6], 1)
        return (c + d).sum() + e.sum() + f.sum() + b.sum()

    missed(NAME, program, X)


def test_parts_of_no_width() -> None:
    def program(x: Tensor) -> list[Tensor]:
        a, b, c = torch.split(x, [0, 8, 8], 1)
        return [part + 1 for part in (a, c, *torch.split(b, 4, 1))]

    missed(NAME, program, X)


def test_memory_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        a = x[:, 2:10]
        b, c = a[:, :3], a[:, 3:6]
        b.mul_(2)
        c[0] = b.sum()
        return x + 1

    rewrite(NAME, program, (X.detach(),))


def test_returned_parts() -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        a, b = torch.split(x, [8, 8], 1)
        return (*torch.split(a, [4, 4], 1), b)

    rewrite(NAME, program, (X,))


def test_grad_modes() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            a, b = torch.split(x, [8, 8], 1)
        c, d = torch.split(a, [4, 4], 1)
        return (c + d) * x[:, :4] + b.sum()

    missed(NAME, program, X)


def test_dynamic_batch() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.split(x, [8, 8], 1)
        return sum(part.relu().sum() for part in (b, *torch.split(a, [2, 6], 1)))

    assert fired(NAME, program, X, dynamic=True) == 1
