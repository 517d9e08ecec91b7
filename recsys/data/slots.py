"""Hand batches from worker processes to the training process in memory both have mapped.

PyTorch's own way sends each tensor of a batch by a file descriptor over a socket, with a handshake
each: about a millisecond of the training process a tensor, where a whole step may take one. Here a
worker writes the batch into a slot and sends a few integers; the training process makes one copy,
to the GPU or to fresh memory.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from recsys.data.batch import Batch, kjt_of_parts

# Each part of a batch begins at a multiple of this, as compiled kernels like their inputs.
_ALIGNMENT = 128


@dataclass(frozen=True)
class Packed:
    """Where a batch lies in the slots, and its shape.

    `per_key`: ids of each key. `is_fixed`: every sample has as many ids of a key as any other; the
    lengths are then not stored.
    """

    slot: int
    keys: tuple[str, ...]
    per_key: tuple[int, ...]
    is_fixed: bool
    batch_size: int
    num_dense: int
    num_tasks: int

    @classmethod
    def of(cls, batch: Batch, slot: int) -> Packed:
        """How `batch` is stored."""
        keys, size = batch.sparse.keys(), len(batch)
        lengths = batch.sparse.lengths().view(len(keys), size)
        return cls(
            slot,
            tuple(keys),
            tuple(batch.sparse.length_per_key()),
            bool((lengths == lengths[:, :1]).all()),
            size,
            batch.dense.shape[1],
            batch.labels.shape[1],
        )

    def layout(self) -> list[tuple[int, int, torch.dtype, tuple[int, ...]]]:
        """First byte, end, dtype and shape of values, lengths, dense features and labels."""
        lengths = 0 if self.is_fixed else len(self.keys) * self.batch_size
        parts: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (torch.int64, (sum(self.per_key),)),
            (torch.int64, (lengths,)),
            (torch.float32, (self.batch_size, self.num_dense)),
            (torch.float32, (self.batch_size, self.num_tasks)),
        ]
        placed: list[tuple[int, int, torch.dtype, tuple[int, ...]]] = []
        start = 0
        for dtype, shape in parts:
            end = start + dtype.itemsize * math.prod(shape)
            placed.append((start, end, dtype, shape))
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
        return placed

    @property
    def num_bytes(self) -> int:
        """What it takes of a slot."""
        return self.layout()[-1][1]


class Slots:
    """`count` places for batches of up to `num_bytes`, shared with processes forked later."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self.count = count
        self._size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        # Anonymous memory: unlike that of multiprocessing, not bounded by the size of /dev/shm.
        self._map = mmap.mmap(-1, count * self._size)
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8).view(count, self._size)
        self._pinned = False

    def put(self, slot: int, batch: Batch) -> Packed | Batch:
        """Store a batch; gives it back where it is larger than a slot."""
        packed = Packed.of(batch, slot)
        if packed.num_bytes > self._size:
            return batch
        values, lengths, dense, labels = _views(packed, self._memory[slot])
        values.copy_(batch.sparse.values())
        if not packed.is_fixed:
            lengths.copy_(batch.sparse.lengths())
        dense.copy_(batch.dense)
        labels.copy_(batch.labels)
        return packed

    def take(self, packed: Packed) -> Batch:
        """A copy of a stored batch, on the host."""
        return _unpack(packed, self._memory[packed.slot, : packed.num_bytes].clone())

    def send(self, packed: Packed, device: torch.device) -> Batch:
        """A copy on the CUDA `device`, under way on the current stream: the slot stays in use."""
        self._pin()
        stored = self._memory[packed.slot, : packed.num_bytes]
        return _unpack(packed, stored.to(device, non_blocking=True))

    def close(self) -> None:
        """Let the memory be swapped again; to be called before it goes."""
        cudart = torch.cuda.cudart() if self._pinned else None
        if cudart is not None:
            cudart.cudaHostUnregister(self._memory.data_ptr())
        self._pinned = False

    def _pin(self) -> None:
        # From memory that is not page-locked copies come out right too, but wait for each other.
        cudart = None if self._pinned else torch.cuda.cudart()
        if cudart is not None:
            cudart.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
        self._pinned = True


def _views(packed: Packed, memory: Tensor) -> list[Tensor]:
    return [memory[a:b].view(dtype).view(shape) for a, b, dtype, shape in packed.layout()]


def _unpack(packed: Packed, memory: Tensor) -> Batch:
    values, lengths, dense, labels = _views(packed, memory)
    if packed.is_fixed:
        hotness = tuple(count // packed.batch_size for count in packed.per_key)
        lengths = _fixed_lengths(hotness, packed.batch_size, memory.device)
    sparse = kjt_of_parts(packed.keys, values, lengths, list(packed.per_key))
    return Batch(dense, sparse, labels)


@lru_cache(maxsize=16)
def _fixed_lengths(hotness: tuple[int, ...], batch_size: int, device: torch.device) -> Tensor:
    """The same for every batch of a size, so made once on each device."""
    # Moved synchronously: any stream may use it.
    return torch.tensor(hotness).repeat_interleave(batch_size).to(device)
