"""cross_layer against its definition, in the interpreter (on a GPU: compiled) and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cross_layer import cross_layer, low_rank_cross_layer, reference
from kernels.launch import is_interpreted
from kernels.tuning import pinned, tile
from tests.kernels import checks


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    """In the interpreter tiles so small that a small layer has several."""
    if not is_interpreted():
        yield
        return
    small = tile(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
    with pinned("cross_layer_fwd", small), pinned("cross_layer_bwd", small):
        yield


def _inputs(
    batch: int, size: int, rank: int, dtype: torch.dtype, device: str, bias: bool = True
) -> list[Tensor]:
    """x0, x, weight[, bias] of a full layer (rank 0), x0, x, down, up[, bias] of a low-rank one."""
    torch.manual_seed(0)
    weights = [(rank, size), (size, rank)] if rank else [(size, size)]
    shapes = [(batch, size), (batch, size), *weights, *([(size,)] if bias else [])]
    return [(torch.randn(s) / s[-1] ** 0.5).to(dtype).to(device) for s in shapes]


def _plain(x0: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return reference.cross_layer(x0, x, weight, bias, x)


def _plain_low_rank(
    x0: Tensor, x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None
) -> Tensor:
    return reference.cross_layer(x0, torch.nn.functional.linear(x, down), up, bias, x)


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize(("batch", "size", "bias"), [(19, 35, True), (3, 8, False), (0, 8, True)])
def test_full_rank_is_as_accurate_as_plain_pytorch(
    batch: int, size: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    checks.against(cross_layer, _plain, _inputs(batch, size, 0, dtype, device, bias))


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize(("batch", "size", "rank", "bias"), [(18, 33, 5, True), (2, 40, 17, False)])
def test_low_rank_is_as_accurate_as_plain_pytorch(
    batch: int, size: int, rank: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    inputs = _inputs(batch, size, rank, dtype, device, bias)
    checks.against(low_rank_cross_layer, _plain_low_rank, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_several_tiles_are_as_accurate_as_plain_pytorch(autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    inputs = _inputs(150, 136, 72, dtype, "cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        checks.against(low_rank_cross_layer, _plain_low_rank, inputs)


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
)
@pytest.mark.parametrize(
    ("batch", "size", "rank", "bias"),
    [(19, 24, 40, True), (3, 40, 8, False), (18, 24, 0, True), (0, 8, 0, True)],
)
def test_is_as_accurate_when_it_copies_by_tma(
    batch: int, size: int, rank: int, bias: bool, dtype: torch.dtype, autocast: bool
) -> None:
    inputs = _inputs(batch, size, rank, dtype, "cpu", bias)
    op, plain = (low_rank_cross_layer, _plain_low_rank) if rank else (cross_layer, _plain)
    small = tile(TMA=1, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
    under = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with pinned("cross_layer_fwd", small), pinned("cross_layer_bwd", small), under:
        checks.against(op, plain, inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_reads_its_inputs_where_they_lie(device: str) -> None:
    inputs = _inputs(3, 8, 0, torch.float32, device)
    inputs[:3] = [checks.apart(x) for x in inputs[:3]]
    checks.against(cross_layer, _plain, inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_offsets_have_64_bits(device: str) -> None:
    inputs = _inputs(2, 8, 0, torch.bfloat16, device)
    inputs[:3] = [checks.far_apart(x) for x in inputs[:3]]
    checks.against(cross_layer, _plain, inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_is_the_same_each_time(device: str) -> None:
    checks.same_each_time(cross_layer, _inputs(20, 8, 0, torch.bfloat16, device))


@pytest.mark.parametrize("device", checks.DEVICES)
def test_works_in_one_compiled_graph(device: str) -> None:
    checks.compiles(low_rank_cross_layer, _inputs(4, 8, 3, torch.float32, device))


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("bias", [True, False])
def test_casts_under_autocast(bias: bool, device: str) -> None:
    inputs = _inputs(4, 8, 3, torch.float32, device, bias)
    checks.casts(low_rank_cross_layer, _plain_low_rank, inputs)
    inputs[:2] = [x.bfloat16() for x in inputs[:2]]
    checks.casts(low_rank_cross_layer, _plain_low_rank, inputs)


@pytest.mark.parametrize("interpreted", [True, False])
def test_gradients_are_those_of_finite_differences(interpreted: bool) -> None:
    inputs = [x.requires_grad_() for x in _inputs(2, 3, 2, torch.float64, "cpu")]
    if interpreted:
        torch.autograd.gradcheck(low_rank_cross_layer, inputs, fast_mode=True)
    else:
        with checks.on_reference():
            torch.autograd.gradcheck(low_rank_cross_layer, inputs)


def test_passes_opcheck() -> None:
    x0, x, weight, bias = (t.requires_grad_() for t in _inputs(2, 3, 0, torch.float32, "cpu"))
    torch.library.opcheck(torch.ops.kernels.cross_layer.default, (x0, x, weight, bias, x))


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="cross_layer needs"):
        cross_layer(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 4))
    with pytest.raises(ValueError, match="cross_layer needs"):
        cross_layer(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 3), torch.ones(4))
