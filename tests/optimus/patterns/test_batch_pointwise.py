"""Pointwise operations on parts of one tensor become one."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "batch_pointwise"
X = torch.randn(5, 12, requires_grad=True)
W = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]


def test_golden() -> None:
    """On a region of whatever sizes; on a stack where each member has a parameter of its own."""

    def region(x: Tensor) -> Tensor:
        parts = [torch.tanh(part) for part in x.split([2, 4, 6], 1)]
        return torch.cat([parts[2], parts[1]], 1)

    assert_expected_inline(
        rewrite(NAME, region, (X,)).text,
        """\
narrow = narrow(x, 1, 2, 10)
tanh_3 = tanh(narrow)
split_1 = split(tanh_3, [4, 6], 1)
getitem = getitem(split_1, 0)
getitem_1 = getitem(split_1, 1)
cat = cat([getitem_1, getitem], 1)
return cat""",
    )

    def stack(x: Tensor, w: list[Tensor]) -> Tensor:
        return torch.stack([p * v for p, v in zip(x.split(4, 1), w, strict=True)])

    assert_expected_inline(
        rewrite(NAME, stack, (X, W)).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
stack_1 = stack([w_0, w_1, w_2])
mul_3 = mul(unflatten, stack_1)
unbind = unbind(mul_3, 1)
getitem = getitem(unbind, 0)
getitem_1 = getitem(unbind, 1)
getitem_2 = getitem(unbind, 2)
stack = stack([getitem, getitem_1, getitem_2])
return stack""",
    )


def test_broadcast() -> None:
    """What all share is broadcast; parts of two tensors may be cut along different dimensions."""

    def program(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        pairs = zip(x.split(4, 1), y.unbind(0), strict=True)
        return torch.cat([torch.addcmul(gate, p, q) for p, q in pairs])

    inputs = (X, torch.randn(3, 5, 4, requires_grad=True), torch.randn(4))
    assert_expected_inline(
        rewrite(NAME, program, inputs).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
movedim = transpose(y, 0, 1)
addcmul_3 = addcmul(gate, unflatten, movedim)
unbind_1 = unbind(addcmul_3, 1)
getitem = getitem(unbind_1, 0)
getitem_1 = getitem(unbind_1, 1)
getitem_2 = getitem(unbind_1, 2)
cat = cat([getitem, getitem_1, getitem_2])
return cat""",
    )


def test_views_in_between() -> None:
    """Equal views of parts are parts of a view."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([p.unsqueeze(-1).transpose(1, 2) * y for p in x.split(4, 1)])

    result = rewrite(NAME, program, (X, torch.randn(5, 2, 1)))
    assert result.fired == 1
    assert_expected_inline(
        result.text,
        """\
unflatten = unflatten(x, 1, [3, 4])
movedim = transpose(unflatten, 0, 1)
unsqueeze_3 = unsqueeze(movedim, 3)
transpose_3 = transpose(unsqueeze_3, 2, 3)
mul_3 = mul(transpose_3, y)
unbind = unbind(mul_3)
getitem = getitem(unbind, 0)
getitem_1 = getitem(unbind, 1)
getitem_2 = getitem(unbind, 2)
cat = cat([getitem, getitem_1, getitem_2])
return cat""",
    )


def test_every_second() -> None:
    def program(x: Tensor) -> Tensor:
        parts = x.split(2, 1)
        return sum(torch.sin(parts[i]) if i % 2 else torch.cos(parts[i]) for i in range(6))

    result = rewrite(NAME, program, (X,))
    assert result.fired == 2 and "stack" not in result.text and "cat" not in result.text

    def items(x: Tensor) -> Tensor:
        parts = x.unflatten(1, (6, 2)).unbind(1)
        return torch.cat([torch.sin(parts[i]) for i in (1, 3, 5)])

    assert fired(NAME, items, X) == 1


ALIKE: list[Program] = [
    lambda x, i: torch.where(x[:, i : i + 2] > 0, x[:, i : i + 2], 0.0),
    lambda x, i: x[:, i : i + 2].clamp(-0.5, 0.5),
    lambda x, i: torch.nn.functional.leaky_relu(x[:, i : i + 2], 0.2),
    lambda x, i: x[:, i : i + 2].to(torch.float64),
    lambda x, i: 1 - x[:, i : i + 2],
    lambda x, i: x[:, i : i + 2].nan_to_num(0.5),
]


@pytest.mark.parametrize("part", ALIKE)
def test_alike(part: Program) -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cat([part(x, i) for i in (0, 2, 4)])

    assert fired(NAME, program, X) >= 1


OTHER: list[Program] = [
    lambda x: (x[:, :2].clamp(0, 1), x[:, 2:4].clamp(0, 2)),
    lambda x: (x[:, :2].add(1, alpha=2), x[:, 2:4].add(1, alpha=3)),
    lambda x: (x[:, :2] * 1, x[:, 2:4] * 1.0),
    lambda x: (x[:, :2] * 2, x[:, 2:4] * True),
    lambda x: (torch.nn.functional.gelu(x[:, :2]),
               torch.nn.functional.gelu(x[:, 2:4], approximate="tanh")),
    lambda x: (x[:, :2].tanh(), x[:, 2:4].detach().tanh()),
    lambda x: (x[:, :2].tanh(), x[:, 2:4].double().tanh()),
    lambda x: (y := x[:, :2].tanh(), (x[:, 2:4] + y).tanh()),
    lambda x: (x[:, :2].tanh(), x[:3, 4:6].tanh()),
    lambda x: (x[:, :2].tanh(), x[:, 1:3].tanh()),
    lambda x: ((x[:, :2] + x[:, 4:6]), (x[:, 2:4] + x[:, 8:10] * 2)),
    lambda x: (x.tanh(), x.sin().tanh()),
]  # fmt: skip


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    def used(x: Tensor) -> Tensor:
        return torch.stack([y.sum(1).sum(0) for y in program(x)])

    missed(NAME, used, X)
    missed(NAME, program, X)


def test_memory_and_context() -> None:
    def written(x: Tensor) -> Tensor:
        x = x.clone()
        one = x[:, :2].tanh()
        x[:, 2] = 0.5
        return one + x[:, 2:4].tanh()

    def written_later(x: Tensor) -> Tensor:
        one, other = x[:, :2].tanh(), x[:, 2:4].tanh()
        other[:, 0] = 1.0
        return one + other

    def grad_mode(x: Tensor) -> Tensor:
        one = x[:, :2].tanh()
        with torch.no_grad():
            other = x[:, 2:4].tanh()
        return one + other

    def autocast(x: Tensor) -> Tensor:
        one = x[:, :2].tanh()
        with torch.autocast("cpu", torch.bfloat16):
            other = x[:, 2:4].tanh()
        return one + other

    for program in (written, written_later, grad_mode, autocast):
        missed(NAME, program, X.detach())


def test_returned() -> None:
    """Results that are returned as they are would have to be copied out."""

    def program(x: Tensor) -> list[Tensor]:
        return [x[:, :2].tanh(), x[:, 2:4].tanh()]

    missed(NAME, program, X)


def test_sizes() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.cat([torch.tanh(part) for part in x.split([2, 4, 6], 1)][::-1], 1)

    assert fired(NAME, program, X, dynamic=True) == 1
    assert fired(NAME, program, torch.randn(0, 12)) == 1
