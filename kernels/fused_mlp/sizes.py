"""Which networks there is a kernel for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def fits(sizes: Sequence[int], itemsize: int) -> bool:
    """Whether there is a kernel for a network of these widths, input first: 2 to 4 layers, widths
    to 512, and the weights behind the second layer small enough to be held as a whole."""
    blocks = [block(size) for size in sizes]
    if not 3 <= len(sizes) <= 5 or max(blocks) > 512:
        return False
    held = [a * b * itemsize for a, b in pairwise(blocks[2:])]
    return max([0, *held]) <= 64 * 1024 and (blocks[0] + blocks[2]) * itemsize <= 1536


def block(size: int) -> int:
    """A width as tiles have it: a power of two, at least what tensor cores take."""
    return max(16, 1 << max(0, size - 1).bit_length())
