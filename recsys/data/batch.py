"""One batch of a recommender: dense features, sparse features, labels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

# TorchRec asks torch.fx an old question each time it makes a KeyedJaggedTensor; the warning that
# comes with the answer would reach the user once a process, data workers included.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: not record.getMessage().startswith("is_fx_tracing will return true")
)


@dataclass
class Batch(Pipelineable):
    """What every data module yields and every model takes.

    Shapes: `dense` float32 (B, num_dense); `sparse` a KeyedJaggedTensor of F keys and stride B
    with int64 values and lengths; `labels` float32 (B, num_tasks). `Pipelineable` in TorchRec's
    sense, so TorchRec's train pipelines take it as it is.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor

    def __len__(self) -> int:
        """Samples in the batch."""
        return self.labels.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on `device`; itself when it is there already."""
        device = torch.device(device)
        if _is_on(self.labels, device):
            return self
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory, from which a copy to the GPU can be asynchronous."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the CUDA allocator that `stream` uses this memory too."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)  # pyright: ignore[reportArgumentType]
        self.labels.record_stream(stream)


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    if tensor.device.type != device.type:
        return False
    return device.index is None or tensor.device.index == device.index


def fixed_hot_kjt(
    keys: Sequence[str], values: Tensor, batch_size: int, hotness: Sequence[int] | None = None
) -> KeyedJaggedTensor:
    """KeyedJaggedTensor in which every sample has the same number of ids of a feature.

    `values`: int64 (batch_size * sum(hotness),), feature by feature, then sample by sample.
    `hotness`: ids a sample of each feature; all 1 when left out.
    Raises ValueError when the sizes do not agree.
    """
    hot = [1] * len(keys) if hotness is None else list(hotness)
    _expect_numel(values, batch_size * sum(hot))
    if len(hot) != len(keys):
        raise ValueError(f"{len(hot)} hotness figures for {len(keys)} keys")
    lengths = torch.tensor(hot, dtype=torch.int64).repeat_interleave(batch_size)
    return kjt_of_parts(keys, values, lengths, [batch_size * h for h in hot])


def jagged_kjt(keys: Sequence[str], values: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
    """KeyedJaggedTensor of any lengths.

    `values`: int64 (sum(lengths),), feature by feature, then sample by sample.
    `lengths`: int64 (len(keys), batch_size). Raises ValueError when the sizes do not agree.
    """
    if lengths.ndim != 2 or lengths.shape[0] != len(keys):
        raise ValueError(f"lengths are {tuple(lengths.shape)}, must be ({len(keys)}, batch size)")
    per_key: list[int] = lengths.sum(dim=1).tolist()
    _expect_numel(values, sum(per_key))
    return kjt_of_parts(keys, values, lengths.reshape(-1), per_key)


def kjt_of_parts(
    keys: Sequence[str], values: Tensor, lengths: Tensor, per_key: list[int]
) -> KeyedJaggedTensor:
    """KeyedJaggedTensor of parts that fit; `per_key`: ids of each feature, in all samples.

    `values`: (sum(per_key),); `lengths`: (len(keys) * batch size,). Nothing is checked or read.
    """
    # With the per-key sizes known on the host, nothing in a model reads `lengths` back with
    # `.tolist()`: a graph break under torch.compile and a synchronisation on a GPU.
    return KeyedJaggedTensor(
        keys=list(keys),
        values=values,
        lengths=lengths,
        stride=lengths.numel() // len(keys) if keys else 0,
        length_per_key=per_key,
        offset_per_key=[0, *accumulate(per_key)],
    )


def _expect_numel(values: Tensor, expected: int) -> None:
    if values.numel() != expected:
        raise ValueError(f"{values.numel()} values where the lengths add up to {expected}")
