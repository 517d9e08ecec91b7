"""The data loader: whole batches by index, read ahead, moved ahead, resumable to the batch."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import multiprocessing
from torch.utils.data import DataLoader, Dataset

from recsys.data.ahead import copied_ahead
from recsys.data.batch import Batch
from recsys.data.plan import EvalPlan, TrainPlan
from recsys.data.slots import Packed, Slots
from recsys.data.source import Source

Place = tuple[int, int, int]  # epoch, batch within it, slot to put it in
Item = Packed | Batch

# Slots beyond those being filled: one handed out, one being copied, one to spare.
_SPARE_SLOTS = 3
# Room for batches with more ids than the one that was measured.
_SLACK = 1.25


class _Batches(Dataset[Item]):
    """A source and a plan as a map-style dataset whose items are whole batches."""

    def __init__(self, source: Source, plan: TrainPlan | EvalPlan, slots: Slots | None) -> None:
        self._source, self._plan, self._slots = source, plan, slots

    def __getitem__(self, place: Place) -> Item:
        epoch, index, slot = place
        batch = self._source.batch(self._plan.rows(epoch, index))
        return batch if self._slots is None else self._slots.put(slot, batch)


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
        device: torch.device | None = None,
        num_consumed: Callable[[], int | None] | None = None,
    ) -> None:
        self.plan = plan
        self._source = source
        self._num_workers, self._prefetch_batches = num_workers, prefetch_batches
        self._device = device if device is not None and device.type == "cuda" else None
        self._num_consumed = num_consumed
        self._epoch = 0
        self._begun = False
        self._start = 0  # where the next pass begins
        self._consumed = 0
        self._order = _Order()
        self._slots: Slots | None = None
        self._loader: DataLoader[Item] | None = None
        self._hold: weakref.finalize[..., BatchLoader] | None = None

    def __len__(self) -> int:
        """Batches in a whole epoch, wherever the loader stands in it."""
        return self.plan.num_batches

    def __iter__(self) -> Iterator[Batch]:
        # The position is read at the first batch, not here: Lightning makes the iterator first and
        # sets the epoch afterwards.
        self._open()
        self._begin_pass()
        for batch in self._batches():
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
        if self._slots is not None:
            self._slots.close()
        self._loader = self._hold = self._slots = None

    def _open(self) -> DataLoader[Item]:
        if self._loader is None:
            self._slots = self._make_slots()
            self._loader = self._make_loader()
            # Keeps the DataLoader from being collected as part of a reference cycle (trainer, data
            # module, loader): its queues would be finalised before the shutdown that needs them,
            # which then waits five seconds for each worker.
            self._hold = weakref.finalize(self, _let_go, self._loader, self._slots)
        return self._loader

    def _make_slots(self) -> Slots | None:
        if not self._num_workers or multiprocessing.get_start_method() != "fork":
            return None
        count = self._num_workers * self._prefetch_batches + _SPARE_SLOTS
        sample = Packed.of(self._source.batch(self.plan.rows(0, 0)), 0)
        return Slots(count, int(sample.num_bytes * _SLACK))

    def _make_loader(self) -> DataLoader[Item]:
        return DataLoader(
            _Batches(self._source, self.plan, self._slots),
            batch_size=None,
            sampler=self._order,
            num_workers=self._num_workers,
            collate_fn=_identity,
            prefetch_factor=self._prefetch_batches if self._num_workers else None,
            persistent_workers=self._num_workers > 0,
            # A generator of its own, or each pass would draw from the global one and a resumed run
            # would not get the random numbers of the run it goes on from.
            generator=torch.Generator(),
        )

    def _begin_pass(self) -> None:
        if self._begun or self._start >= len(self):
            self._epoch, self._start = self._epoch + 1, 0
        self._consumed, self._start, self._begun = self._start, 0, True
        left = range(self._consumed, len(self))
        slots = itertools.cycle(range(self._slots.count if self._slots else 1))
        self._order.places = [(self._epoch, i, slot) for i, slot in zip(left, slots, strict=False)]

    def _batches(self) -> Iterator[Batch]:
        items = iter(self._open())
        if self._device is None:
            return map(self._take, items)
        return copied_ahead(items, self._device, self._send)

    def _take(self, item: Item) -> Batch:
        if isinstance(item, Batch):
            return item
        assert self._slots is not None
        return self._slots.take(item)

    def _send(self, item: Item) -> Batch:
        assert self._device is not None
        if isinstance(item, Batch):
            return item.pin_memory().to(self._device, non_blocking=True)
        assert self._slots is not None
        return self._slots.send(item, self._device)


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


def _let_go(loader: DataLoader[Item], slots: Slots | None) -> None:
    del loader
    if slots is not None:
        slots.close()


def _identity(item: Any) -> Any:
    return item


def _fingerprint(plan: TrainPlan | EvalPlan) -> dict[str, int | str]:
    fields = asdict(plan)
    # Each rank loads the same checkpoint.
    del fields["rank"]
    return fields
