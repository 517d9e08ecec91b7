"""Parts are joined along another dimension than they were cut along by one reshape."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "merge_unbind_cat"
X = torch.randn(4, 3, 2, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        places, parts = torch.unbind(x, 1), torch.split(x, 2, 0)
        joined = [torch.cat(places, 1), torch.cat(places, 0), torch.cat(parts, 1)]
        tail = torch.cat([x.tanh().sum(1), *x.tanh().exp().unbind(1)[1:]], 1)
        return [whole.relu() for whole in (*joined, torch.cat(places[1:], 1), tail)]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
flatten = flatten(x, 1, 2)
transpose = transpose(x, 0, 1)
flatten_1 = flatten(transpose, 0, 1)
unflatten = unflatten(x, 0, [2, 2])
transpose_1 = transpose(unflatten, 0, 1)
flatten_2 = flatten(transpose_1, 1, 2)
tanh = tanh(x)
sum_1 = sum(tanh, 1)
tanh_1 = tanh(x)
exp = exp(tanh_1)
narrow = narrow(exp, 1, 1, 2)
flatten_3 = flatten(narrow, 1, 2)
cat = cat([sum_1, flatten_3], 1)
narrow_1 = narrow(x, 1, 1, 2)
flatten_4 = flatten(narrow_1, 1, 2)
relu = relu(flatten)
relu_1 = relu(flatten_1)
relu_2 = relu(flatten_2)
relu_3 = relu(flatten_4)
relu_4 = relu(cat)
return relu, relu_1, relu_2, relu_3, relu_4""",
    )


@pytest.mark.parametrize(("out", "back"), list(itertools.product((0, 1, 2), (0, 1))))
def test_any_two_dimensions(out: int, back: int) -> None:
    assert fired(NAME, lambda x: torch.cat(torch.unbind(x, out), back).relu(), X) == 1


@pytest.mark.parametrize(("out", "back"), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)])
def test_any_two_dimensions_of_parts(out: int, back: int) -> None:
    assert fired(NAME, lambda x: torch.cat(torch.split(x, 1, out), back).relu(), X) == 1


APART: list[Program] = [
    lambda x, y: torch.cat(torch.unbind(x, 1)[::-1], 1),
    lambda x, y: torch.cat(torch.unbind(x, 1)[::2], 1),
    lambda x, y: torch.cat([x[:, 0], x[:, 1].relu()], 1),
    lambda x, y: torch.cat([x[:, 0], y[:, 1]], 1),
    lambda x, y: torch.cat([x[:, 0], x[:, 0]], 1),
    lambda x, y: torch.cat(torch.split(x, 1, 1), 1),
    lambda x, y: torch.cat([x[0], *torch.unbind(x, 0)[:2]], 1),
    lambda x, y: torch.cat(torch.split(x, [1, 2], 1)[1:], 0),
]


@pytest.mark.parametrize("program", APART)
def test_not_side_by_side(program: Program) -> None:
    missed(NAME, program, X, torch.randn(4, 3, 2))


def test_beside_others_where_it_is_no_copy_or_worth_it() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        views, many = torch.unbind(x[:3], 0), torch.unbind(x.relu(), 0)
        return torch.cat([y, *views], 0).sum() + torch.cat([y, *many], 1).sum()

    assert fired(NAME, program, X, torch.randn(3, 2)[:, :2].clone()) == 2

    def copies(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y, *torch.unbind(x, 1)], 0).relu()

    missed(NAME, copies, X, torch.randn(1, 2))


def test_source_or_result_is_written() -> None:
    def source(x: Tensor) -> Tensor:
        joined = torch.cat(torch.unbind(x, 1), 1)
        x.mul_(2)
        return joined + x.sum()

    def result(x: Tensor) -> Tensor:
        joined = torch.cat(torch.unbind(x, 1), 1)
        joined[0] = 2
        return joined + x.sum()

    for program in (source, result):
        assert "writes to memory" in missed(NAME, program, X.detach())


def test_returned() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.unbind(x, 1)
        return torch.cat(places, 1), torch.cat(places, 0)

    assert fired(NAME, program, X) == 2


def test_dynamic_batch() -> None:
    def program(x: Tensor) -> Tensor:
        places = torch.unbind(x, 1)
        return torch.cat(places, 1).relu().sum() + torch.cat(places, 0).relu().sum()

    assert fired(NAME, program, X, dynamic=True) == 2


def test_empty_batch() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cat(torch.unbind(x, 1), 0) + torch.cat(torch.unbind(x, 1), 1).sum()

    assert fired(NAME, program, torch.randn(0, 3, 2)) == 2
