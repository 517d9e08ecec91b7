"""linear_act against a linear and an activation, in the interpreter (on a GPU: compiled)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ACTIVATIONS
from kernels.launch import is_interpreted
from kernels.linear_act import linear_act
from kernels.tuning import pinned, tile
from tests.kernels import checks


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    """In the interpreter tiles so small that a small layer has several."""
    with ExitStack() as stack:
        if is_interpreted():
            small = tile(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
            stack.enter_context(pinned("linear_act_fwd", small))
            stack.enter_context(pinned("linear_act_bwd", tile(BLOCK_M=4, BLOCK_N=16)))
        yield


def _inputs(
    *shape: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = True,
) -> list[Tensor]:
    """x, weight, bias."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape), torch.randn(size, shape[-1]) / 3]
    tensors += [torch.randn(size)] if bias else []
    return [t.to(dtype).to(device) for t in tensors]


def _op(activation: str) -> checks.Function:
    return lambda *inputs: linear_act(*inputs, activation=activation)


def _plain(activation: str) -> checks.Function:
    return lambda *inputs: ACTIVATIONS[activation](F.linear(*inputs))


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize(
    ("shape", "size", "bias"),
    [((19, 35), 33, True), ((2, 3, 8), 5, False), ((0, 8), 4, True)],
)
def test_is_as_accurate_as_plain_pytorch(
    shape: tuple[int, ...], size: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    inputs = _inputs(*shape, size=size, dtype=dtype, device=device, bias=bias)
    checks.against(_op("relu"), _plain("relu"), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_several_tiles_are_as_accurate_as_plain_pytorch(activation: str) -> None:
    inputs = _inputs(150, 72, size=136, dtype=torch.bfloat16, device="cuda")
    checks.against(_op(activation), _plain(activation), inputs)


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize(
    ("shape", "size", "bias"),
    [((19, 40), 24, True), ((2, 3, 8), 8, False), ((0, 8), 8, True)],
)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_is_as_accurate_when_it_copies_by_tma(
    activation: str, shape: tuple[int, ...], size: int, bias: bool, dtype: torch.dtype
) -> None:
    inputs = _inputs(*shape, size=size, dtype=dtype, bias=bias)
    with pinned("linear_act_fwd", tile(TMA=1, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)):
        checks.against(_op(activation), _plain(activation), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_right(activation: str, device: str) -> None:
    inputs = _inputs(6, 8, size=5, device=device)
    checks.against(_op(activation), _plain(activation), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_reads_its_inputs_where_they_lie(device: str) -> None:
    inputs = [checks.apart(t) for t in _inputs(4, 8, size=5, device=device)]
    checks.against(_op("silu"), _plain("silu"), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_offsets_have_64_bits(device: str) -> None:
    x, *parameters = _inputs(2, 8, size=4, dtype=torch.bfloat16, device=device)
    checks.against(_op("relu"), _plain("relu"), [checks.far_apart(x), *parameters])


@pytest.mark.parametrize("device", checks.DEVICES)
def test_relu_keeps_nothing_but_its_result(device: str) -> None:
    inputs = _inputs(4, 8, size=5, device=device)
    for activation, save, kept in (("relu", True, 0), ("gelu", True, 20), ("gelu", False, 0)):
        _, z = torch.ops.kernels.linear_act(*inputs, activation, save)
        assert z.numel() == kept


def test_nan_goes_through_relu_and_back() -> None:
    x, weight, bias = _inputs(3, 4, size=2)
    x[1, 2] = torch.nan
    for one, other in zip(
        checks.run(_op("relu"), (x, weight, bias)),
        checks.run(_plain("relu"), (x, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_is_the_same_each_time(device: str) -> None:
    checks.same_each_time(_op("silu"), _inputs(20, 8, size=5, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("device", checks.DEVICES)
def test_works_in_one_compiled_graph(device: str) -> None:
    checks.compiles(_op("gelu_tanh"), _inputs(2, 3, 8, size=5, device=device))


@pytest.mark.parametrize("device", checks.DEVICES)
def test_casts_under_autocast(device: str) -> None:
    checks.casts(_op("gelu"), _plain("gelu"), _inputs(4, 8, size=5, device=device))


@pytest.mark.parametrize("interpreted", [True, False])
def test_gradients_are_those_of_finite_differences(interpreted: bool) -> None:
    inputs = [t.requires_grad_() for t in _inputs(2, 3, size=2, dtype=torch.float64)]
    if interpreted:
        torch.autograd.gradcheck(_op("silu"), inputs, fast_mode=True)
    else:
        with checks.on_reference():
            torch.autograd.gradcheck(_op("gelu"), inputs)


def test_passes_opcheck() -> None:
    inputs = [t.requires_grad_() for t in _inputs(2, 3, size=4)]
    op = torch.ops.kernels.linear_act.default
    torch.library.opcheck(op, (*inputs, "gelu", True))


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="linear_act needs"):
        linear_act(torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(ValueError, match="linear_act needs"):
        linear_act(torch.ones(2, 3), torch.ones(4, 3), torch.ones(3))
