"""Cross layers become one call each, what only looks like them stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torchrec.modules.crossnet import LowRankCrossNet

from optimus.patterns.kernels.fuse_cross_layer import FuseCrossLayer
from tests.optimus.patterns.kernels import fuse, missed
from tests.optimus.patterns.rewriting import Program

X, W, B = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4), torch.randn(4)


def test_golden() -> None:
    def program(x0: Tensor, down: Tensor, up: Tensor, b: Tensor) -> Tensor:
        return x0 * (F.linear(F.linear(x0, down), up) + b) + x0

    result = fuse(FuseCrossLayer(), program, (X, torch.randn(2, 4), torch.randn(4, 2), B))
    assert_expected_inline(
        result.text,
        """\
linear = linear(x0, down)
cross_layer_default = cross_layer.default(x0, linear, up, b, x0)
return cross_layer_default""",
    )


FORMS: list[Program] = [
    lambda x0, x, w, b: x + F.linear(x, w, b) * x0,
    lambda x0, x, w, b: x0 * (x @ w.t() + b) + x,
    lambda x0, x, w, b: x0 * F.linear(x, w) + b * x,
]


@pytest.mark.parametrize("program", FORMS)
def test_every_spelling(program: Program) -> None:
    assert fuse(FuseCrossLayer(), program, (X, X.detach() + 1, W, B)).fired == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", FORMS)
def test_under_autocast(program: Program, dtype: torch.dtype) -> None:
    def lowered(x0: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return program(x0, x, w, b)

    inputs = (X.detach().to(dtype), X.detach().to(dtype), W, B)
    assert fuse(FuseCrossLayer(), lowered, inputs).fired == 1


def test_dynamic_batch() -> None:
    assert fuse(FuseCrossLayer(), LowRankCrossNet(4, 2, 2), (X,), True).fired == 2


OTHER: list[Program] = [
    lambda x0, x, w, b: x0 * F.linear(x, w, b) - x,
    lambda x0, x, w, b: torch.add(x0 * F.linear(x, w, b), x, alpha=2),
    lambda x0, x, w, b: x0[:1] * F.linear(x, w, b) + x,
    lambda x0, x, w, b: x0 * F.linear(x, w, b) + x[:, :1],
    lambda x0, x, w, b: (x0 * F.linear(x, w, b)).relu() + x,
    lambda x0, x, w, b: x0 * F.linear(x[None], w, b) + x,
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(FuseCrossLayer(), program, X, X.detach() + 1, W, B)


def test_projection_is_used_elsewhere() -> None:
    def program(x0: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        z = F.linear(x, w, b)
        return (x0 * z + x) * z

    missed(FuseCrossLayer(), program, X, X, W, B)
