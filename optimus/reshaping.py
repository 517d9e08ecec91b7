"""Operations that keep a tensor's elements in order and only count them in another shape."""

from __future__ import annotations

import torch

from optimus.pattern import Miss

RESHAPES = ("reshape", "flatten", "unflatten", "squeeze", "unsqueeze")


def shape_to_say(tensor: torch.Tensor) -> tuple[int, ...] | Miss:
    """The tensor's shape as an argument of reshape: -1 stands for a dynamic size."""
    sizes = [size if isinstance(size, int) else -1 for size in tensor.shape]
    if sizes.count(-1) > 1:
        return Miss("more than one dynamic size")
    if -1 in sizes and 0 in sizes:
        return Miss("a dynamic size beside one of zero")
    return tuple(sizes)
