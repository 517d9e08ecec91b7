"""Linears of equal shapes become one batched GEMM."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.optimus.patterns.rewriting import Program, fired, missed, rewrite

NAME = "batch_linears"
X = torch.randn(5, 12)
W = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
B = [torch.randn(3, requires_grad=True) for _ in range(3)]
F = torch.nn.functional


def test_golden() -> None:
    """Inputs in another order than that in memory are still one view."""

    def program(x: Tensor, w: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        parts = x.split(4, 1)
        return [F.linear(parts[i], w[i], b[i]) for i in (2, 0, 1)]

    assert_expected_inline(
        rewrite(NAME, program, (X, W, B)).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
stack = stack([w_0, w_1, w_2])
movedim = transpose(unflatten, 0, 1)
transpose = transpose(stack, 1, 2)
stack_1 = stack([b_0, b_1, b_2])
unsqueeze = unsqueeze(stack_1, 1)
baddbmm = baddbmm(unsqueeze, movedim, transpose)
unbind = unbind(baddbmm)
getitem_3 = getitem(unbind, 0)
clone_1 = clone(getitem_3, memory_format=torch.contiguous_format)
getitem_4 = getitem(unbind, 1)
clone_2 = clone(getitem_4, memory_format=torch.contiguous_format)
getitem_5 = getitem(unbind, 2)
clone = clone(getitem_5, memory_format=torch.contiguous_format)
return clone, clone_1, clone_2""",
    )


def test_stored_transposed() -> None:
    """Weights of products are stacked as they are stored."""

    def program(x: Tensor, w: list[Tensor]) -> Tensor:
        parts = x.unflatten(1, (3, 4)).unbind(1)
        return torch.stack([p @ m.mT.contiguous().mT.t() for p, m in zip(parts, w, strict=True)])

    def stored(x: Tensor, w: list[Tensor]) -> Tensor:
        parts = x.unflatten(1, (3, 4)).unbind(1)
        return torch.stack([p @ m for p, m in zip(parts, w, strict=True)])

    weights = [torch.randn(4, 3, requires_grad=True) for _ in range(3)]
    assert_expected_inline(
        rewrite(NAME, stored, (X, weights)).text,
        """\
unflatten = unflatten(x, 1, [3, 4])
stack_1 = stack([w_0, w_1, w_2])
transpose_3 = transpose(stack_1, 1, 2)
movedim = transpose(unflatten, 0, 1)
transpose_4 = transpose(transpose_3, 1, 2)
bmm = bmm(movedim, transpose_4)
unbind_1 = unbind(bmm)
getitem = getitem(unbind_1, 0)
getitem_1 = getitem(unbind_1, 1)
getitem_2 = getitem(unbind_1, 2)
stack = stack([getitem, getitem_1, getitem_2])
return stack""",
    )
    assert fired(NAME, program, X, W) == 1


def test_copies_wait() -> None:
    """Inputs that are apart are copied only after what makes them has been merged."""

    def program(x: Tensor, w: list[Tensor], v: list[Tensor]) -> Tensor:
        parts = x.split(4, 1)
        hidden = [F.linear(p, m).relu() for p, m in zip(parts, w, strict=True)]
        return torch.cat([F.linear(h, m) for h, m in zip(hidden[::-1], v, strict=True)], 1)

    v = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    alone = rewrite(NAME, program, (X, W, v))
    assert alone.fired == 2 and alone.text.count("= stack(") == 3
    together = rewrite(NAME, program, (X, W, v), "batch_pointwise")
    assert together.fired == 2 and together.text.count("= stack(") == 2


def test_rows() -> None:
    def program(x: Tensor) -> Tensor:
        parts = x.split(4, -1)
        return torch.cat([F.linear(*pwb) for pwb in zip(parts, W, B, strict=True)], -1)

    for x in (torch.randn(2, 3, 12), torch.randn(2, 3, 2, 12)):
        assert fired(NAME, program, x) == fired(NAME, program, x, dynamic=True) == 1
    assert fired(NAME, program, torch.randn(0, 12)) == 1


