"""Small pieces of a wide result that backward needs are copied, so that the rest is freed."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn import functional as F

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "copy_saved_pieces"
X = torch.randn(3, 4)
NARROW, WIDE = torch.randn(2, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, narrow: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        one, other = F.linear(x, torch.cat([narrow, wide])).split([2, 6], 1)
        return one * one, other + 1

    assert_expected_inline(
        rewrite(NAME, program, (X, NARROW, WIDE)).text,
        """\
cat = cat([narrow, wide])
linear = linear(x, cat)
split_1 = split(linear, [2, 6], 1)
getitem = getitem(split_1, 0)
getitem_1 = getitem(split_1, 1)
clone = clone(getitem)
mul = mul(clone, clone)
add = add(getitem_1, 1)
return mul, add""",
    )


def test_a_piece_read_through_views_is_seen() -> None:
    def program(x: Tensor, narrow: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        one, other = F.linear(x, torch.cat([narrow, wide])).split([2, 6], 1)
        return one.t().unsqueeze(0).sin(), other + 1

    assert fired(NAME, program, X, NARROW, WIDE) == 1
    assert fired(NAME, program, X, NARROW, WIDE, dynamic=True) == 1


def test_the_larger_part_stays() -> None:
    def program(x: Tensor, narrow: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        one, other = F.linear(x, torch.cat([narrow, wide])).split([2, 6], 1)
        return one + 1, other.sin()

    assert missed(NAME, program, X, NARROW, WIDE) == "most of it is saved"


def test_what_saves_its_own_result_keeps_nothing() -> None:
    def program(x: Tensor, narrow: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        one, other = F.linear(x, torch.cat([narrow, wide])).split([2, 6], 1)
        return one.tanh(), other.relu()

    assert missed(NAME, program, X, NARROW, WIDE) == "nothing of it is saved"


def test_without_gradients_nothing_is_saved() -> None:
    def program(x: Tensor, narrow: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            one, other = F.linear(x, torch.cat([narrow, wide])).split([2, 6], 1)
            return one * one, other + 1

    assert fired(NAME, program, X, NARROW, WIDE) == 0


def test_a_user_s_own_parts_are_left_alone() -> None:
    def program(x: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        one, other = F.linear(x, wide).split([2, 4], 1)
        return one * one, other + 1

    assert fired(NAME, program, X, WIDE) == 0
