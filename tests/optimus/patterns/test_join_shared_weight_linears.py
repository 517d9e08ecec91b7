"""One weight is applied to all its inputs at once."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "join_shared_weight_linears"
X = torch.randn(5, 12, requires_grad=True)
W = torch.randn(3, 4, requires_grad=True)
B = torch.randn(3, requires_grad=True)
F = torch.nn.functional


def test_golden() -> None:
    def program(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        parts = x.split(4, 1)
        return [F.linear(parts[i], w, b) for i in (1, 2, 0)]

    assert_expected_inline(
        rewrite(NAME, program, (X, W, B)).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
flatten = flatten(unflatten, 0, 1)
linear_3 = linear(flatten, w, b)
unflatten_1 = unflatten(linear_3, 0, [5, 3])
unbind = unbind(unflatten_1, 1)
getitem_3 = getitem(unbind, 0)
clone_2 = clone(getitem_3, memory_format=torch.contiguous_format)
getitem_4 = getitem(unbind, 1)
clone = clone(getitem_4, memory_format=torch.contiguous_format)
getitem_5 = getitem(unbind, 2)
clone_1 = clone(getitem_5, memory_format=torch.contiguous_format)
return clone, clone_1, clone_2""",
    )


def test_rows() -> None:
    """Parts of a batch are the batch; of unequal inputs the rows are joined."""

    def parts(x: Tensor, w: Tensor) -> list[Tensor]:
        return [F.linear(part, w) for part in x.split([1, 2, 2])]

    result = rewrite(NAME, parts, (X[:, :4].detach().clone(), W))
    assert_expected_inline(
        result.text,
        """\
linear_3 = linear(x, w)
split_1 = split(linear_3, [1, 2, 2])
getitem = getitem(split_1, 0)
clone = clone(getitem, memory_format=torch.contiguous_format)
getitem_1 = getitem(split_1, 1)
clone_1 = clone(getitem_1, memory_format=torch.contiguous_format)
getitem_2 = getitem(split_1, 2)
clone_2 = clone(getitem_2, memory_format=torch.contiguous_format)
return clone, clone_1, clone_2""",
    )

    def apart(x: Tensor, w: Tensor) -> list[Tensor]:
        return [F.linear(x[:, :4], w), F.linear(x[:2, 4:8], w)]

    result = rewrite(NAME, apart, (X, W))
    assert_expected_inline(
        result.text,
        """\
getitem = narrow(x, 1, 0, 4)
narrow = narrow(x, 0, 0, 2)
narrow_1 = narrow(narrow, 1, 4, 4)
cat = cat([getitem, narrow_1])
linear_2 = linear(cat, w)
split = split(linear_2, [5, 2])
getitem_2 = getitem(split, 0)
clone = clone(getitem_2, memory_format=torch.contiguous_format)
getitem_3 = getitem(split, 1)
clone_1 = clone(getitem_3, memory_format=torch.contiguous_format)
return clone, clone_1""",
    )


def test_shapes() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [F.linear(part, W, B) for part in x.split(4, -1)]

    for x in (torch.randn(12), torch.randn(2, 3, 12), torch.randn(0, 12)):
        assert fired(NAME, program, x) == 1
    assert fired(NAME, program, X, dynamic=True) == 1

    def last(x: Tensor, w: Tensor) -> list[Tensor]:
        return [F.linear(part, w) for part in x.unbind(-1)]

    assert fired(NAME, last, torch.randn(2, 4, 3), W) == 1


OTHER: list[Program] = [
    lambda x, w, b: F.linear(F.linear(x[:, :4], w), F.linear(w, w[0:4].new_ones(4, 4))[:, :3]),
    lambda x, w, b: (F.linear(x[:, :4], w, b), F.linear(x[:, 4:8], w)),
    lambda x, w, b: (F.linear(x[:, :4], w), F.linear(x[:, 4:8], w + 0)),
    lambda x, w, b: (F.linear(x[:, :4], w), F.linear(x[:, :4], w)),
    lambda x, w, b: (F.linear(x[:, :4], w), F.linear(x[:, 4:8].detach(), w)),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(NAME, program, X, W, B)


def test_updated_in_between() -> None:
    """A weight that is written to in between is two weights."""

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        w = w.clone()
        one = F.linear(x[:, :4], w)
        w[0] = 1.0
        return one, F.linear(x[:, 4:8], w)

    missed(NAME, program, X.detach(), W)


def test_dynamic_rows() -> None:
    """Numbers of rows that cannot be told apart afterwards."""

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, W), F.linear(y, W)

    x, y = torch.randn(5, 4), torch.randn(3, 4)
    assert fired(NAME, program, x, y) == 1
    missed(NAME, program, x, y, dynamic=True)
