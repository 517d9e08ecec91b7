"""Disjoint ranges of one tensor are taken by one split."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "merge_slices_to_split"
X = torch.randn(4, 20, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        parts = [x[:, 12:], x[:, :4], x[:, 4:9], x[:, :4], x[:3], x[3:]]
        return [part.relu() for part in parts]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
split = split(x, [4, 5, 3, 8], 1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
getitem_2 = getitem(split, 3)
split_1 = split(x, [3, 1])
getitem_3 = getitem(split_1, 0)
getitem_4 = getitem(split_1, 1)
relu = relu(getitem_2)
relu_1 = relu(getitem)
relu_2 = relu(getitem_1)
relu_3 = relu(getitem)
relu_4 = relu(getitem_3)
relu_5 = relu(getitem_4)
return relu, relu_1, relu_2, relu_3, relu_4, relu_5""",
    )


def test_overlapping_ranges_stay() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [part.relu() for part in (x[:, :10], x[:, :4], x[:, 4:9], x[:, 8:20])]

    result = rewrite(NAME, program, (X,))
    assert result.text.count("= narrow") == 2 and "split(x, [4, 5, 11], 1)" in result.text


def test_gradient_is_one_cat() -> None:
    def program(x: Tensor) -> Tensor:
        return sum(x[:, i : i + 4].relu().sum() for i in range(0, 20, 4))

    assert "split(x, [4, 4, 4, 4, 4], 1)" in rewrite(NAME, program, (X,)).text


def test_one_range() -> None:
    missed(NAME, lambda x: x[:, :4].relu() + x[:, :4].tanh(), X)


def test_ranges_of_two_sources_and_dimensions() -> None:
    missed(NAME, lambda x, y: x[:, :4] + y[:, :4] + x[:1, :4], X, torch.randn(4, 9))


def test_ranges_of_no_width() -> None:
    missed(NAME, lambda x: torch.cat([x[:, 4:4], x[:, :4], x[:, 9:9]], 1), X)


def test_grad_modes_are_apart() -> None:
    def program(x: Tensor) -> Tensor:
        a = x[:, :4] * 2
        with torch.no_grad():
            b = x[:, 4:8] * 2
            c = x[:, 8:12] * 2
        return a + b + c

    result = rewrite(NAME, program, (X,))
    assert result.fired == 1 and result.text.count("= narrow") == 1


def test_source_is_written_in_between() -> None:
    def program(x: Tensor) -> Tensor:
        y = x + 1
        a = y[:, :4] * 2
        y[:, 2:6] += 1
        b = y[:, 4:8] * 2
        y[:, 4:8].mul_(3)
        return torch.cat([a, b, y], 1)

    assert "writes to memory that would be cut by one call" in missed(NAME, program, X)


def test_part_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = x[:, :4], x[:, 4:8]
        a.mul_(2)
        b += a
        return x + b.sum()

    rewrite(NAME, program, (X.detach(),))


def test_returned_parts() -> None:
    reason = missed(NAME, lambda x: (x[:, :4], x[:, 4:8]), X)
    assert "returned of memory that would be cut by one call" in reason
    reason = missed(NAME, lambda x: (x[:, :4].t(), x[:, 4:8] + 1), X)
    assert "returned of memory that would be cut by one call" in reason


def test_dynamic_batch() -> None:
    assert fired(NAME, lambda x: x[:, :4] + x[:, 4:8], X, dynamic=True) == 1


def test_source_between_parts() -> None:
    def program(x: Tensor) -> Tensor:
        a = x[:, :4].relu()
        y = torch.cat([a, x], 1)
        return y[:, :4] + y[:, 4:8] + x[:, 4:8]

    assert fired(NAME, program, X) == 2
