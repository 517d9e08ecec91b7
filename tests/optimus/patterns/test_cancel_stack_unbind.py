"""What was stacked is taken as it was."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "cancel_stack_unbind"
X, Y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        a, b = torch.unbind(torch.stack([x, y], 1), 1)
        c = torch.stack([x, y, x.tanh(), y.tanh()], -1)
        d = torch.stack([x.sin(), y.sin()])
        return [part.relu() for part in (a, b, c[..., 1:3], c[..., 3:], c[..., 0], d[1], d)]

    assert_expected_inline(
        rewrite(NAME, program, (X, Y)).text,
        """\
tanh = tanh(x)
tanh_1 = tanh(y)
stack_1 = stack([y, tanh], 2)
unsqueeze = unsqueeze(tanh_1, 2)
sin = sin(x)
sin_1 = sin(y)
d = stack([sin, sin_1])
relu = relu(x)
relu_1 = relu(y)
relu_2 = relu(stack_1)
relu_3 = relu(unsqueeze)
relu_4 = relu(x)
relu_5 = relu(sin_1)
relu_6 = relu(d)
return relu, relu_1, relu_2, relu_3, relu_4, relu_5, relu_6""",
    )


def test_other_dimension() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        stacked = torch.stack([x, y], 1)
        return stacked[0].sum() + stacked[:, :, 1]

    missed(NAME, program, X, Y)


def test_same_part_twice() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.stack([x, x])
        return a * b.relu()

    assert "stack" not in rewrite(NAME, program, (X,)).text


def test_whole_is_used_too() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        stacked = torch.stack([x, y, x.relu()])
        return stacked[:2].sum() + stacked.exp()

    missed(NAME, program, X, Y)


def test_part_is_written_in_between() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        stacked = torch.stack([x, y])
        x.mul_(2)
        return stacked[0] + x

    assert "writes to memory" in missed(NAME, program, X.detach(), Y.detach())


def test_place_is_written() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        stacked = torch.stack([x, y])
        stacked[0].mul_(2)
        return stacked[0] + x

    assert "writes to memory" in missed(NAME, program, X.detach(), Y.detach())


def test_gradient_of_the_whole() -> None:
    def program(x: Tensor, n: Tensor) -> Tensor:
        a, b = torch.stack([x, n])
        return a * b

    result = rewrite(NAME, program, (X, torch.ones(4, 3)))
    assert result.fired == 1 and "stack" in result.text


def test_grad_modes() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            stacked = torch.stack([x, y])
        return stacked[0] * x + stacked[1]

    missed(NAME, program, X, Y)


def test_returned_places() -> None:
    rewrite(NAME, lambda x, y: torch.unbind(torch.stack([x, y])), (X, Y))
    rewrite(NAME, lambda x, y: torch.unbind(torch.stack([x.relu(), y.relu()])), (X, Y))


def test_dynamic_batch() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a, b = torch.unbind(torch.stack([x, y], 1), 1)
        return a * b

    assert fired(NAME, program, X, Y, dynamic=True) == 1
