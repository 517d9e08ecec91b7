"""Where each group's data lie, as the kernels read it from device memory.

Weights and biases may lie anywhere: a group's are addressed by their distance from the first
group's. A table is made once for the same addresses and sizes; parameters keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

FIELDS = 7
"""Of a group: first column in x, columns in x (K), first column in the result, columns there (N),
distance of weight and bias in elements, first element in the vector of weight gradients."""


@dataclass(frozen=True)
class Groups:
    """Sizes and places of all groups. `distances`: of weights, then of biases."""

    offsets: tuple[int, ...]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    distances: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def alignment(self) -> int:
        """What every place, size and distance is a multiple of, at most 16 elements."""
        return math.gcd(16, *(number for row in self.rows() for number in row))

    def rows(self) -> list[tuple[int, ...]]:
        """The table's rows, FIELDS numbers each."""
        result: list[tuple[int, ...]] = []
        column = element = 0
        places = zip(self.offsets, self.ins, self.outs, *self.distances, strict=True)
        for offset, num_in, num_out, weight, bias in places:
            result.append((offset, num_in, column, num_out, weight, bias, element))
            column += num_out
            element += num_in * num_out
        return result

    def tiles(self, block_n: int, block_k: int) -> list[tuple[int, int, int]]:
        """Group, block of N and block of K of each tile; a block of 0: that size is not cut."""
        return [
            (group, n, k)
            for group, (num_in, num_out) in enumerate(zip(self.ins, self.outs, strict=True))
            for n in range(math.ceil(num_out / block_n) if block_n else 1)
            for k in range(math.ceil(num_in / block_k) if block_k else 1)
        ]


def groups_of(
    weights: Sequence[Tensor], biases: Sequence[Tensor], offsets: Sequence[int]
) -> Groups:
    """Places of contiguous weights (N, K) and biases (N,), all of one type and device."""
    ins = tuple(weight.shape[1] for weight in weights)
    outs = tuple(weight.shape[0] for weight in weights)
    near = (_distances(weights), _distances(biases) if biases else (0,) * len(weights))
    return Groups(tuple(offsets), ins, outs, near)


def _distances(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    first, size = tensors[0].data_ptr(), tensors[0].element_size()
    return tuple((tensor.data_ptr() - first) // size for tensor in tensors)


def table(groups: Groups, device: torch.device) -> Tensor:
    """(G, FIELDS) int64 on `device`."""
    return _rows(tuple(groups.rows()), device)


def tile_table(groups: Groups, block_n: int, block_k: int, device: torch.device) -> Tensor:
    """(T, 3) int64 on `device`: what `Groups.tiles` says."""
    return _rows(tuple(groups.tiles(block_n, block_k)), device)


_kept: list[Tensor] = []


def _rows(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return _cached(rows, device)
    # The copy becomes part of the CUDA graph, which reads the host's memory again at each replay.
    host = torch.tensor(rows, dtype=torch.int64).pin_memory()
    _kept.append(host)
    return host.to(device, non_blocking=True)


@lru_cache(maxsize=1024)
def _cached(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device)
