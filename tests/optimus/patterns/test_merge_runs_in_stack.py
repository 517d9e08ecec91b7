"""Parts of one tensor are stacked with others as one part."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "merge_runs_in_stack"
X, Y = torch.randn(4, 12, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        places = x.tanh().view(4, 3, 4).unbind(1)
        a = torch.stack([y, *torch.split(x, 4, 1), y.relu(), *places], 1)
        return a.relu()

    assert_expected_inline(
        rewrite(NAME, program, (X, Y)).text,
        """\
tanh = tanh(x)
view = reshape(tanh, [4, 3, 4])
relu = relu(y)
unsqueeze = unsqueeze(y, 1)
unflatten = unflatten(x, 1, [3, 4])
unsqueeze_1 = unsqueeze(relu, 1)
cat = cat([unsqueeze, unflatten, unsqueeze_1, view], 1)
relu_1 = relu(cat)
return relu_1""",
    )


def test_used_elsewhere() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        parts = torch.split(x, 4, 1)
        return torch.stack([y, *parts], 1).sum(1) + sum(part.relu() for part in parts)

    missed(NAME, program, X, Y)


def test_apart() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a, b, c = torch.split(x, 4, 1)
        return torch.stack([y, b, a, y, c], 1).sum(1)

    missed(NAME, program, X, Y)


def test_source_is_written_later() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        joined = torch.stack([y, *torch.split(x, 4, 1)], 1)
        x.mul_(2)
        return joined.sum(1) + x[:, :4]

    rewrite(NAME, program, (X.detach(), Y))


def test_source_is_written_before() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        parts = torch.split(x, 4, 1)
        x.mul_(2)
        return torch.stack([y, *parts], 0).sum(0)

    rewrite(NAME, program, (X.detach(), Y))


def test_dynamic_batch() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([y, *torch.split(x, 4, 1)], 1).relu()

    assert fired(NAME, program, X, Y, dynamic=True) == 1
