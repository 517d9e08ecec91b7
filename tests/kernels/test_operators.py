"""Operators made in Python, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.operators import operator
from tests.kernels import checks


@operator("tests_double", differentiable=False)
def _double(x: Tensor, times: int) -> Tensor:
    return x * 2 * times


@_double.register_fake
def _(x: Tensor, times: int) -> Tensor:
    return torch.empty_like(x)


def _compiled(x: Tensor) -> Tensor:
    return torch.compile(lambda x: _double(x, 3), backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("call", [lambda x: _double(x, 3), _compiled])
def test_one_without_a_gradient_says_so(call: checks.Function) -> None:
    assert call(torch.ones(2)).tolist() == [6.0, 6.0]
    with pytest.raises(Exception, match="kernels::tests_double has no gradient"):
        call(torch.ones(2, requires_grad=True)).sum().backward()


def test_it_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.kernels.tests_double.default, (torch.ones(2), 3))
