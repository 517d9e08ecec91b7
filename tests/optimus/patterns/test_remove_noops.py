"""Calls that return their input as it is go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "remove_noops"
X = torch.randn(4, 6, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.contiguous().float().to("cpu")[:].view(4, 6).reshape(x.shape)
        y = y.expand(4, 6).expand(-1, -1).transpose(1, 1).permute(0, 1).squeeze(0).narrow(1, 0, 6)
        z = y.detach().detach().flatten(1)
        return y + z.to(torch.float32)

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
detach = detach(x)
add = add(x, detach)
return add""",
    )


OTHER: list[Callable[[Tensor], Any]] = [
    lambda x: x.t().contiguous() + 1,
    lambda x: x.double() + 1,
    lambda x: x.to(torch.float32, copy=True) + 1,
    lambda x: x.clone() + 1,
    lambda x: x.detach() + 1,
    lambda x: x.view(6, 4) + 1,
    lambda x: x.t() + 1,
    lambda x: x[:, :5] + 1,
    lambda x: x[None] + 1,
    lambda x: x.expand(2, -1, -1) + 1,
    lambda x: x.narrow(1, 1, 5).narrow(0, 0, 2) + 1,
    lambda x: x.reshape(2, 2, 6).transpose(0, 1) + 1,
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Callable[[Tensor], Any]) -> None:
    missed(NAME, program, X)


def test_memory_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.contiguous()
        y[0] = 1
        z = x.view(4, 6)
        z.mul_(2)
        return x + z + y

    rewrite(NAME, program, (X.detach(),))


def test_copy_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.t().contiguous()
        y[0] = 1
        return x + y.contiguous().t()

    rewrite(NAME, program, (X.detach(),))


def test_returned_view_of_an_input() -> None:
    assert "tensor of its own" in missed(NAME, lambda x: (x.detach(), x.view(4, 6)), X.detach())


def test_no_grad() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.view(4, 6)
        return y * x

    missed(NAME, program, X)


def test_dynamic_batch() -> None:
    def program(x: Tensor) -> Tensor:
        return x.view(-1, 6).contiguous().flatten(1).relu() + x[:, :6]

    assert fired(NAME, program, X, dynamic=True) == 4


def test_transposed_input() -> None:
    def program(x: Tensor) -> Tensor:
        return x.contiguous() + x.reshape(6, 4) * 2

    result = rewrite(NAME, program, (X.detach().t(),))
    assert result.fired == 1 and "contiguous" in result.text
