"""Every reordering of dimensions becomes a transpose or a permute."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from optimus.axes import base_of, moved, order_of
from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "lower_moves_to_permute"
X = torch.randn(2, 3, 4, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        matrix = x.flatten(1)
        views = [matrix.T, matrix.t(), x.mT, x.movedim(0, -1), torch.movedim(x, (0, 1), (1, 2))]
        views += [x.permute(0, 2, 1), x.permute(-1, 0, 1), x.swapaxes(-1, 0), x.transpose(2, 1)]
        return [view + 1 for view in views]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
matrix = flatten(x, 1, 2)
view = transpose(matrix, 0, 1)
view_1 = transpose(matrix, 0, 1)
view_2 = transpose(x, 1, 2)
view_3 = permute(x, [1, 2, 0])
view_4 = permute(x, [2, 0, 1])
view_5 = transpose(x, 1, 2)
view_6 = permute(x, [2, 0, 1])
view_7 = transpose(x, 0, 2)
view_8 = transpose(x, 1, 2)
add = add(view, 1)
add_1 = add(view_1, 1)
add_2 = add(view_2, 1)
add_3 = add(view_3, 1)
add_4 = add(view_4, 1)
add_5 = add(view_5, 1)
add_6 = add(view_6, 1)
add_7 = add(view_7, 1)
add_8 = add(view_8, 1)
return add, add_1, add_2, add_3, add_4, add_5, add_6, add_7, add_8""",
    )


@pytest.mark.parametrize(
    ("source", "destination"), list(itertools.product((0, 1, 2, -1, -3), repeat=2))
)
def test_movedim(source: int, destination: int) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = X
    node = graph.call_function(torch.movedim, (x, source, destination))
    order = order_of(node)
    assert order == moved(3, source % 3, destination % 3)
    assert torch.equal(X.permute(order), X.movedim(source, destination))


def test_chain_is_read_through() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = X
    first = graph.call_function(torch.permute, (x, (1, 2, 0)))
    first.meta["example_value"] = X.permute(1, 2, 0)
    base, order = base_of(first, (2, 0, 1))
    assert base is x and torch.equal(X.permute(order), X.permute(1, 2, 0).permute(2, 0, 1))


def test_vectors_and_other_attributes() -> None:
    def program(x: Tensor) -> Tensor:
        return x.sum((0, 1)).t() + x.shape[0] + x.permute(0, 1, 2).sum()

    missed(NAME, program, X)


def test_what_is_canonical() -> None:
    assert fired(NAME, lambda x: torch.transpose(x, 0, 1) + 1, X) == 0


def test_returned() -> None:
    rewrite(NAME, lambda x: (x.mT, x.movedim(0, 2)), (X,))
