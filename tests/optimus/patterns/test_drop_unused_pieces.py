"""Only the parts that are used are cut off."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "drop_unused_pieces"
X = torch.randn(4, 12, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        a, b, c = torch.split(x, 2, 1)[1], torch.chunk(x, 2, 0)[1], torch.unbind(x, 1)[3]
        d, _, _, e, _, _ = torch.split(x.tanh(), 2, 1)
        return [part.relu() for part in (a, b, c, d, e)]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
narrow = narrow(x, 1, 2, 2)
narrow_1 = narrow(x, 0, 2, 2)
select = select(x, 1, 3)
tanh = tanh(x)
split_2 = split(tanh, [2, 4, 2, 4], 1)
getitem = getitem(split_2, 0)
getitem_1 = getitem(split_2, 2)
relu = relu(narrow)
relu_1 = relu(narrow_1)
relu_2 = relu(select)
relu_3 = relu(getitem)
relu_4 = relu(getitem_1)
return relu, relu_1, relu_2, relu_3, relu_4""",
    )


def test_gaps_of_one() -> None:
    def program(x: Tensor) -> Tensor:
        a, _, b, _ = torch.split(x, 3, 1)
        return a * b + torch.unbind(x, 1)[0].sum() + torch.unbind(x, 1)[5].sum()

    assert fired(NAME, program, X) == 2  # the unbinds


def test_all_used() -> None:
    missed(NAME, lambda x: sum(torch.split(x, 3, 1)) + sum(torch.unbind(x, 0)).sum(), X)


def test_whole_tuple_is_returned() -> None:
    rewrite(NAME, lambda x: torch.split(x, 3, 1), (X,))


def test_memory_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        a = torch.split(x, 3, 1)[1]
        x.mul_(2)
        return a + 1

    assert fired(NAME, program, X.detach()) == 1


def test_part_of_no_width() -> None:
    missed(NAME, lambda x: torch.split(x, [0, 4, 8], 1)[0] + 1, X)


def test_dynamic_batch() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.split(x, 3, 1)[1].relu() + torch.chunk(x, 2, 0)[0].sum()

    assert fired(NAME, program, X, dynamic=True) == 1


def test_no_ping_pong_with_ranges() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.split(x, 2, 1)[1], x[:, 8:10]
        return a * b + torch.split(x, 2, 1)[5]

    result = rewrite(NAME, program, (X,))
    assert result.text.count("split(") == 1 and "narrow" not in result.text
