"""Copy batches to a GPU while the one before is worked on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from recsys.data.batch import Batch

Item = TypeVar("Item")


def copied_ahead(
    items: Iterator[Item], device: torch.device, send: Callable[[Item], Batch]
) -> Iterator[Batch]:
    """Yield the batches that `send` makes of `items` on the CUDA `device`, one copy ahead.

    The copies run on a stream of their own: the host and the compute stream wait for an event that
    has usually happened. An item may be overwritten from the second `next` after its own.
    """
    stream = torch.cuda.Stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    try:
        for item in items:
            with torch.cuda.stream(stream):
                batch = send(item)
                copied = torch.cuda.Event()
                copied.record()
            if ahead is not None:
                yield _ready(*ahead, device)
                ahead[1].synchronize()
            ahead = batch, copied
        if ahead is not None:
            yield _ready(*ahead, device)
    finally:
        stream.synchronize()


def _ready(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    # The memory was allocated on the copying stream, whose next copy must not reuse it too early.
    batch.record_stream(current)
    return batch
