"""What every operator's tests ask: right to within PyTorch's own error, whole, the same each time.

`against` runs an operator and plain PyTorch on the same inputs, both also in float64, forward and
backward, and compares errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]

Function = Callable[..., Tensor]


def against(
    op: Function, plain: Function, inputs: Sequence[Tensor], exact: Function | None = None
) -> None:
    """The error of `op(*inputs)` and of its gradients is at most twice that of `plain`.

    `exact`: what to run in float64, by default `plain`. All floating-point inputs get gradients.
    """
    with poisoned():
        got = run(op, inputs)
    own = run(plain, inputs)
    truth = run(exact or plain, [_double(x) for x in inputs])
    no_worse(got, own, truth)


def against_definition(op: Function, inputs: Sequence[Tensor]) -> None:
    """As `against`, with what the operator itself does where no kernel can be launched."""
    with poisoned():
        got = run(op, inputs)
    with on_reference():
        own = run(op, inputs)
        truth = run(op, [_double(x) for x in inputs])
    no_worse(got, own, truth)


def no_worse(got: Sequence[Tensor], own: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """The error of results and gradients is at most twice that of PyTorch's `own`."""
    for i, (a, b, c) in enumerate(zip(got, own, truth, strict=True)):
        where = "output" if i == 0 else f"gradient of input {i - 1}"
        assert a.dtype == b.dtype and a.shape == b.shape, f"{where}: {a.dtype} {a.shape}"
        error, allowed = _error(a, c), 2 * _error(b, c) + _floor(c, b.dtype)
        assert error <= allowed, f"{where}: error {error:.3g}, allowed {allowed:.3g}"


def run(op: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result and the gradients of a fixed random projection of it."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = op(*leaves)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).bfloat16()
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(out, wanted, weight.to(out))
    return [out.detach(), *grads]


def same_each_time(op: Function, inputs: Sequence[Tensor]) -> None:
    """Two runs give the same bits, forward and backward."""
    for one, other in zip(run(op, inputs), run(op, inputs), strict=True):
        assert torch.equal(one, other)


def compiles(op: Function, inputs: Sequence[Tensor]) -> None:
    """The operator works, and differentiates, in one graph."""
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for one, other in zip(run(op, inputs), run(compiled, inputs), strict=True):
        torch.testing.assert_close(one, other)


def casts(op: Function, plain: Function, inputs: Sequence[Tensor]) -> None:
    """Under autocast results have the types that `plain` has, eagerly and compiled."""
    device = inputs[0].device.type
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16):
        own = run(plain, inputs)
        for form in (op, compiled):
            for one, other in zip(run(form, inputs), own, strict=True):
                assert one.dtype == other.dtype
                torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.05)


@contextlib.contextmanager
def on_reference() -> Iterator[None]:
    """No kernel can be launched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_has_triton", lambda: False)
        yield


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that PyTorch hands out uninitialised is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def apart(tensor: Tensor) -> Tensor:
    """The same values with gaps between them in every dimension."""
    wide = torch.zeros(
        [2 * size for size in tensor.shape], dtype=tensor.dtype, device=tensor.device
    )
    view = wide[tuple(slice(None, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


def far_apart(tensor: Tensor) -> Tensor:
    """The same values, rows over 2^31 elements apart; what is between them is never touched."""
    stride = 2**31 // max(1, len(tensor) - 1) + 64
    room = tensor.new_empty(stride * (len(tensor) - 1) + tensor[0].numel())
    view = room.as_strided(tensor.shape, (stride, *tensor[0].contiguous().stride()))
    view.copy_(tensor)
    return view


def _double(x: Any) -> Any:
    return x.double() if x.is_floating_point() else x


def _error(value: Tensor, truth: Tensor) -> float:
    gap = (value.double() - truth).abs()
    return gap.max().item() if gap.numel() else 0.0


def _floor(truth: Tensor, dtype: torch.dtype) -> float:
    """What another order of summing costs where plain PyTorch happens to be exact."""
    if not truth.numel():
        return 0.0
    return 2 * torch.finfo(dtype).eps * truth.abs().max().item()
