"""What kernels share inside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.tiles import activate, narrow
from tests.kernels import checks


@triton.jit
def _gelu_kernel(z_ptr, out_ptr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + places).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + places, narrow(activate(z, "gelu", dtype), dtype))


def _gelu(z: Tensor) -> Tensor:
    out = torch.empty_like(z)
    _gelu_kernel[(z.numel() // 1024,)](z, out, BLOCK=1024)
    return out


def _all_values(dtype: torch.dtype, device: str) -> Tensor:
    """All 2^16 there are; infinities and NaN are zero."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    values = bits.view(dtype)
    return torch.where(values.isfinite(), values, 0)


@pytest.mark.parametrize("device", checks.DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_is_as_accurate_as_the_type_of_its_result(dtype: torch.dtype, device: str) -> None:
    """Next to the truth for each number there is; so at most twice as far off as PyTorch's own."""
    z = _all_values(dtype, device)
    truth = 0.5 * z.double() * torch.special.erfc(z.double() * -(0.5**0.5))
    kind = torch.finfo(dtype)
    error = (_gelu(z).double() - truth).abs()
    # Below its smallest normal number float32 itself, in which it is computed, has fewer digits.
    least = max(kind.smallest_normal * kind.eps, 16 * torch.finfo(torch.float32).smallest_normal)
    assert (error <= 0.54 * kind.eps * truth.abs() + 0.54 * least).all()
    own = (F.gelu(z).double() - truth).abs()
    for exponent in range(-8, 8):
        near = (z.abs() >= 2.0**exponent) & (z.abs() < 2.0 ** (exponent + 1))
        for side in (z < 0, z > 0):
            assert error[near & side].max() <= 2 * own[near & side].max()


@pytest.mark.parametrize("device", checks.DEVICES)
def test_gelu_of_infinities_and_nan(device: str) -> None:
    z = torch.tensor([-torch.inf, torch.inf, torch.nan, -0.0] * 256, device=device).bfloat16()
    torch.testing.assert_close(_gelu(z).double(), F.gelu(z.double()), equal_nan=True)
