"""batched_norm against N norms one by one, in the interpreter (on a GPU: compiled) and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activations import ACTIVATIONS
from kernels.batched_norm import batched_norm
from kernels.launch import is_interpreted
from kernels.tuning import pinned, tile
from tests.kernels import checks


@pytest.fixture(autouse=True)
def _small_tiles() -> Iterator[None]:
    """In the interpreter tiles so small that there are several along rows and slices."""
    if not is_interpreted():
        yield
        return
    small = tile(ELEMENTS=32)
    with pinned("batched_norm_fwd", small), pinned("batched_norm_bwd", small):
        yield


def _inputs(*shape: int, dtype: torch.dtype, device: str, affine: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [shape, *([shape[1:]] * 2 if affine else [])]
    return [(torch.randn(s) * 2 + 0.5).to(dtype).to(device) for s in shapes]


def _op(kind: str, activation: str) -> checks.Function:
    def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return batched_norm(x, weight, bias, kind=kind, activation=activation)

    return run


def _plain(kind: str, activation: str) -> checks.Function:
    def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        parts = []
        for i, part in enumerate(x.unbind(1)):
            w = None if weight is None else weight[i]
            b = None if bias is None else bias[i]
            if kind == "layer":
                out = F.layer_norm(part, part.shape[1:], w, b, 1e-5)
            else:
                out = F.rms_norm(part, part.shape[1:], w, 1e-5)
                out = out if b is None else out + b
            parts.append(ACTIVATIONS[activation](out))
        return torch.stack(parts, 1)

    return run


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(
    ("shape", "activation", "affine"),
    [((9, 3, 10), "relu", True), ((2, 5, 33), "none", False), ((0, 3, 4), "none", True)],
)
def test_is_as_accurate_as_plain_pytorch(
    shape: tuple[int, ...],
    activation: str,
    affine: bool,
    kind: str,
    dtype: torch.dtype,
    device: str,
) -> None:
    inputs = _inputs(*shape, dtype=dtype, device=device, affine=affine)
    checks.against(_op(kind, activation), _plain(kind, activation), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_right(activation: str, device: str) -> None:
    inputs = _inputs(3, 2, 5, dtype=torch.float32, device=device)
    checks.against(_op("layer", activation), _plain("layer", activation), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_reads_its_inputs_where_they_lie(device: str) -> None:
    inputs = [checks.apart(x) for x in _inputs(3, 4, 5, dtype=torch.float32, device=device)]
    checks.against(_op("layer", "none"), _plain("layer", "none"), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_offsets_have_64_bits(device: str) -> None:
    inputs = _inputs(2, 3, 5, dtype=torch.bfloat16, device=device)
    inputs[0] = checks.far_apart(inputs[0])
    checks.against(_op("layer", "none"), _plain("layer", "none"), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_is_the_same_each_time(device: str) -> None:
    inputs = _inputs(30, 3, 5, dtype=torch.bfloat16, device=device)
    checks.same_each_time(_op("layer", "relu"), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
def test_works_in_one_compiled_graph(device: str) -> None:
    inputs = _inputs(4, 3, 5, dtype=torch.float32, device=device)
    checks.compiles(_op("rms", "silu"), inputs)


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_casts_under_autocast(dtype: torch.dtype, device: str) -> None:
    inputs = _inputs(4, 3, 5, dtype=torch.float32, device=device)
    inputs[0] = inputs[0].to(dtype)
    checks.casts(_op("layer", "none"), _plain("layer", "none"), inputs)


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradients_are_those_of_finite_differences(kind: str, interpreted: bool) -> None:
    inputs = _inputs(2, 2, 3, dtype=torch.float64, device="cpu")
    inputs = [x.requires_grad_() for x in inputs]
    if interpreted:
        torch.autograd.gradcheck(_op(kind, "gelu"), inputs, fast_mode=True)
    else:
        with checks.on_reference():
            torch.autograd.gradcheck(_op(kind, "gelu_tanh"), inputs)


def test_passes_opcheck() -> None:
    inputs = [x.requires_grad_() for x in _inputs(2, 3, 4, dtype=torch.float32, device="cpu")]
    op = torch.ops.kernels.batched_norm.default
    torch.library.opcheck(op, (*inputs, 1e-5, True, "relu"))


def test_refuses_what_it_cannot_do() -> None:
    x = torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match="needs x"):
        batched_norm(x, torch.ones(4))
    with pytest.raises(ValueError, match="relu"):
        batched_norm(x, activation="rely")
    with pytest.raises(ValueError, match="'rms'"):
        batched_norm(x, kind="batch")
