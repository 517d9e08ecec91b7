"""Dimensions get one name each."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import missed, rewrite

NAME = "count_dims_from_front"
X = torch.randn(4, 6, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.stack([x, x], -1).flatten(-2).unflatten(-1, (2, -1)).unsqueeze(-1)
        y = y.squeeze(-1).sum((-1, 0), keepdim=True) + y.mean(-2) + y.amax(-1)
        return y.log_softmax(-1) + torch.nn.functional.normalize(y, dim=-1)

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
stack = stack([x, x], 2)
flatten = flatten(stack, 1, 2)
unflatten = unflatten(flatten, 1, [2, -1])
y = unsqueeze(unflatten, 3)
squeeze = squeeze(y, 3)
sum_1 = sum(squeeze, [2, 0], True)
mean = mean(y, 2)
add = add(sum_1, mean)
amax = amax(y, 3)
y_1 = add(add, amax)
log_softmax = log_softmax(y_1, 2)
normalize = normalize(y_1, 2.0, 2)
add_2 = add(log_softmax, normalize)
return add_2""",
    )


def test_places_along_a_dynamic_dimension_stay() -> None:
    def program(x: Tensor) -> Tensor:
        return x.select(-2, -1) + x.select(-1, -1).sum()

    result = rewrite(NAME, program, (X,), dynamic=True)
    assert "select(x, 0, -1)" in result.text and "select(x, 1, 5)" in result.text


def test_numbers_have_no_dimensions() -> None:
    missed(NAME, lambda x: x.sum().softmax(-1) + x.sum().sum(-1), X)


def test_cat_with_an_empty_vector() -> None:
    missed(NAME, lambda x: torch.cat([x.new_zeros(0), x], -1), X)


def test_sum_over_everything() -> None:
    missed(NAME, lambda x: x.sum() + x.squeeze().mean(), X)
