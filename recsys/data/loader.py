"""The data loader: whole batches by index, read ahead, moved ahead, resumable to the batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from recsys.data.batch import Batch
from recsys.data.plan import EvalPlan, TrainPlan
from recsys.data.source import Source

Place = tuple[int, int]  # epoch, batch within it


class _Batches(Dataset[Batch]):
    """A source and a plan as a map-style dataset whose items are whole batches."""

    def __init__(self, source: Source, plan: TrainPlan | EvalPlan) -> None:
        self._source, self._plan = source, plan

    def __getitem__(self, index: Place) -> Batch:
        return self._source.batch(self._plan.rows(*index))


class BatchLoader:
    """Iterates over the batches of one epoch at a time, from a position it can save and restore.

    Each pass is the next epoch; Lightning sets the epoch through
    `batch_sampler.sampler.set_epoch`, which it looks up on any loader. Workers hold no position:
    the batch to make arrives as (epoch, index), so their number changes nothing, and batches read
    ahead but not handed out do not count.

    `num_consumed`: tells how many batches of the running epoch were trained on, when somebody knows
    better than the loader (a batch handed out may not be trained on when a run is stopped within
    the step). `device`: a CUDA device to which each batch is copied, on a stream of its own, while
    the one before is worked on; None leaves the batches on the host.
    """

    def __init__(
        self,
        source: Source,
        plan: TrainPlan | EvalPlan,
        *,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        pin_memory: bool = False,
        device: torch.device | None = None,
        num_consumed: Callable[[], int | None] | None = None,
    ) -> None:
        self.plan = plan
        self._device = device
        self._num_consumed = num_consumed
        self._epoch = 0
        self._begun = False
        self._start = 0  # where the next pass begins
        self._consumed = 0
        self._order = _Order()
        self._make_loader = partial(
            DataLoader,
            _Batches(source, plan),
            batch_size=None,
            sampler=self._order,
            num_workers=num_workers,
            collate_fn=_identity,  # pyright: ignore[reportArgumentType]
            pin_memory=pin_memory,
            prefetch_factor=prefetch_batches if num_workers else None,
            persistent_workers=num_workers > 0,
            # A generator of its own, or each pass would draw from the global one and a resumed run
            # would not get the random numbers of the run it goes on from.
            generator=torch.Generator(),
        )
        self._loader: DataLoader[Batch] | None = None
        self._hold: weakref.finalize[..., BatchLoader] | None = None

    def __len__(self) -> int:
        """Batches in a whole epoch, wherever the loader stands in it."""
        return self.plan.num_batches

    def __iter__(self) -> Iterator[Batch]:
        # The position is read at the first batch, not here: Lightning makes the iterator first and
        # sets the epoch afterwards.
        self._begin_pass()
        for batch in self._on_device():
            self._consumed += 1
            yield batch

    @property
    def batch_sampler(self) -> _EpochSetter:
        """Where Lightning looks for something with `set_epoch`."""
        return _EpochSetter(self)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be one of `epoch`, from its start unless that is the epoch restored."""
        if epoch != self._epoch:
            self._start = self._consumed = 0
        self._epoch, self._begun = epoch, False

    def state_dict(self) -> dict[str, Any]:
        """The position, and the plan it is a position in. Plain ints and strings."""
        known = self._num_consumed() if self._num_consumed else None
        consumed = self._consumed if known is None else known
        return {
            "epoch": self._epoch,
            "batches": consumed,
            "num_batches": len(self),
            "plan": _fingerprint(self.plan),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises ValueError when it lies within an epoch and was saved under another plan (batch size,
        ranks, seed, rows): the rest of that epoch would not be the rest of it.
        """
        done, total = int(state["batches"]), int(state["num_batches"])
        saved, own = state["plan"], _fingerprint(self.plan)
        changed = [f"{k}: {saved.get(k)} then, {own[k]} now" for k in own if saved.get(k) != own[k]]
        if changed and 0 < done < total:
            raise ValueError(
                f"the checkpoint was taken after {done} of {total} batches of epoch "
                f"{state['epoch']}, and the data have changed ({'; '.join(changed)}): resume with "
                "the same settings, or from a checkpoint at the end of an epoch"
            )
        self._epoch, self._begun = int(state["epoch"]), False
        self._start = self._consumed = len(self) if done >= total else done

    def close(self) -> None:
        """Stop the workers; the next pass starts new ones. The position stays."""
        if self._hold is not None:
            self._hold.detach()
        self._loader = self._hold = None

    def _open(self) -> DataLoader[Batch]:
        if self._loader is None:
            self._loader = self._make_loader()
            # Keeps the DataLoader from being collected as part of a reference cycle (trainer, data
            # module, loader): its queues would be finalised before the shutdown that needs them,
            # which then waits five seconds for each worker.
            self._hold = weakref.finalize(self, _let_go, self._loader)
        return self._loader

    def _begin_pass(self) -> None:
        if self._begun or self._start >= len(self):
            self._epoch, self._start = self._epoch + 1, 0
        self._consumed, self._start, self._begun = self._start, 0, True
        self._order.places = [(self._epoch, index) for index in range(self._consumed, len(self))]

    def _on_device(self) -> Iterator[Batch]:
        host = iter(self._open())
        if self._device is None or self._device.type != "cuda":
            return host
        return move_ahead(host, self._device)


class _EpochSetter:
    """A batch sampler as far as Lightning cares.

    Not a `sampler` of the loader itself: Lightning would replace that under `overfit_batches`.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self.sampler = loader


class _Order:
    """The places of the running pass: what the loader tells its workers to make."""

    def __init__(self) -> None:
        self.places: list[Place] = []

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def move_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield `batches` on the CUDA `device`, each copied while the one before is worked on.

    The copies run on a stream of their own, so pinned batches cost the host and the compute stream
    nothing but a wait for an event that has usually happened.
    """
    stream = torch.cuda.Stream(device)

    def start(batch: Batch) -> Batch:
        with torch.cuda.stream(stream):
            return batch.to(device, non_blocking=True)

    def finish(batch: Batch) -> Batch:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        batch.record_stream(current)
        return batch

    ahead: Batch | None = None
    for batch in batches:
        ready = finish(ahead) if ahead is not None else None
        ahead = start(batch)
        if ready is not None:
            yield ready
    if ahead is not None:
        yield finish(ahead)


def _let_go(loader: DataLoader[Batch]) -> None:
    del loader


def _identity(batch: Batch) -> Batch:
    return batch


def _fingerprint(plan: TrainPlan | EvalPlan) -> dict[str, int | str]:
    fields = asdict(plan)
    # Each rank loads the same checkpoint.
    del fields["rank"]
    return fields