@pytest.mark.parametrize(
    ("rows", "before", "width", "dtype", "copied"),
    [
        (256, 3, 4, torch.float32, True),  # rows of 44 bytes, of which 12 come first
        (255, 3, 4, torch.float32, False),  # too few for a copy to pay
        (256, 4, 4, torch.float32, False),  # at multiples of 16 as they are
        (256, 2, 3, torch.float32, False),  # a copy would be no better
        (256, 4, 8, torch.bfloat16, True),
        (256, 8, 4, torch.bfloat16, False),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_where_a_gpu_loads_slowly_are_copied(
    rows: int, before: int, width: int, dtype: torch.dtype, copied: bool, dynamic: bool
) -> None:
    weights = [torch.randn(3, width, dtype=dtype, requires_grad=True) for _ in range(2)]

    def program(x: Tensor) -> Tensor:
        parts = torch.relu(x).split([before, width, width], 1)[1:]
        return torch.cat([F.linear(p, w) for p, w in zip(parts, weights, strict=True)], 1)

    x = torch.randn(rows, before + 2 * width, dtype=dtype, requires_grad=True)
    found = rewrite(NAME, program, (x,), dynamic=dynamic and rows == 256)
    assert found.fired == 1
    assert ("contiguous" in found.text) == copied


OTHER: list[Program] = [
    lambda x, w, b: (F.linear(x[:, :4], w[0], b[0]), F.linear(x[:, 4:8], w[1])),
    lambda x, w, b: (F.linear(x[:, :4], w[0]), F.linear(x[:3, 4:8], w[1])),
    lambda x, w, b: (F.linear(x[:, :4], w[0]), F.linear(x[:, 4:8], w[1][:2])),
    lambda x, w, b: (F.linear(x[:, :4], w[0]), F.linear(x[:, 4:8], w[1].detach())),
    lambda x, w, b: (F.linear(x[:, :4], w[0]), F.linear(x[:, 4:8].double(), w[1].double())),
    lambda x, w, b: (y := F.linear(x[:, :4], w[0]), F.linear(x[:, 4:8] + y.sum(), w[1])),
    lambda x, w, b: (F.linear(x[0, :4], w[0]), F.linear(x[0, 4:8], w[1])),
    lambda x, w, b: (F.linear(x[:, :4], w[0]), F.linear(x[:, 4:8], w[0])),
    lambda x, w, b: (F.linear(x[:, :4], w[0]), F.linear(x[:, :4], w[1])),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(NAME, program, X, W, B)


def test_contexts() -> None:
    def grad(x: Tensor, w: list[Tensor]) -> tuple[Tensor, Tensor]:
        one = F.linear(x[:, :4], w[0])
        with torch.no_grad():
            return one, F.linear(x[:, 4:8], w[1])

    def autocast(x: Tensor, w: list[Tensor]) -> tuple[Tensor, Tensor]:
        one = F.linear(x[:, :4], w[0])
        with torch.autocast("cpu", torch.bfloat16):
            return one, F.linear(x[:, 4:8], w[1]).float()

    def written(x: Tensor, w: list[Tensor]) -> tuple[Tensor, Tensor]:
        x = x.clone()
        one = F.linear(x[:, :4], w[0])
        x[:, 4:6] = 1.0
        return one, F.linear(x[:, 4:8], w[1])

    for program in (grad, autocast, written):
        missed(NAME, program, X, [w.detach() for w in W])


def test_autocast() -> None:
    def program(x: Tensor, w: list[Tensor], b: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            parts = x.split(4, 1)
            outs = [F.linear(p, m, c) for p, m, c in zip(parts, w, b, strict=True)]
        return torch.cat(outs, 1)

    assert fired(NAME, program, X, W, B) == 1
