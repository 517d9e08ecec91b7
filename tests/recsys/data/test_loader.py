"""Plans, sources and the loader: coverage of rows, sharding, determinism and exact resume."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from recsys.data.loader import BatchLoader
from recsys.data.plan import EvalPlan, Rows, TrainPlan
from recsys.data.source import MemorySource, SplitSource


def make_source(num_rows: int) -> MemorySource:
    """Rows that carry their own number: label and dense are it, ids are it and its double."""
    number = np.arange(num_rows)
    ids = np.stack([number, 2 * number], axis=1).astype(np.int32)
    column = number[:, None].astype(np.float32)
    return MemorySource(("x", "y"), column.copy(), ids, column.copy())


def numbers(rows: Rows, num_rows: int) -> list[int]:
    return np.arange(num_rows)[rows].tolist()


def flat(parts: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def labels(loader: BatchLoader) -> list[list[int]]:
    return [batch.labels[:, 0].int().tolist() for batch in loader]


@pytest.mark.parametrize("shuffle", ["rows", "batches", "none"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_train_plan_gives_each_row_once_on_one_rank(shuffle: str, world_size: int) -> None:
    plans = [TrainPlan(103, 8, shuffle, 7, rank, world_size) for rank in range(world_size)]
    assert {plan.num_batches for plan in plans} == {103 // (8 * world_size)}
    seen = [
        number
        for plan in plans
        for index in range(plan.num_batches)
        for number in numbers(plan.rows(2, index), 103)
    ]
    assert len(seen) == len(set(seen)) == plans[0].num_batches * 8 * world_size
    assert max(seen) < 103


def test_train_plan_order_changes_with_epoch_and_seed_only() -> None:
    def drawn(epoch: int, seed: int) -> list[int]:
        return numbers(TrainPlan(1000, 10, "rows", seed).rows(epoch, 3), 1000)

    assert drawn(0, seed=1) == drawn(0, seed=1)
    assert drawn(0, seed=1) != drawn(1, seed=1)
    assert drawn(0, seed=1) != drawn(0, seed=2)


def test_two_ranks_see_together_what_one_rank_sees_with_twice_the_batch() -> None:
    one = TrainPlan(1000, 20, "rows", seed=1)
    two = [TrainPlan(1000, 10, "rows", 1, rank, 2) for rank in range(2)]
    together = [number for plan in two for number in numbers(plan.rows(4, 5), 1000)]
    assert together == numbers(one.rows(4, 5), 1000)


def test_eval_plan_covers_all_rows_with_equal_numbers_of_batches() -> None:
    for num_rows, batch, world in itertools.product(range(1, 60), (1, 4, 7), (1, 2, 3, 4)):
        longest = math.ceil(num_rows / world)
        if num_rows < math.ceil(longest / batch) * world:
            with pytest.raises(ValueError, match="too few"):
                EvalPlan(num_rows, batch, 0, world)
            continue
        plans = [EvalPlan(num_rows, batch, rank, world) for rank in range(world)]
        parts = [numbers(p.rows(0, i), num_rows) for p in plans for i in range(p.num_batches)]
        assert flat(parts) == list(range(num_rows))
        assert all(1 <= len(part) <= batch for part in parts)


def test_plans_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="do not fill one batch of 100 on each of 2 ranks"):
        TrainPlan(150, 100, world_size=2)
    with pytest.raises(ValueError, match="shuffle is 'yes'"):
        TrainPlan(150, 10, shuffle="yes")
    with pytest.raises(ValueError, match=r"rank is 2, must be in \[0, 2\)"):
        TrainPlan(150, 10, rank=2, world_size=2)


@pytest.mark.parametrize("rows", [slice(3, 6), np.array([5, 3, 4])])
def test_sources_give_what_was_asked(rows: Rows) -> None:
    batch = SplitSource(make_source(50), 10, 40).batch(rows)
    wanted = [number + 10 for number in numbers(rows, 30)]
    assert batch.labels[:, 0].tolist() == batch.dense[:, 0].tolist() == wanted
    assert batch.sparse["x"].values().tolist() == wanted
    assert batch.sparse["y"].values().tolist() == [2 * number for number in wanted]


def test_a_batch_changed_in_place_leaves_the_source_alone() -> None:
    source = make_source(10)
    source.batch(slice(0, 5)).dense.zero_()
    assert source.batch(slice(0, 5)).dense[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_multi_hot_layout() -> None:
    ids = np.arange(12, dtype=np.int32).reshape(4, 3)
    column = np.zeros((4, 1), dtype=np.float32)
    batch = MemorySource(("x", "y"), column, ids, column, hotness=(1, 2)).batch(slice(1, 3))
    assert batch.sparse["x"].values().tolist() == [3, 6]
    assert batch.sparse["y"].to_dense()[1].tolist() == [7, 8]
    assert batch.sparse.length_per_key() == [2, 4]


def test_epochs_differ_and_the_number_of_workers_does_not_matter() -> None:
    plan = TrainPlan(64, 8, "rows", seed=3)
    plain, forked = (BatchLoader(make_source(64), plan, num_workers=n) for n in (0, 2))
    first, second = labels(plain), labels(plain)
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(64))
    assert [labels(forked), labels(forked)] == [first, second]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 5, 8])
def test_resume_gives_exactly_the_batches_that_follow(stop: int, num_workers: int) -> None:
    plan, source = TrainPlan(64, 8, "rows", seed=3), make_source(64)
    whole = BatchLoader(source, plan)
    wanted = labels(whole) + labels(whole)
    stopped = BatchLoader(source, plan, num_workers=num_workers, prefetch_batches=4)
    iterator = iter(stopped)
    seen = [next(iterator).labels[:, 0].int().tolist() for _ in range(stop)]
    resumed = BatchLoader(source, plan, num_workers=num_workers)
    resumed.load_state_dict(stopped.state_dict())
    assert len(resumed) == 8
    seen += labels(resumed)
    if stop < 8:
        seen += labels(resumed)
    assert seen == wanted


def test_abandoned_pass_starts_over() -> None:
    loader = BatchLoader(make_source(30), EvalPlan(30, 8))
    next(iter(loader))
    assert labels(loader) == [list(range(i, min(i + 8, 30))) for i in range(0, 30, 8)]


def test_set_epoch_decides() -> None:
    loader = BatchLoader(make_source(64), TrainPlan(64, 8, seed=3))
    first = labels(loader)
    loader.batch_sampler.sampler.set_epoch(0)
    assert labels(loader) == first
    loader.batch_sampler.sampler.set_epoch(5)
    fifth = labels(loader)
    other = BatchLoader(make_source(64), TrainPlan(64, 8, seed=3))
    other.set_epoch(5)
    assert labels(other) == fifth != first


def test_resume_under_other_settings_is_refused_within_an_epoch_only() -> None:
    loader = BatchLoader(make_source(64), TrainPlan(64, 8, seed=3))
    batches = iter(loader)
    next(batches)
    other = BatchLoader(make_source(64), TrainPlan(64, 4, seed=3))
    with pytest.raises(ValueError, match=r"after 1 of 8 batches.*batch_size: 8 then, 4 now"):
        other.load_state_dict(loader.state_dict())
    list(batches)
    other.load_state_dict(loader.state_dict())
    assert len(labels(other)) == 16
    assert other.state_dict()["epoch"] == 1


def test_loading_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    labels(BatchLoader(make_source(64), TrainPlan(64, 8)))
    assert torch.equal(before, torch.get_rng_state())


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_copied_ahead_are_the_same(num_workers: int) -> None:
    plan, source = TrainPlan(6400, 64, seed=3), make_source(6400)
    ahead = BatchLoader(source, plan, num_workers=num_workers, device=torch.device("cuda", 0))
    # Work on the compute stream that each batch must not be overwritten during.
    busy = torch.randn(2000, 2000, device="cuda")
    seen: list[torch.Tensor] = []
    for batch in ahead:
        assert batch.labels.is_cuda
        assert batch.sparse.values().is_cuda
        busy = (busy @ busy).clamp(-1, 1)
        seen.append(batch.labels[:, 0] + batch.sparse["y"].values() * 0)
    host = torch.cat([batch.labels[:, 0] for batch in BatchLoader(source, plan)])
    assert torch.equal(torch.cat(seen).cpu(), host)


@pytest.mark.gpu
@needs_gpu
def test_resume_does_not_count_the_batch_copied_ahead() -> None:
    plan, source = TrainPlan(64, 8, seed=3), make_source(64)
    wanted = labels(BatchLoader(source, plan))
    stopped = BatchLoader(source, plan, device=torch.device("cuda", 0))
    iterator = iter(stopped)
    seen = [next(iterator).labels[:, 0].int().tolist() for _ in range(3)]
    resumed = BatchLoader(source, plan)
    resumed.load_state_dict(stopped.state_dict())
    assert seen + labels(resumed) == wanted
