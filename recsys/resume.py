"""State of all random number generators, as a checkpoint carries it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_KEY = "recsys_rng"


def save_rng(checkpoint: dict[str, Any]) -> None:
    """Put the generators of every rank into `checkpoint`; called on every rank.

    Tensors and plain Python values only, so that the file loads with weights_only=True.
    """
    states: list[dict[str, Any]] = [_capture()]
    if dist.is_available() and dist.is_initialized():
        states = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(states, _capture())
    checkpoint[_KEY] = states


def saved_rng(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """This rank's state in `checkpoint`; None when it has none or had another number of ranks."""
    states: list[dict[str, Any]] = checkpoint.get(_KEY, [])
    distributed = dist.is_available() and dist.is_initialized()
    world, rank = (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)
    return states[rank] if len(states) == world else None


def _capture() -> dict[str, Any]:
    # A tensor for numpy's array, or the file would not load with weights_only=True.
    _, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Set all generators to what `saved_rng` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
