"""Joins and cuts of one part go, as do parts of no width."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import fired, missed, rewrite

NAME = "remove_single_parts"
X = torch.randn(4, 6, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> Tensor:
        a = torch.cat([torch.split(x, 6, 1)[0].relu()], 1)
        b = torch.unbind(torch.stack([a], 1), 1)[0]
        c = torch.cat([b.tanh(), x[:, :0], b], 1)
        return c[:1].select(0, 0) + x[:, 2:3].select(1, 0).sum()

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
relu = relu(x)
unsqueeze = unsqueeze(relu, 1)
squeeze = squeeze(unsqueeze, 1)
tanh = tanh(squeeze)
cat = cat([tanh, squeeze], 1)
getitem_3 = narrow(cat, 0, 0, 1)
squeeze_1 = squeeze(getitem_3, 0)
getitem_4 = narrow(x, 1, 2, 1)
squeeze_2 = squeeze(getitem_4, 1)
sum_1 = sum(squeeze_2)
add = add(squeeze_1, sum_1)
return add""",
    )


def test_fresh_result_stays_fresh() -> None:
    assert fired(NAME, lambda x: torch.cat([x], 1), X) == 1
    assert fired(NAME, lambda x: (torch.cat([x.relu()], 1), torch.stack([x])), X) == 2


def test_result_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.cat([x], 1)
        y[0] = 1
        return y + x

    assert "writes to memory" in missed(NAME, program, X.detach())


def test_source_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.stack([x], 1)
        x[0] = 1
        return y.sum(1) + x

    assert "writes to memory" in missed(NAME, program, X.detach())


def test_empty_part_of_another_dtype_decides_the_dtype() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(4, 0, dtype=torch.float64)], 1)

    assert "type" in missed(NAME, program, X)


def test_empty_vectors() -> None:
    missed(NAME, lambda x: torch.cat([x.new_zeros(0), x], 1), X)


def test_all_parts_empty() -> None:
    assert fired(NAME, lambda x: torch.cat([x[:, :0].relu(), x[:, :0].tanh()], 1), X) == 1


def test_dynamic_size_is_not_one() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cat([x.relu(), x.tanh()], 0) + x.select(1, 0).sum()

    missed(NAME, program, torch.randn(4, 2, requires_grad=True), dynamic=True)
