"""Places of one tensor are taken by one unbind."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from optimus.patterns.normalize.merge_selects_to_unbind import MergeSelectsToUnbind
from tests.optimus.capture import rewritten
from tests.optimus.patterns.rewriting import NORMALIZE, fired, listing, missed, rewrite

NAME = "merge_selects_to_unbind"
X = torch.randn(4, 6, 3, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        places = [x[:, 4], x[:, 2], x[:, 3], x[:, 2], x[0], x[1], x[2], x[3]]
        return [place.relu() for place in places]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
narrow = narrow(x, 1, 2, 3)
unbind = unbind(narrow, 1)
getitem = getitem(unbind, 2)
getitem_1 = getitem(unbind, 0)
getitem_2 = getitem(unbind, 1)
unbind_1 = unbind(x)
getitem_3 = getitem(unbind_1, 0)
getitem_4 = getitem(unbind_1, 1)
getitem_5 = getitem(unbind_1, 2)
getitem_6 = getitem(unbind_1, 3)
relu = relu(getitem)
relu_1 = relu(getitem_1)
relu_2 = relu(getitem_2)
relu_3 = relu(getitem_1)
relu_4 = relu(getitem_3)
relu_5 = relu(getitem_4)
relu_6 = relu(getitem_5)
relu_7 = relu(getitem_6)
return relu, relu_1, relu_2, relu_3, relu_4, relu_5, relu_6, relu_7""",
    )


def test_far_apart() -> None:
    assert "too few" in missed(NAME, lambda x: x[:, 0] + x[:, 5], X)


def test_share_is_a_knob() -> None:
    others = [pattern for pattern in NORMALIZE if pattern.name() != NAME]
    eager = MergeSelectsToUnbind(min_share=0.1)
    module, _ = rewritten(lambda x: x[:, 0] + x[:, 5], (X,), *others, eager)
    assert "unbind(x, 1)" in listing(module)


def test_one_place() -> None:
    missed(NAME, lambda x: x[:, 0] + x[:, 0].relu(), X)


def test_two_sources_and_dimensions() -> None:
    missed(NAME, lambda x, y: x[:, 0] + y[:, 1] + x[:, :, 1].sum(), X, torch.randn(4, 6, 3))


def test_grad_modes_are_apart() -> None:
    def program(x: Tensor) -> Tensor:
        a = x[:, 0] * 2
        with torch.no_grad():
            b = x[:, 1] * 2
        return a + b

    missed(NAME, program, X)


def test_place_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = x[:, 0], x[:, 1]
        a.mul_(2)
        x[:, 1] = a
        return x + b.sum()

    missed(NAME, program, X.detach())


def test_dynamic_batch() -> None:
    def program(x: Tensor) -> Tensor:
        return x[:, 0] + x[:, 1] + x[0].sum() + x[1].sum()

    assert fired(NAME, program, X, dynamic=True) == 1
