"""linear_saving_quantized: exact but for the weight's gradient, which has a known error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.quantized_linear import CODES, linear_saving_quantized
from kernels.quantized_linear.reference import decode, encode

BOUND = {"int8": 0.01, "float8_e4m3fn": 0.04}
"""Relative error of a gradient from normally distributed rows."""
Linear = Callable[..., Tensor]
STORAGES = pytest.mark.parametrize("storage", CODES)


def _inputs(*shape: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(*shape), torch.randn(5, shape[-1]), torch.randn(5)][: 2 + bias]
    return [t.to(dtype).requires_grad_() for t in tensors]


def _run(linear: Linear, inputs: list[Tensor], **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The result and the gradients of x, weight and bias."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = linear(*inputs, **options)
    torch.manual_seed(1)
    grads = torch.autograd.grad(out, inputs, torch.randn(out.shape).to(out.dtype))
    return out, list(grads)


def _check(
    inputs: list[Tensor], storage: str, compiled: Callable[[Linear], Linear] = lambda f: f
) -> None:
    out, grads = _run(F.linear, inputs)
    ours, our_grads = _run(compiled(linear_saving_quantized), inputs, storage=storage)
    assert ours.dtype == out.dtype
    torch.testing.assert_close(ours, out)
    for i, (one, other) in enumerate(zip(grads, our_grads, strict=True)):
        assert one.dtype == other.dtype and one.shape == other.shape
        if i != 1:
            torch.testing.assert_close(one, other)
        elif one.numel():
            assert (one - other).norm() <= BOUND[storage] * one.norm()


@STORAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(64, 32), (3, 16, 32), (0, 32), (4, 0)])
def test_only_the_gradient_of_the_weight_differs(
    shape: tuple[int, ...], dtype: torch.dtype, storage: str
) -> None:
    _check(_inputs(*shape, dtype=dtype), storage)
    _check(_inputs(*shape, dtype=dtype, bias=False), storage)


@STORAGES
def test_fullgraph(storage: str) -> None:
    torch._dynamo.reset()
    _check(
        _inputs(64, 32),
        storage,
        lambda f: torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True),
    )


@pytest.mark.slow
def test_inductor() -> None:
    torch._dynamo.reset()
    _check(_inputs(64, 32), "int8", lambda f: torch.compile(f, fullgraph=True))


@STORAGES
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autocast(backend: str, storage: str) -> None:
    """Also where autocast is entered outside what is compiled."""
    torch._dynamo.reset()
    inputs = _inputs(64, 32)
    compiled = torch.compile(linear_saving_quantized, backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = _run(F.linear, inputs)
        ours, our_grads = _run(compiled, inputs, storage=storage)
    assert out.dtype == ours.dtype == torch.bfloat16 and torch.equal(out, ours)
    for one, other in zip(grads, our_grads, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).norm() <= (BOUND[storage] + 0.01) * one.norm()


@STORAGES
def test_what_is_not_finite_stays_where_it_is(storage: str) -> None:
    inputs = _inputs(6, 8)
    with torch.no_grad():
        inputs[0][1, 2], inputs[0][1, 3], inputs[0][4, 5] = torch.inf, torch.nan, -torch.inf
    out, grads = _run(F.linear, inputs)
    ours, our_grads = _run(linear_saving_quantized, inputs, storage=storage)
    assert torch.equal(out.nan_to_num(), ours.nan_to_num())
    expected, actual = grads[1], our_grads[1]
    assert expected.isnan().any() and expected.isinf().any()
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0.1, atol=0.3)


@STORAGES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_any_size(dtype: torch.dtype, storage: str) -> None:
    """Zeros, the smallest and the largest numbers come back as what they were, nearly."""
    info = torch.finfo(dtype)
    rows = [[0.0, 0.0], [info.max, info.min], [info.tiny, 0.0], [1.0, -0.5]]
    x = torch.tensor(rows, dtype=torch.float64).to(dtype)
    back = decode(*encode(x, storage), storage).to(dtype)
    assert back.isfinite().all()
    assert ((back.double() - x.double()).abs() <= 0.07 * x.double().abs() + info.tiny).all()


def test_saved_bytes() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x, weight, bias = _inputs(64, 32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        linear_saving_quantized(x, weight, bias)
    own = [t for t in kept if t.shape != weight.shape]
    assert sum(t.numel() * t.element_size() for t in own) == 64 * 32 + 64 * 4


def test_bad_input() -> None:
    x, weight, bias = _inputs(4, 8)
    with pytest.raises(ValueError, match="valid: int8, float8_e4m3fn"):
        linear_saving_quantized(x, weight, bias, "int4")
    with pytest.raises(ValueError, match=r"x \(\.\.\., K\)"):
        linear_saving_quantized(x[0], weight, bias)
