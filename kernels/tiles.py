"""What kernels share inside: number types and activations. Needs triton.

The interpreter has no bf16 arithmetic and rounds to bf16 by cutting off, so there operands are
widened before they are multiplied and rounded here; on a GPU both cost nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import is_interpreted

INTERPRETED = tl.constexpr(is_interpreted())


def sum_type(dtype: torch.dtype) -> tl.dtype:
    """What sums over values of `dtype` are taken in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """As `sum_type`, the type of a tensor of sums that are gone on with."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@triton.jit
def wide(x):
    """`x` in the type that sums are taken in: float32, or float64 for float64."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def operand(x):
    """`x` as `tl.dot` takes it."""
    if INTERPRETED:
        return wide(x)
    else:
        return x


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """`x`, float32 or float64, rounded to nearest even in `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = up.to(tl.float32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, x.to(tl.float32), rounded).to(tl.bfloat16)
    else:
        return x.to(dtype)


@triton.jit
def normal_share(z):
    """The share of the normal distribution below `z`, float32, to within 4e-5 of itself.

    Above |z| there is exp(-z^2 / 2) times a polynomial in t = 1 / (1 + p |z|), as in Abramowitz and
    Stegun, 7.1.26, here fitted for the least relative error: so it holds in the tails too, where
    1 + erf cancels. t is a reciprocal square root, one instruction where a division takes six.
    """
    distance = 1.0 + 0.3783021 * tl.abs(z)
    t = tl.rsqrt(distance * distance)
    fit = 0.08880242 + t * (0.19324117 - 0.09042666 * t)
    fit = 0.15048240 + t * (0.15788481 + t * fit)
    above = t * fit * tl.exp2(-0.72134752 * z * z)
    return tl.where(z < 0, above, 1.0 - above)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """The activation of `z`, which is float32 or float64, as exactly as `dtype` can hold it; names
    as in kernels.activations. The result has z's type."""
    if ACTIVATION == "relu":
        return tl.where(z < 0, 0.0, z).to(z.dtype)  # NaN stays NaN
    elif ACTIVATION == "gelu":
        # erf took a fifth of the time of a gated linear unit on an H200.
        if dtype == tl.bfloat16 or dtype == tl.float16:  # noqa: PLR1714  Triton has no `in`
            return z * normal_share(z)
        else:
            return 0.5 * z * (1 + tl.math.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "silu":
        return z * tl.sigmoid(z)
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(z)
    elif ACTIVATION == "tanh":
        return 2 * tl.sigmoid(2 * z) - 1
    else:
        tl.static_assert(ACTIVATION == "none")
        return z


@triton.jit
def slope(z, ACTIVATION: tl.constexpr):
    """The derivative of the activation at `z`."""
    if ACTIVATION == "relu":
        return tl.where(z <= 0, 0.0, 1.0).to(z.dtype)
    elif ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1 + tl.math.erf(z * 0.7071067811865476)) + z * density
    elif ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (z + 0.044715 * z * z * z)
        gate, rest = tl.sigmoid(inner), tl.sigmoid(-inner)  # 1 - gate would cancel
        return gate + z * gate * rest * (1.5957691216057308 * (1 + 0.134145 * z * z))
    elif ACTIVATION == "silu":
        gate = tl.sigmoid(z)
        return gate * (1 + z * (1 - gate))
    elif ACTIVATION == "sigmoid":
        gate = tl.sigmoid(z)
        return gate * (1 - gate)
    elif ACTIVATION == "tanh":
        gate = 2 * tl.sigmoid(2 * z) - 1
        return 1 - gate * gate
    else:
        tl.static_assert(ACTIVATION == "none")
        return tl.full(z.shape, 1.0, z.dtype)


@triton.jit
def slope_at(kept, ACTIVATION: tl.constexpr):
    """The derivative of the activation, where `kept` is the sum in front of it for those in
    kernels.activations.FROM_SUM, else its result."""
    if ACTIVATION == "sigmoid":
        return kept * (1 - kept)
    elif ACTIVATION == "tanh":
        return 1 - kept * kept
    else:
        return slope(kept, ACTIVATION)
