"""Narrow MLPs become one call, wide and branching ones stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from optimus.patterns.kernels.fuse_narrow_mlp import FuseNarrowMlp
from tests.optimus.patterns.kernels import fuse, missed
from tests.optimus.patterns.rewriting import Program

X = torch.randn(3, 5)


def _mlp(*sizes: int, act: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, size in enumerate(sizes[1:]):
        layers += [nn.Linear(sizes[i], size, bias), act()]
    return nn.Sequential(*layers[:-1])


def test_golden() -> None:
    def program(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, w1)), w2).sigmoid()

    result = fuse(FuseNarrowMlp(), program, (X, torch.randn(4, 5), torch.randn(1, 4)))
    assert_expected_inline(
        result.text,
        """\
unsqueeze = unsqueeze(x, 0)
unsqueeze_1 = unsqueeze(w1, 0)
unsqueeze_2 = unsqueeze(w2, 0)
fused_mlp_default = fused_mlp.default(unsqueeze, [unsqueeze_1, unsqueeze_2], [], 'silu', False, False)
getitem = getitem(fused_mlp_default, 0)
squeeze = squeeze(getitem, 0)
sigmoid = sigmoid(squeeze)
return sigmoid""",  # noqa: E501
    )


def test_keeps_what_backward_needs_where_there_is_one() -> None:
    mlp = _mlp(5, 4, 3)
    assert "'relu', False, True)" in fuse(FuseNarrowMlp(), mlp, (X,)).text
    frozen = mlp.requires_grad_(False)
    assert "'relu', False, False)" in fuse(FuseNarrowMlp(), frozen, (X,)).text


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid])
def test_every_activation(act: type[nn.Module]) -> None:
    assert fuse(FuseNarrowMlp(), _mlp(5, 4, 3, 1, act=act), (X,)).fired == 1


def test_approximate_gelu_stays_approximate() -> None:
    mlp = nn.Sequential(nn.Linear(5, 4), nn.GELU("tanh"), nn.Linear(4, 1))
    assert "'gelu_tanh'" in fuse(FuseNarrowMlp(), mlp, (X,)).text


def test_the_end_of_a_wide_network() -> None:
    result = fuse(FuseNarrowMlp(), _mlp(5, 600, 4, 3, 2, 1, bias=False), (X,))
    assert result.fired == 1
    assert result.text.count(" linear(") == 2, "600 columns are too wide for both layers they touch"


def test_two_networks_behind_each_other() -> None:
    mlp = nn.Sequential(_mlp(5, 4, 3, act=nn.ReLU), nn.LayerNorm(3), _mlp(3, 4, 2, act=nn.SiLU))
    assert fuse(FuseNarrowMlp(), mlp, (X,)).fired == 2


def test_dynamic_batch() -> None:
    assert fuse(FuseNarrowMlp(), _mlp(5, 4, 3), (X,), True).fired == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype: torch.dtype) -> None:
    def program(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(F.linear(x, w1, b1).relu(), w2, b2)

    shapes = ((4, 5), (4,), (3, 4), (3,))
    assert fuse(FuseNarrowMlp(), program, (X.to(dtype), *map(torch.randn, shapes))).fired == 1


W1, W2, B1 = torch.randn(5, 5), torch.randn(5, 5), torch.randn(5)
OTHER: list[Program] = [
    lambda x, w1, w2, b: F.linear(F.linear(x, w1), w2),
    lambda x, w1, w2, b: F.linear(F.relu(F.linear(x, w1, b)), w2),
    lambda x, w1, w2, b: F.linear(F.linear(x, w1).relu() + 1, w2),
    lambda x, w1, w2, b: F.linear(F.linear(x[None], w1).relu(), w2),
    lambda x, w1, w2, b: F.linear(F.leaky_relu(F.linear(x, w1)), w2),
    lambda x, w1, w2, b: F.linear(w2, F.linear(x, w1).relu()),
]


@pytest.mark.parametrize("program", OTHER)
def test_other(program: Program) -> None:
    missed(FuseNarrowMlp(), program, X, W1, W2, B1)


def test_a_hidden_layer_is_used_elsewhere() -> None:
    def program(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        h = F.linear(x, w1).relu()
        return F.linear(h, w2) + h

    missed(FuseNarrowMlp(), program, X, W1, W2)


def test_two_activations() -> None:
    def program(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(F.linear(x, w1).relu(), w2)), w1)

    result = fuse(FuseNarrowMlp(), program, (X, W1, W2))
    assert result.fired == 1
    assert "relu" in result.text
