"""Parts of one tensor are reshaped together."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "move_reshape_out_of_stack"
X = torch.randn(4, 24, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        shaped = [part.view(4, 2, 4) for part in torch.split(x, 8, 1)]
        turned = [part.unflatten(1, (4, 2)).permute(2, 0, 1) for part in torch.split(x, 8, 1)]
        wholes = torch.stack(shaped, 1), torch.cat(shaped, 2), torch.stack(turned, -1)
        return [whole.relu() for whole in wholes]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
unflatten_3 = unflatten(x, 1, [3, 8])
transpose = transpose(unflatten_3, 0, 1)
reshape = reshape(transpose, [3, 4, 2, 4])
transpose_1 = transpose(reshape, 0, 1)
unflatten_4 = unflatten(x, 1, [3, 8])
transpose_2 = transpose(unflatten_4, 0, 1)
reshape_1 = reshape(transpose_2, [3, 4, 2, 4])
permute_3 = permute(reshape_1, [1, 2, 0, 3])
flatten = flatten(permute_3, 2, 3)
unflatten_5 = unflatten(x, 1, [3, 8])
transpose_3 = transpose(unflatten_5, 0, 1)
reshape_2 = reshape(transpose_3, [3, 4, 4, 2])
transpose_4 = transpose(reshape_2, 0, 3)
relu = relu(transpose_1)
relu_1 = relu(flatten)
relu_2 = relu(transpose_4)
clone = clone(relu_2, memory_format=torch.contiguous_format)
return relu, relu_1, clone""",
    )


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_any_dimension(join: Program, dim: int) -> None:
    def program(x: Tensor) -> Tensor:
        return join([part.view(4, 2, 4) for part in torch.split(x, 8, 1)], dim).relu()

    assert (dim == 3 and join is torch.cat) or fired(NAME, program, X) == 1


APART: list[Program] = [
    lambda x: torch.stack([part.view(4, 2, 4) for part in torch.split(x, 8, 1)[::-1]], 1),
    lambda x: torch.stack([part.relu().view(4, 2, 4) for part in torch.split(x, 8, 1)], 1),
    lambda x: torch.stack([x[:, :8].view(4, 2, 4), x[:, 8:16].view(4, 4, 2).mT], 1),
    lambda x: torch.stack([x[:, :8].mT, x[:, 8:16].reshape(8, 4)]),
    lambda x: torch.cat([x[:, :8].view(4, 2, 4), x[:, 8:20].view(4, 3, 4)], 1),
]


@pytest.mark.parametrize("program", APART)
def test_not_the_same(program: Program) -> None:
    missed(NAME, program, X)


def test_dynamic_batch() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([part.view(-1, 2, 4) for part in torch.split(x, 8, 1)], 1).relu()

    assert fired(NAME, program, X, dynamic=True) == 1


def test_two_dynamic_sizes() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        grown = x.unsqueeze(0).expand(y.shape[0], -1, -1)
        return torch.stack([part.mT.unflatten(1, (2, 4)) for part in torch.split(grown, 8, 2)]) + 1

    missed(NAME, program, X, torch.randn(3, 1), dynamic=True)


def test_memory_that_is_written() -> None:
    def source(x: Tensor) -> Tensor:
        joined = torch.stack([part.view(4, 2, 4) for part in torch.split(x, 8, 1)], 1)
        x.mul_(2)
        return joined + x.sum()

    def in_between(x: Tensor) -> Tensor:
        parts = [part.reshape(8, 4) for part in torch.split(x.t(), 8, 0)]
        shaped = [part.reshape(4, 8) for part in torch.split(x, 8, 1)]
        x.mul_(2)
        return torch.stack(parts).sum() + torch.stack(shaped)

    for program in (source, in_between):
        rewrite(NAME, program, (X.detach(),))


def test_shaped_part_is_used_elsewhere() -> None:
    def program(x: Tensor) -> Tensor:
        shaped = [part.view(4, 2, 4) for part in torch.split(x, 8, 1)]
        return torch.stack(shaped, 1).sum(1) + shaped[0]

    assert fired(NAME, program, X) == 1


def test_returned() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([part.view(4, 2, 4).mT for part in torch.split(x, 8, 1)], 1)

    assert fired(NAME, program, X) == 1
