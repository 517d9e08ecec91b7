"""Parts of one tensor are put together again without a copy."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "cancel_split_cat"
X, Y = torch.randn(4, 16, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def parts(x: Tensor) -> tuple[Tensor, ...]:
    """Of widths 4, 4 and 8."""
    return torch.split(x, [4, 4, 8], 1)


def test_golden() -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b, c = parts(x)
        d, e, f = parts(x.tanh())
        whole = torch.cat([a, b, c], 1).relu()
        return whole, torch.cat([y, e, f], 1), torch.cat([a, b], 1) * d.sum(), a.sum()

    assert_expected_inline(
        rewrite(NAME, program, (X, Y)).text,
        """\
split = split(x, [4, 4, 8], 1)
a = getitem(split, 0)
tanh = tanh(x)
split_1 = split(tanh, [4, 4, 8], 1)
d = getitem(split_1, 0)
whole = relu(x)
narrow = narrow(tanh, 1, 4, 12)
cat_3 = cat([y, narrow], 1)
narrow_1 = narrow(x, 1, 0, 8)
sum_1 = sum(d)
mul = mul(narrow_1, sum_1)
sum_2 = sum(a)
return whole, cat_3, mul, sum_2""",
    )


APART: list[Program] = [
    lambda x, y: torch.cat([parts(x)[1], parts(x)[0]], 1),
    lambda x, y: torch.cat([parts(x)[0], parts(x)[2]], 1),
    lambda x, y: torch.cat([parts(x)[0], parts(x)[0]], 1),
    lambda x, y: torch.cat([parts(x)[0], parts(x)[1]], 0),
    lambda x, y: torch.cat([parts(x)[0], y, parts(x)[1]], 1),
    lambda x, y: torch.cat([parts(x)[0], parts(x.relu())[1]], 1),
    lambda x, y: torch.cat([parts(x)[0], parts(x)[1].relu()], 1),
    lambda x, y: torch.cat([x[:, :4], x[:, 5:8]], 1),
    lambda x, y: torch.cat([x[:, :4], x[:, 2:8]], 1),
    lambda x, y: torch.cat([x.unbind(0)[0], x.unbind(0)[1]], 0),
]


@pytest.mark.parametrize("program", APART)
def test_not_side_by_side(program: Program) -> None:
    missed(NAME, program, X, Y)


def test_through_any_way_of_cutting() -> None:
    def program(x: Tensor) -> Tensor:
        a, b = torch.chunk(x, 2, 1)
        c, d = a[:, :3], a.narrow(1, 3, 5)
        return torch.cat([c, d, *torch.tensor_split(b, [1, 4], 1)], 1) + 1

    assert rewrite(NAME, program, (X,)).text == "add = add(x, 1)\nreturn add"


def test_part_used_elsewhere_stays_in_a_longer_cat() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        a, b, c = parts(x)
        return torch.cat([y, a, b], 1).sum() + a.sum() + c.sum()

    missed(NAME, program, X, Y)


def test_part_used_twice_in_one_cat() -> None:
    def program(x: Tensor) -> Tensor:
        a, b, _ = parts(x)
        return torch.cat([a, b, a, b], 1) + 1

    result = rewrite(NAME, program, (X,))
    assert result.text.count("narrow(x, 1, 0, 8)") == 2


def test_result_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        joined = torch.cat(parts(x), 1)
        joined[0] = 1
        return joined + x

    assert "writes to memory" in missed(NAME, program, X.detach())


def test_source_is_written_later() -> None:
    def program(x: Tensor) -> Tensor:
        joined = torch.cat(parts(x)[:2], 1)
        x.mul_(2)
        return joined + x[:, :8]

    assert "writes to memory" in missed(NAME, program, X.detach())


def test_source_is_written_in_between() -> None:
    def program(x: Tensor) -> Tensor:
        cut = parts(x)
        x.mul_(2)
        return torch.cat(cut, 1)

    rewrite(NAME, program, (X.detach(),))


def test_returned_result_is_fresh_and_contiguous() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat(parts(x), 1), torch.cat(parts(x.t().contiguous().t())[1:], 1)

    assert fired(NAME, program, X) == 2


def test_view_of_the_result() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cat(parts(x)[:2], 1).view(4, 2, 4).relu()

    assert fired(NAME, program, X) == 1


def test_consumer_that_sees_strides() -> None:
    def program(x: Tensor) -> Tensor:
        joined = torch.cat(parts(x)[:2], 1)
        return torch.as_strided(joined, (8, 4), (4, 1)) + 1

    rewrite(NAME, program, (X,))


def test_grad_modes() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.no_grad():
            cut = parts(x)
        return torch.cat(cut, 1) * x

    missed(NAME, program, X)


def test_dtype_of_the_result() -> None:
    def program(x: Tensor) -> Tensor:
        a, b, _ = parts(x)
        return torch.cat([a, b.double()], 1)

    missed(NAME, program, X)


def test_dynamic_batch() -> None:
    assert fired(NAME, lambda x: torch.cat(parts(x)[:2], 1) + 1, X, dynamic=True) == 1


def test_dynamic_dimension_that_is_cut() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cat(torch.chunk(x, 2, 0), 0) + 1

    missed(NAME, program, X, dynamic=True)
