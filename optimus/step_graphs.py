"""`cuda_graphs=step`: replay the training step of any LightningModule as CUDA graphs.

What is recorded, and why not `training_step` as a whole. A CUDA graph freezes whatever the host
does in it: values that are logged, counters, a temperature that is lowered every epoch, the number
of ids in a batch. In a `training_step` that somebody else wrote one cannot see what of this there
is, and a frozen value is a wrong result without a message. So the recordings are of those parts of
which everything is known:

- each compiled graph, forward and backward (`optimus.graphed_call`). It is recorded below Dynamo,
  whose guards still run in every step: a changed attribute, mode, type or shape leads to another
  graph, as it does without CUDA graphs. This is where the hundreds of kernels are.
- the step of each optimizer that can do without the host (`optimus.graphed_optimizer`).

Between them the host runs as ever: embedding lookups of any length, `self.log`, metrics, hooks,
gradient clipping over all parameters, accumulation; the loss, too, unless it is in what is compiled
(a method may be a target: optimus.targets). That is about a dozen launches; the GPU has work queued
from the graph before while they are made. Against a single graph of everything this costs a copy of
the dense arch's inputs, results and inputs' gradients, and two launches more. Inputs that are the
same tensor in each step need no copy, nor do their gradients if they are leaves.

Why forward and backward are two recordings, where the loss is inside and its gradient is always
one. Recorded as one, backward would run before anybody has called it. Lightning sets gradients to
zero between the two calls: until then those of the step before belong to whoever reads them, and
would have to be copied out of the recording's memory first. It also divides each loss by
`accumulate_grad_batches`, so that the gradient that comes is a number on the device, and only a
pass over all gradients that multiplies by it would be right whatever it is. So it would spare one
launch and make others. The GPU, which works off what is queued, would not notice.

The first three calls of each part run as they are, as real training steps; recording executes
nothing, and the first replay is the next real step. So no step, random number or batch is spent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, cast

import torch
from torch.optim import Optimizer

from optimus.call_recording import Compiled
from optimus.capture import Capture, Session
from optimus.graphed_call import GraphedCall
from optimus.graphed_optimizer import GraphedOptimizer, host_counts, objection


class StepGraphs:
    """The CUDA graphs of one model's training step, recorded by `capture`."""

    def __init__(self, capture: Capture) -> None:
        self._session = Session(capture)
        self._calls: list[GraphedCall] = []
        self._optimizers: list[GraphedOptimizer] = []
        self._hooks: list[Any] = []
        self._one_thread: Any = None
        self._until_release = ExitStack()

    @property
    def recordings(self) -> int:
        """How often something has been recorded."""
        return self._session.recordings

    def wrap(self, compiled: Compiled, fixed: Sequence[bool]) -> Compiled:
        """What to call in place of a compiled graph; `fixed` as `fixed_inputs` tells it."""
        call = GraphedCall(compiled, fixed, self._session)
        self._calls.append(call)
        self._session.parts.append(call)
        return call

    def install(self, optimizers: Iterable[Optimizer]) -> None:
        """Replace the steps of those optimizers, and of those that they join, that allow it."""
        if self._session.failure:
            return
        self._optimizers.clear()
        for optimizer in _flatten(optimizers):
            self._hooks.append(optimizer.register_state_dict_post_hook(host_counts))
            if hasattr(optimizer, "optimizers"):  # its step is that of those it joins
                continue
            reason = objection(optimizer, self._session.capture)
            if reason:
                self._session.note(f"an optimizer stays outside CUDA graphs: {reason}")
            else:
                self._optimizers.append(GraphedOptimizer(optimizer, self._session))

    def release(self) -> None:
        """Take everything out again."""
        self.end_step()
        self._until_release.close()
        for call in self._calls:
            call.drop()
        self._release_optimizers()

    def begin_step(self) -> None:
        """A training step begins."""
        if self._session.failure:
            self._release_optimizers()
            return
        if self._one_thread is None:
            # Backward is a few calls here: handing each to a thread for the device takes longer.
            self._one_thread = torch.autograd.set_multithreading_enabled(False)
        if not self._session.step:
            self._until_release.enter_context(_unrecorded())
        self._session.active = True
        self._session.step += 1
        for call in self._calls:
            call.begin_step()

    def end_step(self) -> None:
        """What runs now belongs to no training step, and runs as it is."""
        self._session.active = False
        if self._one_thread is not None:
            self._one_thread.__exit__(None, None, None)
            self._one_thread = None

    def remarks(self) -> Iterator[str]:
        """What the user should know."""
        if self._session.failure:
            yield f"cuda_graphs=step fell back to off: {self._session.failure}"
            return
        yield from (f"cuda_graphs=step: {note}" for note in self._session.notes)

    def to_dict(self) -> dict[str, Any]:
        """Calls of each part so far, as plain data."""
        return {
            "failure": self._session.failure,
            "graphs": [_counts(call) for call in self._calls if call.replays or call.outside],
            "optimizers": [
                {"name": type(o.optimizer).__name__} | _counts(o) for o in self._optimizers
            ],
        }

    def _release_optimizers(self) -> None:
        for optimizer in self._optimizers:
            optimizer.release()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _counts(part: GraphedCall | GraphedOptimizer) -> dict[str, Any]:
    return {"replays": part.replays, "outside": part.outside, "declined": part.declined}


def _unrecorded() -> AbstractContextManager[Any]:
    """What is compiled within it does not tell a profiler when it looks up its arguments, for which
    each call would take 3.5 us."""
    from torch._dynamo import config

    name = "record_runtime_overhead"  # a later PyTorch may not have it
    if not hasattr(config, name):
        return nullcontext()
    return cast("AbstractContextManager[Any]", config.patch({name: False}))


def _flatten(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    for optimizer in optimizers:
        yield optimizer
        yield from _flatten(getattr(optimizer, "optimizers", ()))
