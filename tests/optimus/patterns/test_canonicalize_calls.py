"""Every call by one name; what cannot be said so stays."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import missed, rewrite

NAME = "canonicalize_calls"
X = torch.randn(4, 6, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        y = 1 + x.relu() - F.silu(x) * x.sigmoid()
        y = (2 - y).softmax(1, dtype=torch.float64).view(2, -1).float()
        return torch.concat([y, y.clip(min=0)], dim=1)

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
relu = relu(x)
add = add(relu, 1)
silu = silu(x)
sigmoid = sigmoid(x)
mul = mul(silu, sigmoid)
y = sub(add, mul)
sub_1 = rsub(y, 2)
softmax = softmax(sub_1, 1, dtype=float64)
view = reshape(softmax, [2, -1])
y_1 = to(view, dtype=float32)
clip = clamp(y_1, 0)
concat = cat([y_1, clip], 1)
return concat""",
    )


def test_scaled_addition_keeps_its_scale() -> None:
    def program(x: Tensor) -> Tensor:
        return x.add(x, alpha=3) + x.sub(1, alpha=2) + torch.sub(x, x, alpha=0.5)

    result = rewrite(NAME, program, (X,))
    assert [f"alpha={alpha}" in result.text for alpha in (3, 2, 0.5)] == [True] * 3


def test_number_in_front_of_a_division() -> None:
    result = rewrite(NAME, lambda x: 2 / x.exp(), (X,))
    assert "= div(2, exp)" in result.text


def test_reading_bits_anew_is_no_reshape() -> None:
    assert "canonical form cannot" in missed(NAME, lambda x: x.view(torch.int32), X.detach())


def test_in_place_calls_stay() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        y.add_(x.sum())
        torch.mul(x, 2, out=y)
        return F.relu(y[0], inplace=True) + y

    result = rewrite(NAME, program, (X.detach(), torch.randn(4, 6)))
    for call in ("add_(y", "mul(x, 2, out=y)", "relu(getitem, inplace=True)"):
        assert call in result.text
