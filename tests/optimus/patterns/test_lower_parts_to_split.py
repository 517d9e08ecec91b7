"""Every way to cut a tensor becomes a split with sizes."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, rewrite

NAME = "lower_parts_to_split"
X = torch.randn(6, 10, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        a, b, c = torch.chunk(x, 3, -1)
        d, e, f = torch.tensor_split(x, [2, 7], 1)
        g, h = torch.vsplit(x, 2)
        (i, j) = x.split(5, dim=1)
        return [t.relu() for t in (a, b, c, d, e, f, g, h, i, j)]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
chunk = split(x, [4, 4, 2], 1)
a = getitem(chunk, 0)
b = getitem(chunk, 1)
c = getitem(chunk, 2)
tensor_split = split(x, [2, 5, 3], 1)
d = getitem(tensor_split, 0)
e = getitem(tensor_split, 1)
f = getitem(tensor_split, 2)
vsplit = split(x, [3, 3])
g = getitem(vsplit, 0)
h = getitem(vsplit, 1)
split = split(x, [5, 5], 1)
i = getitem(split, 0)
j = getitem(split, 1)
relu = relu(a)
relu_1 = relu(b)
relu_2 = relu(c)
relu_3 = relu(d)
relu_4 = relu(e)
relu_5 = relu(f)
relu_6 = relu(g)
relu_7 = relu(h)
relu_8 = relu(i)
relu_9 = relu(j)
return relu, relu_1, relu_2, relu_3, relu_4, relu_5, relu_6, relu_7, relu_8, relu_9""",
    )


def test_dynamic_size() -> None:
    def program(x: Tensor) -> Tensor:
        return sum(part.sum() for part in torch.chunk(x, 2, 0)) + torch.split(x, 4, 1)[0].sum()

    result = rewrite(NAME, program, (X,), dynamic=True)
    assert result.fired == 1 and "chunk" in result.text and "dynamic" in result.misses


def test_parts_of_no_width() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [part + 1 for part in torch.tensor_split(x, [0, 4, 4], 1)]

    assert "[0, 4, 0, 6]" in rewrite(NAME, program, (X,)).text


def test_fewer_chunks_than_asked_for() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [part + 1 for part in torch.chunk(x, 4, 0)]

    assert "[2, 2, 2]" in rewrite(NAME, program, (X,)).text


def test_hsplit_of_a_vector_cuts_its_only_dimension() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [part + 1 for part in torch.hsplit(x[0], 2)]

    assert "split(getitem, [5, 5])" in rewrite(NAME, program, (X,)).text


def test_canonical() -> None:
    assert fired(NAME, lambda x: torch.split(x, [4, 6], 1)[1] + 1, X) == 0
