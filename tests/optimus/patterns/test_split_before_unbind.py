"""Rows that are all split alike are parts of a tensor that was split before."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, rewrite

NAME = "split_before_unbind"
X = torch.randn(2, 3, 6)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        heads = [row.chunk(3, -1) for row in x.unbind(1)]
        return torch.stack([torch.cat([head[j] for head in heads], -1) for j in range(3)], 1)

    also = ("merge_unbind_cat", "move_reshape_out_of_stack", "merge_split_stack")
    assert_expected_inline(
        rewrite(NAME, program, (X,), *also).text,
        """\
unflatten = unflatten(x, 2, [3, 2])
permute = permute(unflatten, [2, 0, 1, 3])
reshape = reshape(permute, [3, 2, 6])
transpose = transpose(reshape, 0, 1)
clone = clone(transpose, memory_format=torch.contiguous_format)
return clone""",
    )


def test_rows_along_the_split_dimension_and_behind_it() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack(
            [a.sum() + b.mean() for a, b in (r.split([1, 2], 1) for r in x.unbind(2))]
        )

    assert fired(NAME, program, torch.randn(2, 3, 4)) == 1
    assert fired(NAME, program, torch.randn(2, 3, 4), dynamic=True) == 1


def test_a_row_read_whole_stays() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.unbind(1)
        return torch.stack([r.chunk(2, -1)[1].sin() for r in rows]), rows[0] + 1

    assert fired(NAME, program, X) == 0


def test_a_row_left_out_stays() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.stack([r.chunk(2, -1)[1].sin() for r in x.unbind(1)[1:]])

    assert fired(NAME, program, X) == 0


def test_rows_that_are_written_to_stay() -> None:
    def program(x: Tensor) -> Tensor:
        x = x + 0
        pieces = [row.tensor_split(2, -1) for row in x.unbind(1)]
        for first, _ in pieces:
            first.mul_(2)
        return torch.cat([piece for pair in pieces for piece in pair], -1) + x.sum()

    rewrite(NAME, program, (X,))  # asserts that it still does what it did
