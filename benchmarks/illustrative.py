"""The illustrative launch-bound graph: one tensor split into about a thousand small branches.

In float32 eager mode every operation of a branch is one kernel forward, and backward as many as it
has gradients to make. A branch has LayerNorm, Linear, LayerNorm, tanh, Linear, tanh: 6 kernels
forward, and 6 backward (the first norm needs no gradient, the first linear only its weight's, the
second both). With 1,052 branches that is 6,312 of the 6,320 kernels of inference; a training step
adds 6,312 of its 12,772, the optimizer and the loss the rest. tests/benchmarks counts them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class IllustrativeGraph(nn.Module):
    """Split, a small net for each piece, join, mean. Norms have no weights, linears no biases."""

    def __init__(self, num_branches: int = 1052, dim: int = 16) -> None:
        super().__init__()
        self.dim = dim
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.first = nn.ModuleList([_linear(dim) for _ in range(num_branches)])
        self.second = nn.ModuleList([_linear(dim) for _ in range(num_branches)])

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1) of `x` (B, num_branches * dim)."""
        results: list[Tensor] = []
        pieces = torch.split(x, self.dim, dim=1)
        for piece, first, second in zip(pieces, self.first, self.second, strict=True):
            hidden = torch.tanh(self.norm(first(self.norm(piece))))
            results.append(torch.tanh(second(hidden)))
        return torch.cat(results, dim=1).mean(dim=1, keepdim=True)


def _linear(dim: int) -> nn.Linear:
    return nn.Linear(dim, dim, bias=False)
