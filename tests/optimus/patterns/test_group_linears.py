"""Linears of unequal shapes on slices of one tensor become one call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from optimus.backend import copy_graph_module
from optimus.driver import rewrite as run
from optimus.patterns.kernels.group_linears import GroupLinears, forms
from optimus.pipeline import select
from optimus.verify import Verifier
from tests.optimus import coverage_models as models
from tests.optimus.capture import Captured
from tests.optimus.counting import count
from tests.optimus.patterns.kernels import fuse, missed
from tests.optimus.patterns.rewriting import Program, rewrite

PATTERN = GroupLinears()
X = torch.randn(3, 12, requires_grad=True)
W2, W6 = torch.randn(5, 2, requires_grad=True), torch.randn(4, 6, requires_grad=True)
B = torch.randn(5, requires_grad=True)


def test_golden() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slices in any order, with gaps, and one that overlaps the others."""
        return F.linear(x[:, 5:11], w).cos(), F.linear(x[:, 1:3], v).sin(), x[:, 2:4] @ v.t() + 1

    assert_expected_inline(
        fuse(PATTERN, program, (X, W2, W6)).text,
        """\
getitem_2 = narrow(x, 1, 2, 2)
narrow = narrow(x, 1, 1, 10)
grouped_linear_default = grouped_linear.default(narrow, [v, w], [], [0, 4], 'none')
split_1 = split(grouped_linear_default, [5, 4], 1)
getitem_5 = getitem(split_1, 0)
getitem_6 = getitem(split_1, 1)
linear_2 = linear(getitem_2, v)
cos = cos(getitem_6)
sin = sin(getitem_5)
add = add(linear_2, 1)
return cos, sin, add""",
    )


def test_sizes_and_types() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        a, _, b = x.split([2, 4, 6], -1)
        return F.linear(a, v)[:, :4] * F.linear(b, w)

    assert fuse(PATTERN, program, (X[:0].detach(), W2, W6)).fired == 1
    for dtype in (torch.float64, torch.bfloat16):
        assert fuse(PATTERN, program, [t.detach().to(dtype) for t in (X, W2, W6)]).fired == 1


def test_under_autocast() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x[:, :2], v)[:, :4] * F.linear(x[:, 6:], w)

    assert fuse(PATTERN, program, (X.detach(), W2.detach(), W6.detach())).fired == 1


OTHER: list[Program] = [
    lambda x, v, w, b: F.linear(x[:, :2], v).sum() + F.linear(x[:, 2:4], v, b).sum(),
    lambda x, v, w, b: F.linear(x[:, :2], v, b).sum() + F.linear(x[:, 6:], w).sum(),
    lambda x, v, w, b: F.linear(x[:, :2], v).sum() + F.linear(x[:, 1:7], w).sum(),
    lambda x, v, w, b: F.linear(x[:, :2], v).sum() + F.linear(x.cos()[:, 6:], w).sum(),
    lambda x, v, w, b: F.linear(x[:, :2], v).sum() + F.linear(x[1:2, 6:][0], w).sum(),
    lambda x, v, w, b: F.linear((y := F.linear(x[:, :6], w))[:, :2], v).sum() + y.sum(),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(PATTERN, program, X, W2, W6, B)


def test_written_in_between() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        a = F.linear(x[:, :2], v)
        x.mul_(2)
        return a.sum() + F.linear(x[:, 6:], w).sum()

    missed(PATTERN, program, X.detach(), W2.detach(), W6.detach())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is measured")
def test_never_unasked_on_a_cpu() -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.linear(x[:, :2], v).sum() + F.linear(x[:, 6:], w).sum()

    assert "no GPU" in rewrite("group_linears", program, (X, W2, W6)).misses


def test_what_is_timed_is_what_is_put_in() -> None:
    biases = [torch.randn(n) for n in (5, 4, 5)]
    weights = [W2, W6, torch.randn(5, 2)]
    for parameters in (weights, weights + biases):
        ours, plain = forms(0, 2, 9)
        torch.testing.assert_close(ours(X, *parameters), plain(X, *parameters))


@pytest.mark.slow
def test_towers_of_unequal_widths() -> None:
    """One launch for all first layers, and one product for the last; two for each backward."""
    torch.manual_seed(0)
    model = models.HetTowers()
    captured = Captured(model, model.inputs(64))
    module = copy_graph_module(captured.module)
    selection = select("all", knobs={"group_linears": {"gate": "always"}})
    run(module, selection.phases, strict=True)
    assert Verifier(captured.module, captured.inputs).difference(module) is None
    assert count(module, captured.inputs).gemms == (2, 4)
