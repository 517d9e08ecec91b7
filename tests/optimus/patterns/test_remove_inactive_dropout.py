"""Dropout that drops nothing goes; any other stays, with its random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import missed, rewrite

NAME = "remove_inactive_dropout"
X = torch.randn(4, 6, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5, training=False).relu()
        y = torch.dropout(F.dropout(y, 0.0), 0.3, False).tanh()
        y = F.dropout1d(F.alpha_dropout(y, 0.2, False), 0.2, False)
        return y + F.feature_alpha_dropout(y, 0.2, False)

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
y = relu(x)
y_1 = tanh(y)
add = add(y_1, y_1)
return add""",
    )


def test_order_of_random_numbers() -> None:
    def program(x: Tensor) -> Tensor:
        a = F.dropout(x, 0.5)
        b = F.dropout(a, 0.0)
        return b + F.dropout(x, 0.25) + torch.rand_like(x)

    assert rewrite(NAME, program, (X,)).fired == 1


def test_active() -> None:
    def program(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + F.dropout(x, 1.0) + F.alpha_dropout(x, 0.1, training=True)

    assert missed(NAME, program, X) == "active"


def test_in_place_on_an_input() -> None:
    assert "in place" in missed(NAME, lambda x: F.dropout(x, 0.5, False, True) + 1, X.detach())


def test_input_is_written_later() -> None:
    def program(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5, False)
        x[0] = 1
        return y + x

    rewrite(NAME, program, (X.detach(),))


def test_returned() -> None:
    assert rewrite(NAME, lambda x: F.dropout(x.relu(), 0.5, False), (X,)).fired == 1
