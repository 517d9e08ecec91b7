"""grouped_linear against single linears, in the interpreter (on a GPU: compiled) and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ACTIVATIONS
from kernels.grouped_linear import grouped_linear
from kernels.launch import is_interpreted
from kernels.tuning import pinned, tile
from tests.kernels import checks

Shapes = Sequence[tuple[int, int]]
"""(K, N) of each group."""


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    """In the interpreter tiles so small that a small group has several."""
    with ExitStack() as stack:
        for part in ("fwd", "dgrad", "wgrad") if is_interpreted() else ():
            small = tile(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
            stack.enter_context(pinned(f"grouped_linear_{part}", small))
        yield


def _inputs(
    batch: int,
    width: int,
    shapes: Shapes,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = True,
) -> list[Tensor]:
    """x, weights, biases."""
    torch.manual_seed(0)
    tensors = [torch.randn(batch, width)]
    tensors += [torch.randn(n, k) / max(1, k) ** 0.5 for k, n in shapes]
    tensors += [torch.randn(n) for _, n in shapes if bias]
    return [t.to(dtype).to(device) for t in tensors]


def _op(num: int, offsets: Sequence[int] | None, activation: str = "none") -> checks.Function:
    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:num], parameters[num:]
        return grouped_linear(x, weights, biases, offsets=offsets, activation=activation)

    return run


def _plain(num: int, offsets: Sequence[int] | None, activation: str = "none") -> checks.Function:
    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        parts, start = [], 0
        for g, weight in enumerate(parameters[:num]):
            first = start if offsets is None else offsets[g]
            piece = x[:, first : first + weight.shape[1]]
            bias = parameters[num + g] if len(parameters) > num else None
            parts.append(ACTIVATIONS[activation](F.linear(piece, weight, bias)))
            start += weight.shape[1]
        return torch.cat(parts, 1)

    return run


UNEQUAL = ((5, 3), (17, 20), (1, 1), (8, 33))


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize(
    ("batch", "width", "shapes", "offsets", "bias"),
    [
        (19, 31, UNEQUAL, None, True),
        (3, 40, UNEQUAL, (35, 1, 0, 20), False),
        (0, 31, UNEQUAL, None, True),
        (18, 24, ((8, 4),) * 3, None, True),
    ],
)
def test_is_as_accurate_as_plain_pytorch(
    batch: int,
    width: int,
    shapes: Shapes,
    offsets: Sequence[int] | None,
    bias: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    inputs = _inputs(batch, width, shapes, dtype, device, bias)
    checks.against(_op(len(shapes), offsets), _plain(len(shapes), offsets), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_right(activation: str, device: str) -> None:
    inputs = _inputs(4, 8, ((3, 2), (5, 4)), device=device)
    checks.against(_op(2, None, activation), _plain(2, None, activation), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_reads_its_inputs_where_they_lie(device: str) -> None:
    inputs = [checks.apart(t) for t in _inputs(4, 8, ((3, 2), (5, 4)), device=device)]
    checks.against(_op(2, None), _plain(2, None), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_parameters_may_lie_in_one_tensor(device: str) -> None:
    x, *_ = _inputs(4, 8, (), device=device)
    packed = torch.randn(2 * 3 + 4 * 5, device=device)

    def op(x: Tensor, packed: Tensor) -> Tensor:
        return grouped_linear(x, [packed[:6].view(2, 3), packed[6:].view(4, 5)])

    def plain(x: Tensor, packed: Tensor) -> Tensor:
        return _plain(2, None)(x, packed[:6].view(2, 3), packed[6:].view(4, 5))

    checks.against(op, plain, [x, packed])


@pytest.mark.parametrize("device", checks.DEVICES)
def test_offsets_have_64_bits(device: str) -> None:
    x, *parameters = _inputs(2, 8, ((3, 2), (5, 4)), torch.bfloat16, device=device)
    checks.against(_op(2, None), _plain(2, None), [checks.far_apart(x), *parameters])


@pytest.mark.parametrize("device", checks.DEVICES)
def test_is_the_same_each_time(device: str) -> None:
    inputs = _inputs(40, 8, ((3, 2), (5, 4)), torch.bfloat16, device)
    checks.same_each_time(_op(2, None), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_works_in_one_compiled_graph(device: str) -> None:
    checks.compiles(_op(2, None, "relu"), _inputs(4, 8, ((3, 2), (5, 4)), device=device))


@pytest.mark.parametrize("device", checks.DEVICES)
def test_casts_under_autocast(device: str) -> None:
    inputs = _inputs(4, 8, ((3, 2), (5, 4)), device=device)
    checks.casts(_op(2, None), _plain(2, None), inputs)


@pytest.mark.parametrize("interpreted", [True, False])
def test_gradients_are_those_of_finite_differences(interpreted: bool) -> None:
    inputs = _inputs(2, 6, ((2, 2), (3, 1)), torch.float64)
    inputs = [t.requires_grad_() for t in inputs]
    if interpreted:
        torch.autograd.gradcheck(_op(2, (4, 0), "tanh"), inputs, fast_mode=True)
    else:
        with checks.on_reference():
            torch.autograd.gradcheck(_op(2, (4, 0), "silu"), inputs)


def test_passes_opcheck() -> None:
    inputs = [t.requires_grad_() for t in _inputs(2, 5, ((2, 2), (3, 1)))]
    op = torch.ops.kernels.grouped_linear.default
    torch.library.opcheck(op, (inputs[0], inputs[1:3], inputs[3:], [0, 2], "relu"))


@pytest.mark.parametrize("offsets", [(0, 1), (0, 6), (-1, 4), (0,)])
def test_refuses_slices_that_overlap_or_are_not_there(offsets: Sequence[int]) -> None:
    with pytest.raises(ValueError, match=r"overlap|offsets for"):
        grouped_linear(torch.ones(2, 8), [torch.ones(1, 3)] * 2, offsets=offsets)


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="reach beyond"):
        grouped_linear(torch.ones(2, 5), [torch.ones(1, 3)] * 2)
    with pytest.raises(ValueError, match="group 1"):
        grouped_linear(torch.ones(2, 6), [torch.ones(1, 3)] * 2, [torch.ones(1), torch.ones(2)])
