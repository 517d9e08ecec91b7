"""gated_linear against two linears and a gate, in the interpreter (on a GPU: compiled)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ACTIVATIONS
from kernels.gated_linear import gated_linear
from kernels.launch import is_interpreted
from kernels.tuning import pinned, tile
from tests.kernels import checks


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    """In the interpreter tiles so small that a small layer has several."""
    with ExitStack() as stack:
        if is_interpreted():
            stack.enter_context(pinned("gated_linear", tile(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)))
        yield


def _inputs(
    *shape: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = True,
) -> list[Tensor]:
    """x, gate, up, biases."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape), *(torch.randn(size, shape[-1]) / 3 for _ in range(2))]
    tensors += [torch.randn(size) for _ in range(2 if bias else 0)]
    return [t.to(dtype).to(device) for t in tensors]


def _op(activation: str) -> checks.Function:
    return lambda *inputs: gated_linear(*inputs, activation=activation)


def _plain(activation: str) -> checks.Function:
    def run(
        x: Tensor, gate: Tensor, up: Tensor, one: Tensor | None = None, two: Tensor | None = None
    ) -> Tensor:
        return ACTIVATIONS[activation](F.linear(x, gate, one)) * F.linear(x, up, two)

    return run


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
    checks.against(_op("gelu"), _plain("gelu"), inputs)


@pytest.mark.gpu
def test_several_tiles_are_as_accurate_as_plain_pytorch() -> None:
    inputs = _inputs(150, 72, size=133, dtype=torch.bfloat16, device="cuda")
    checks.against(_op("gelu"), _plain("gelu"), inputs)


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize(
    ("shape", "size", "bias"),
    [((19, 40), 33, True), ((2, 3, 8), 5, False), ((0, 8), 4, True)],
)
def test_is_as_accurate_when_it_loads_by_tma(
    shape: tuple[int, ...], size: int, bias: bool, dtype: torch.dtype
) -> None:
    inputs = _inputs(*shape, size=size, dtype=dtype, bias=bias)
    with pinned("gated_linear", tile(TMA=1, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)):
        checks.against(_op("gelu"), _plain("gelu"), inputs)


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
    x, gate, up, *biases = _inputs(2, 8, size=4, dtype=torch.bfloat16, device=device)
    inputs = [checks.far_apart(x), checks.far_apart(gate), up, *biases]
    checks.against(_op("silu"), _plain("silu"), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_without_gradients_only_the_result_is_written(device: str) -> None:
    inputs = _inputs(4, 8, size=5, device=device)
    with torch.no_grad(), checks.poisoned():
        torch.testing.assert_close(_op("gelu")(*inputs), _plain("gelu")(*inputs))
    _, opened, value = torch.ops.kernels.gated_linear(*inputs, "gelu", False)
    assert opened.numel() == value.numel() == 0


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
    op = torch.ops.kernels.gated_linear.default
    torch.library.opcheck(op, (*inputs, "gelu", True))


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="gated_linear needs"):
        gated_linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(5, 3))
    with pytest.raises(ValueError, match="gated_linear needs"):
        gated_linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3), torch.ones(3))
