"""What is computed twice is computed once, unless anybody could tell."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "merge_duplicates"
X, W = torch.randn(4, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        a = torch.tanh(x @ w).cumsum(0) + x[:, :2].sum()
        b = torch.tanh(x @ w).cumsum(0) + torch.split(x, [2, 4], 1)[0].sum()
        return a * b + x.unbind(0)[1] + x[1]

    assert_expected_inline(
        rewrite(NAME, program, (X, W)).text,
        """\
transpose = transpose(w, 0, 1)
linear = linear(x, transpose)
tanh = tanh(linear)
cumsum = cumsum(tanh, 0)
getitem = narrow(x, 1, 0, 2)
sum_1 = sum(getitem)
a = add(cumsum, sum_1)
mul = mul(a, a)
unbind = unbind(x)
getitem_4 = getitem(unbind, 1)
add_2 = add(mul, getitem_4)
add_3 = add(add_2, getitem_4)
return add_3""",
    )


DIFFERENT: list[Program] = [
    lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5),
    lambda x: torch.rand_like(x) + torch.rand_like(x) * x,
    lambda x: torch.clamp(x, 0) + torch.clamp(x, 0.0),
    lambda x: x / 0.0 + x / -0.0,
    lambda x: x.sum(0) + x.sum(0, keepdim=True) + x.sum(1).sum(),
    lambda x: x.double() + x.to(torch.bfloat16),
    lambda x: F.leaky_relu(x, 0.1) + F.leaky_relu(x, 0.2),
    lambda x: x[:, :2] + x[:, 2:4] + x[:2].sum() + x[0, 0],
    lambda x: torch.nan_to_num(x, nan=1.0) + torch.nan_to_num(x, posinf=1.0),
    lambda x: x.relu() + torch.relu_(x * 1),
]


@pytest.mark.parametrize("program", DIFFERENT)
def test_different(program: Program) -> None:
    missed(NAME, program, X)


def test_equal_with_not_a_number() -> None:
    def program(x: Tensor) -> Tensor:
        nan = float("nan")
        return torch.nan_to_num(x, nan) + torch.nan_to_num(x, float("nan"))

    assert fired(NAME, program, X) == 1


def test_input_is_written_in_between() -> None:
    def program(x: Tensor) -> Tensor:
        a = x.relu()
        x.add_(1)
        return a + x.relu()

    assert "writes to memory" in missed(NAME, program, X.detach())


def test_result_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = x.relu(), x.relu()
        a[0] = 1
        return a + b

    assert "writes to memory" in missed(NAME, program, X.detach())


def test_view_of_a_result_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = x.relu(), x.relu()
        b.t()[0].mul_(3)
        return a + b

    missed(NAME, program, X.detach())


def test_views_of_written_memory_may_be_one() -> None:
    def program(x: Tensor) -> Tensor:
        a = x[:, 0]
        a.mul_(2)
        b = x[:, 0]
        b.add_(1)
        return a + b + x[:, 1]

    assert fired(NAME, program, X.detach()) == 1


def test_grad_modes_are_apart() -> None:
    def program(x: Tensor) -> Tensor:
        a = x.exp()
        with torch.no_grad():
            b, c = x.exp(), x.exp()
        return a * b + c * x.exp()

    result = rewrite(NAME, program, (X,))
    assert result.text.count("= exp(x)") >= 2


def test_autocast_states_are_apart() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        a = x @ w
        with torch.autocast("cpu", torch.bfloat16):
            b = x @ w
        return a + b

    result = rewrite(NAME, program, (X.detach(), W.detach()))
    assert result.text.count("= linear(") == 2


def test_random_state() -> None:
    def program(x: Tensor) -> Tensor:
        a = F.dropout(x.relu(), 0.5)
        return a + F.dropout(x.relu(), 0.5)

    assert fired(NAME, program, X) == 1


def test_returned_twice() -> None:
    rewrite(NAME, lambda x: (x.relu(), x.relu(), x.t(), x.t()), (X,))


def test_factories() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.zeros(4, 6), torch.zeros(4, 6)
        a[0] = 1
        return x + a + b + torch.ones(6) + torch.ones(6)

    result = rewrite(NAME, program, (X,))
    assert result.fired == 1 and result.text.count("zeros") == 2


def test_chain() -> None:
    def program(x: Tensor) -> Tensor:
        return sum(x.relu().tanh().exp().sin() for _ in range(5))

    result = rewrite(NAME, program, (X,))
    assert result.fired == 1 and result.text.count("sin") == 1
