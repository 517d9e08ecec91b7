"""Places of one tensor are stacked again without a copy."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "cancel_unbind_stack"
X = torch.randn(4, 3, 2, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        places = torch.unbind(x, 1)
        joined = [torch.stack(places, dim) for dim in (1, 0, -1)]
        return [whole.relu() for whole in (*joined, torch.stack(places[1:], 1))]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
transpose = transpose(x, 0, 1)
transpose_1 = transpose(x, 1, 2)
narrow = narrow(x, 1, 1, 2)
relu = relu(x)
relu_1 = relu(transpose)
clone = clone(relu_1, memory_format=torch.contiguous_format)
relu_2 = relu(transpose_1)
clone_1 = clone(relu_2, memory_format=torch.contiguous_format)
relu_3 = relu(narrow)
return relu, clone, clone_1, relu_3""",
    )


@pytest.mark.parametrize(("out", "back"), list(itertools.product((0, 1, 2), repeat=2)))
def test_any_two_dimensions(out: int, back: int) -> None:
    assert fired(NAME, lambda x: torch.stack(torch.unbind(x, out), back).relu(), X) == 1


APART: list[Program] = [
    lambda x, y: torch.stack(torch.unbind(x, 1)[::-1], 1),
    lambda x, y: torch.stack(torch.unbind(x, 1)[::2], 1),
    lambda x, y: torch.stack([x[:, 0], x[:, 1].relu(), x[:, 2]], 1),
    lambda x, y: torch.stack([x[:, 0], y[:, 1]], 1),
    lambda x, y: torch.stack([x[:, 0], x[:, 0]], 1),
    lambda x, y: torch.stack([x[0, 0], x[0, 1], x[1, 2]], 0),
    lambda x, y: torch.stack([x[:, 0]], 1),
]


@pytest.mark.parametrize("program", APART)
def test_not_side_by_side(program: Program) -> None:
    missed(NAME, program, X, torch.randn(4, 3, 2))


def test_places_of_a_part() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([x[:, 1:][:, 0], x[:, 2]], 1).relu()

    assert "narrow(x, 1, 1, 2)" in rewrite(NAME, program, (X,)).text


def test_source_or_result_is_written() -> None:
    def source(x: Tensor) -> Tensor:
        joined = torch.stack(torch.unbind(x, 1), 1)
        x.mul_(2)
        return joined + x

    def result(x: Tensor) -> Tensor:
        joined = torch.stack(torch.unbind(x, 1), 1)
        joined[0] = 2
        return joined + x

    for program in (source, result):
        assert "writes to memory" in missed(NAME, program, X.detach())


def test_returned() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.unbind(x, 1)
        return torch.stack(places, 1), torch.stack(places, 0)

    assert fired(NAME, program, X) == 2


def test_view_of_a_stack_laid_out_otherwise() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack(torch.unbind(x, 1), 0).view(3, 8).relu()

    assert fired(NAME, program, X) == 1


def test_grad_modes() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            places = torch.unbind(x, 1)
        return torch.stack(places, 1) * x

    missed(NAME, program, X)


def test_dynamic_batch() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack(torch.unbind(x, 1), 2).relu()

    assert fired(NAME, program, X, dynamic=True) == 1
