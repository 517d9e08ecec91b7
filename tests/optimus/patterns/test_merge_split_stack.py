"""Equal parts of one tensor are stacked without a copy."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "merge_split_stack"
X = torch.randn(4, 12, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        parts = torch.split(x, 4, 1)
        joined = [torch.stack(parts, dim) for dim in (1, 0, 2)]
        return [whole.relu() for whole in (*joined, torch.stack(parts[1:], 1))]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
unflatten_1 = unflatten(x, 1, [3, 4])
transpose = transpose(unflatten_1, 0, 1)
unflatten_2 = unflatten(x, 1, [3, 4])
transpose_1 = transpose(unflatten_2, 1, 2)
narrow = narrow(x, 1, 4, 8)
unflatten_3 = unflatten(narrow, 1, [2, 4])
relu = relu(unflatten)
relu_1 = relu(transpose)
clone = clone(relu_1, memory_format=torch.contiguous_format)
relu_2 = relu(transpose_1)
clone_1 = clone(relu_2, memory_format=torch.contiguous_format)
relu_3 = relu(unflatten_3)
return relu, clone, clone_1, relu_3""",
    )


APART: list[Program] = [
    lambda x: torch.stack(torch.split(x, 4, 1)[::-1], 1),
    lambda x: torch.stack(torch.split(x, 4, 1)[::2], 1),
    lambda x: torch.stack([torch.split(x, 4, 1)[0]] * 2, 1),
    lambda x: torch.stack([x[:, :4], x[:, 5:9]], 1),
    lambda x: torch.stack([x[:, :4], x.relu()[:, 4:8]], 1),
    lambda x: torch.stack([x[:2], x[2:].relu()], 1),
    lambda x: torch.stack([x[:, :4]], 1),
]


@pytest.mark.parametrize("program", APART)
def test_not_side_by_side(program: Program) -> None:
    missed(NAME, program, X)


def test_source_or_result_is_written() -> None:
    def source(x: Tensor) -> Tensor:
        joined = torch.stack(torch.split(x, 4, 1), 1)
        x.mul_(2)
        return joined + x.sum()

    def result(x: Tensor) -> Tensor:
        joined = torch.stack(torch.split(x, 4, 1), 1)
        joined[0] = 2
        return joined + x.sum()

    for program in (source, result):
        assert "writes to memory" in missed(NAME, program, X.detach())


def test_returned() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        parts = torch.split(x, 4, 1)
        return torch.stack(parts, 1), torch.stack(parts)

    assert fired(NAME, program, X) == 2


def test_dynamic_batch() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack(torch.split(x, 4, 1), 1).relu()

    assert fired(NAME, program, X, dynamic=True) == 1


def test_empty_batch() -> None:
    assert fired(NAME, lambda x: torch.stack(torch.split(x, 4, 1)) + 1, torch.randn(0, 12)) == 1


def test_parts_of_a_transposed_tensor() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack(torch.split(x.t(), 4, 0)).view(3, 16).relu()

    assert fired(NAME, program, X) == 1
