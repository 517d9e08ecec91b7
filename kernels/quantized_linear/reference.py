"""Rows of a matrix in eight bits each: what is stored, and what it stands for.

Shapes: values (..., K), codes (..., K) in the storage type, scale (..., 1).

1. One scale a row: an outlier costs its own row precision, no other.
2. Infinities and NaN have codes of their own and count for no scale: they come back where they
   were, and what is finite stays finite.
3. Rounding is to the nearest, so that nothing is random.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Code(NamedTuple):
    """`largest`: the code of a row's largest finite value; `infinity`, `nan`: codes of these (NaN
    where the type has one)."""

    dtype: torch.dtype
    largest: float
    infinity: float
    nan: float


CODES = {
    "int8": Code(torch.int8, 126, 127, -128),
    # 416 is the second largest value of this type, 448 the largest.
    "float8_e4m3fn": Code(torch.float8_e4m3fn, 416, 448, float("nan")),
}


def encode(x: Tensor, storage: str) -> tuple[Tensor, Tensor]:
    """Codes of `x` in a type of CODES, and the scale of each row, in float32 (float64 for that)."""
    code = CODES[storage]
    values = x if x.dtype == torch.float64 else x.float()
    largest = torch.where(values.isfinite(), values.abs(), 0).amax(-1, keepdim=True)
    # A row of zeros needs some scale; dividing by a subnormal number may give infinity.
    scale = (largest / code.largest).clamp_min(torch.finfo(values.dtype).tiny)
    codes = (values / scale).clamp(-code.largest, code.largest)
    codes = codes if code.dtype.is_floating_point else codes.round()
    codes = torch.where(values.isinf(), values.sign() * code.infinity, codes)
    codes = torch.where(values.isnan(), code.nan, codes)
    return codes.to(code.dtype), scale


def decode(codes: Tensor, scale: Tensor, storage: str) -> Tensor:
    """The values that `encode` stored, in the type of `scale`."""
    code, numbers = CODES[storage], codes.to(scale.dtype)
    limit = torch.finfo(scale.dtype).max
    values = (numbers * scale).clamp(-limit, limit)
    values = torch.where(numbers.abs() == code.infinity, numbers * float("inf"), values)
    return torch.where(numbers == code.nan, float("nan"), values)


def grad_of_weight(grad: Tensor, codes: Tensor, scale: Tensor, storage: str) -> Tensor:
    """grad.T @ values over all rows. grad (..., N), codes (..., K); returns (N, K)."""
    values = decode(codes, scale, storage).to(grad.dtype)
    return grad.flatten(0, -2).t() @ values.flatten(0, -2)
