"""fused_mlp against linears one by one, in the interpreter (on a GPU: compiled) and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ACTIVATIONS
from kernels.fused_mlp import fused_mlp
from kernels.launch import is_interpreted
from kernels.tuning import pinned, tile
from tests.kernels import checks


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    """In the interpreter tiles so small that a small network has several."""
    with ExitStack() as stack:
        if is_interpreted():
            for op in ("fused_mlp_fwd", "fused_mlp_bwd"):
                stack.enter_context(pinned(op, tile(BLOCK_M=16, CHUNK=16)))
            small = tile(BLOCK_M=16, BLOCK_O=16, BLOCK_I=16)
            stack.enter_context(pinned("fused_mlp_weights", small))
        yield


def _inputs(
    batch: int,
    *sizes: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = True,
    towers: int = 0,
) -> list[Tensor]:
    """x, weights, biases."""
    torch.manual_seed(0)
    lead = (towers,) if towers else ()
    shapes = [(*lead, batch, sizes[0])]
    shapes += [(*lead, b, a) for a, b in pairwise(sizes)]
    shapes += [(*lead, size) for size in sizes[1:] if bias]
    scaled = [torch.randn(s) / (s[-1] ** 0.5 if len(s) > 1 + len(lead) else 1) for s in shapes]
    scaled[0] = torch.randn(shapes[0])
    return [t.to(dtype).to(device) for t in scaled]


def _op(num_layers: int, activation: str = "relu", last: bool = False) -> checks.Function:
    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[:num_layers], parameters[num_layers:]
        return fused_mlp(x, weights, biases, activation=activation, activate_last=last)

    return run


def _plain(num_layers: int, activation: str = "relu", last: bool = False) -> checks.Function:
    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        if x.dim() == 2:
            return one(x, parameters)
        towers = range(len(x))
        return torch.stack([one(x[t], [p[t] for p in parameters]) for t in towers])

    def one(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        for i, weight in enumerate(parameters[:num_layers]):
            bias = parameters[num_layers + i] if len(parameters) > num_layers else None
            x = F.linear(x, weight, bias)
            if last or i + 1 < num_layers:
                x = ACTIVATIONS[activation](x)
        return x

    return run


NETWORKS = [
    ((13, 40, 20, 17), True, True),
    ((20, 33, 1), False, False),
    ((5, 24, 18, 3, 1), True, False),
]


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize(("sizes", "bias", "last"), NETWORKS)
def test_is_as_accurate_as_plain_pytorch(
    sizes: tuple[int, ...], bias: bool, last: bool, dtype: torch.dtype, device: str
) -> None:
    inputs = _inputs(19, *sizes, dtype=dtype, device=device, bias=bias)
    layers = len(sizes) - 1
    checks.against(_op(layers, "relu", last), _plain(layers, "relu", last), inputs)


# Widths that the compiler lays out in different ways; a fault of it may need one of them.
MANY_NETWORKS = [
    (5, 6, 4),
    (64, 32, 16),
    (40, 512, 32),
    (100, 20, 200, 2),
    (256, 128, 64, 1),
    (13, 512, 256, 128),
    (16, 64, 32, 16, 8),
    (30, 100, 50, 25, 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", MANY_NETWORKS)
def test_is_as_accurate_for_many_networks(sizes: tuple[int, ...]) -> None:
    layers = len(sizes) - 1
    inputs = _inputs(300, *sizes, dtype=torch.bfloat16, device="cuda")
    checks.against(_op(layers, "silu"), _plain(layers, "silu"), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_right(activation: str, device: str) -> None:
    inputs = _inputs(3, 5, 6, 4, device=device)
    checks.against(_op(2, activation, True), _plain(2, activation, True), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_towers_run_at_once(device: str) -> None:
    inputs = _inputs(18, 5, 9, 4, 1, device=device, towers=3)
    checks.against(_op(3), _plain(3), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_an_empty_batch_has_zero_gradients(device: str) -> None:
    checks.against(_op(2), _plain(2), _inputs(0, 5, 6, 4, device=device))


@pytest.mark.parametrize("device", checks.DEVICES)
def test_towers_on_columns_of_one_tensor_are_read_where_they_lie(device: str) -> None:
    x, *parameters = _inputs(4, 5, 6, 4, device=device, towers=3)
    columns = x.transpose(0, 1).contiguous().transpose(0, 1)
    parameters = [checks.apart(p) for p in parameters]
    checks.against(_op(2), _plain(2), [columns, *parameters])


@pytest.mark.parametrize("device", checks.DEVICES)
def test_offsets_have_64_bits(device: str) -> None:
    x, *parameters = _inputs(2, 5, 6, 4, dtype=torch.bfloat16, device=device)
    checks.against(_op(2), _plain(2), [checks.far_apart(x), *parameters])


@pytest.mark.parametrize("device", checks.DEVICES)
def test_an_input_that_needs_no_gradient_gets_none(device: str) -> None:
    x, *parameters = _inputs(4, 5, 6, 4, device=device)
    leaves = [p.requires_grad_() for p in parameters]
    with checks.poisoned():
        got = torch.autograd.grad(_op(2)(x, *leaves).sum(), leaves)
    own = torch.autograd.grad(_plain(2)(x, *leaves).sum(), leaves)
    torch.testing.assert_close(got, own)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_without_what_forward_kept_it_is_computed_again(device: str) -> None:
    op = torch.ops.kernels.fused_mlp.default

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        weights, biases = [w[None] for w in rest[:2]], [b[None] for b in rest[2:]]
        return op(x[None], weights, biases, "gelu", True, False)[0][0]

    checks.against(run, _plain(2, "gelu", True), _inputs(4, 5, 6, 4, device=device))


@pytest.mark.parametrize("device", checks.DEVICES)
def test_is_the_same_each_time(device: str) -> None:
    checks.same_each_time(_op(2), _inputs(20, 5, 6, 4, dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize("device", checks.DEVICES)
def test_works_in_one_compiled_graph(device: str) -> None:
    checks.compiles(_op(2, "silu"), _inputs(4, 5, 6, 4, device=device))


@pytest.mark.parametrize("device", checks.DEVICES)
def test_casts_under_autocast(device: str) -> None:
    checks.casts(_op(2), _plain(2), _inputs(4, 5, 6, 4, device=device))


@pytest.mark.parametrize("interpreted", [True, False])
def test_gradients_are_those_of_finite_differences(interpreted: bool) -> None:
    inputs = [x.requires_grad_() for x in _inputs(2, 3, 4, 2, dtype=torch.float64)]
    if interpreted:
        torch.autograd.gradcheck(_op(2, "tanh"), inputs, fast_mode=True)
    else:
        with checks.on_reference():
            torch.autograd.gradcheck(_op(2, "gelu", True), inputs)


def test_a_network_too_wide_for_a_kernel_runs_layer_by_layer() -> None:
    checks.against(_op(2), _plain(2), _inputs(2, 5, 600, 3))
    checks.against(_op(5), _plain(5), _inputs(2, 5, 4, 4, 4, 4, 3))


def test_passes_opcheck() -> None:
    inputs = [x.requires_grad_() for x in _inputs(2, 3, 4, 2, towers=2)]
    op = torch.ops.kernels.fused_mlp.default
    torch.library.opcheck(op, (inputs[0], inputs[1:3], inputs[3:], "relu", False, True))


def test_refuses_shapes_that_do_not_fit() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="weight 1"):
        fused_mlp(x, [torch.ones(4, 3), torch.ones(2, 5)])
    with pytest.raises(ValueError, match="bias 0"):
        fused_mlp(x, [torch.ones(4, 3)], [torch.ones(3)])
    with pytest.raises(ValueError, match="1 biases"):
        fused_mlp(x, [torch.ones(4, 3), torch.ones(2, 4)], [torch.ones(4)])
