"""Reshapes in a row become one."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "merge_reshapes"
X = torch.randn(4, 6, 2, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.flatten(1).view(4, 3, 4).unsqueeze(1).relu()
        z = y.squeeze(1).flatten().unflatten(0, (4, -1)).unsqueeze(0)
        return z.squeeze(0) + x.reshape(24, 2).view(4, 12)

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
reshape_1 = reshape(x, [4, 1, 3, 4])
y = relu(reshape_1)
reshape_2 = reshape(y, [4, 12])
reshape_3 = reshape(x, [4, 12])
add = add(reshape_2, reshape_3)
return add""",
    )


def test_dynamic_batch() -> None:
    def program(x: Tensor) -> Tensor:
        return x.flatten(1).unflatten(1, (3, 4)).relu() + x.flatten(1).view(-1, 3, 4)

    result = rewrite(NAME, program, (X,), dynamic=True)
    assert result.fired == 2 and "reshape(x, [-1, 3, 4])" in result.text


def test_two_dynamic_sizes() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        joined = x.unsqueeze(0).expand(y.shape[0], -1, -1, -1)
        return joined.flatten(2).unflatten(2, (3, 4)).relu()

    reason = missed(NAME, program, X, torch.randn(5, 1), dynamic=True)
    assert "dynamic size" in reason


def test_copy_that_is_used_elsewhere() -> None:
    def program(x: Tensor) -> Tensor:
        copied = x.transpose(0, 1).reshape(6, 8)
        return copied.view(6, 2, 4).sum() + copied.sum(1)

    missed(NAME, program, X)


def test_copy_that_is_used_only_here() -> None:
    def program(x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(6, 8).view(12, 4).relu()

    assert fired(NAME, program, X) == 1


def test_something_in_between() -> None:
    missed(NAME, lambda x: x.flatten(1).t().flatten() + x.relu().flatten(), X)


def test_view_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.flatten(1).view(4, 4, 3)
        y[0] = 1
        return y + x.sum()

    rewrite(NAME, program, (X.detach(),))


def test_copy_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.transpose(0, 1).reshape(6, 8).view(12, 4)
        y[0] = 1
        return y + x.sum()

    rewrite(NAME, program, (X.detach(),))


def test_strides_of_a_returned_view() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.unsqueeze(0).unsqueeze(0), x.transpose(0, 2).unsqueeze(1).unsqueeze(1)

    rewrite(NAME, program, (X,))


def test_empty_batch() -> None:
    assert fired(NAME, lambda x: x.flatten(1).view(0, 4, 3) + 1, torch.randn(0, 6, 2)) == 1
