"""`cuda_graphs=model`: Inductor's own CUDA graphs, with what it says where it makes none.

Inductor records each compiled graph's forward and backward by itself. Its results lie in memory
that the next step overwrites, which is an error for whoever has kept one; here they are copied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from optimus.call_recording import Compiled

# A private name: where a release has another, reasons are in PyTorch's own log only.
_LOG = "torch._inductor.cudagraph_utils.__cudagraphs"


class ModelGraphs:
    """Inductor's CUDA graphs of the compiled graphs of one model on `device`."""

    recordings = 0  # Inductor records in the first steps after a compilation, which never count

    def __init__(self, device: torch.device) -> None:
        self._skipped: list[str] = []
        self._listener = _Listener(self._skipped)
        if device.type != "cuda":
            self._skipped.append(f"there are no CUDA graphs on {device.type}")

    def wrap(self, compiled: Compiled, fixed: Sequence[bool]) -> Compiled:
        """`compiled`, with results that its caller can keep."""
        del fixed

        def call(*args: Any) -> Any:
            return [r.clone() if isinstance(r, torch.Tensor) else r for r in compiled(*args)]

        return call

    def install(self, optimizers: Iterable[Optimizer]) -> None:
        """Listen to what Inductor says from now on; optimizers stay as they are."""
        del optimizers
        logging.getLogger(_LOG).addHandler(self._listener)

    def release(self) -> None:
        """Listen no longer."""
        logging.getLogger(_LOG).removeHandler(self._listener)

    def begin_step(self) -> None:
        """Results of the step before are done with."""
        torch.compiler.cudagraph_mark_step_begin()

    def end_step(self) -> None:
        """Nothing to do."""

    def remarks(self) -> Iterator[str]:
        """Why Inductor made no CUDA graph of a graph."""
        yield from (f"cuda_graphs=model: {reason}" for reason in self._skipped)

    def to_dict(self) -> dict[str, Any]:
        """The same, as plain data."""
        return {"skipped": list(self._skipped)}


class _Listener(logging.Handler):
    """Keeps the first line of each message, once."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        line = next(iter(record.getMessage().strip().splitlines()), "")
        if line and line not in self._messages:
            self._messages.append(line)
