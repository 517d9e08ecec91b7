"""Basic indexing becomes views; any other index stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from optimus.driver import Phase
from optimus.driver import rewrite as rewrite_graph
from optimus.pipeline import patterns_by_name
from tests.optimus.capture import Captured
from tests.optimus.patterns.rewriting import listing, missed, rewrite

NAME = "lower_index_to_narrow"
X = torch.randn(4, 6, 3, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor) -> list[Tensor]:
        taken = (x[:, 1:3], x[..., -1], x[2:, 0], x[None, :, 4], x[0, ..., None, :2], x[:, 5:2])
        return [t + 1 for t in taken]

    assert_expected_inline(
        rewrite(NAME, program, (X,)).text,
        """\
t = narrow(x, 1, 1, 2)
t_1 = select(x, 2, 2)
narrow = narrow(x, 0, 2, 2)
select = select(narrow, 1, 0)
unsqueeze = unsqueeze(x, 0)
select_1 = select(unsqueeze, 2, 4)
select_2 = select(x, 0, 0)
unsqueeze_1 = unsqueeze(select_2, 1)
narrow_1 = narrow(unsqueeze_1, 2, 0, 2)
t_5 = narrow(x, 1, 5, 0)
add = add(t, 1)
add_1 = add(t_1, 1)
add_2 = add(select, 1)
add_3 = add(select_1, 1)
add_4 = add(narrow_1, 1)
add_5 = add(t_5, 1)
return add, add_1, add_2, add_3, add_4, add_5""",
    )


EQUAL: list[Callable[[Tensor], Any]] = [
    lambda x: x[-1] * 2,
    lambda x: x[1, 2, 0] * 2,
    lambda x: x[:, -3:-1] * 2,
    lambda x: x[:, None, None, 2:4, None, 1] * 2,
    lambda x: x[..., None][:, 1] * 2,
    lambda x: x[1:3, 2:5, 1:2] * 2,
    lambda x: x[(slice(1, 2), Ellipsis)] * 2,
    lambda x: x[:0] * 2,
]


@pytest.mark.parametrize("program", EQUAL)
def test_means_the_same(program: Callable[[Tensor], Any]) -> None:
    result = rewrite(NAME, program, (X,))
    assert result.fired and "= getitem(" not in result.text


OTHER: list[Callable[[Tensor], Any]] = [
    lambda x: x[:, ::2] * 2,
    lambda x: x[[0, 2]] * 2,
    lambda x: x[torch.tensor([0, 2])] * 2,
    lambda x: x[:, :100] * 2,
    lambda x: x[True] * 2,
    lambda x: x[:, [1], 0] * 2,
]


@pytest.mark.parametrize("program", OTHER)
def test_other_index(program: Callable[[Tensor], Any]) -> None:
    missed(NAME, program, X)


def test_dynamic_size() -> None:
    def program(x: Tensor) -> Tensor:
        return x[:, 1:3].sum() + x[1:].sum() + x[-1].sum() + x[0].sum()

    result = rewrite(NAME, program, (X,), dynamic=True)
    assert result.fired == 3 and "a range of a dynamic dimension" in result.misses


def test_view_that_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.relu()
        y[:, 1:3].mul_(2)
        y[0] = 1
        return y

    rewrite(NAME, program, (X.detach(),))


def test_returned_view() -> None:
    assert rewrite(NAME, lambda x: (x[:, 1:3], x[0]), (X,)).fired == 2


def test_part_counted_from_the_end() -> None:
    captured = Captured(lambda x: torch.unbind(x, 0)[3] + 1, (X,))
    item = next(n for n in captured.module.graph.nodes if n.name.startswith("getitem"))
    item.args = (item.args[0], -1)  # Dynamo counts from the front by itself
    lower = patterns_by_name()[NAME]
    (_, report) = rewrite_graph(captured.module, (Phase("test", (lower,)),), strict=True)
    assert report.fired == 1
    assert "= getitem(unbind, 3)" in listing(captured.module)
