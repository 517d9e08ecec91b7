"""The synthetic data: determinism, shape of the distributions, known best AUC, learnability."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from recsys.data import Batch
from recsys.data.criteo_format import DENSE_MISSING, MLPERF_HOTNESS, SPARSE_MISSING
from recsys.data.criteo_synthetic import CriteoSynthetic
from recsys.data.plan import Rows
from recsys.data.teacher import expected_auc, oracle

SMALL: dict[str, Any] = {"train_rows": 3000, "val_rows": 500, "test_rows": 700, "batch_size": 256}


def make(**options: Any) -> CriteoSynthetic:
    data = CriteoSynthetic(**{**SMALL, "max_rows_per_table": 1000, **options})
    data.setup()
    return data


def equal(first: Batch, second: Batch) -> bool:
    return (
        torch.equal(first.dense, second.dense)
        and torch.equal(first.labels, second.labels)
        and torch.equal(first.sparse.values(), second.sparse.values())
    )


@pytest.fixture(scope="module")
def data() -> CriteoSynthetic:
    return make()


@pytest.fixture(scope="module")
def big() -> CriteoSynthetic:
    return make(train_rows=60_000, test_rows=100_000, max_rows_per_table=None)


def test_batches_fit_the_schema(data: CriteoSynthetic) -> None:
    for batch in (next(iter(data.train_dataloader())), next(iter(data.test_dataloader()))):
        data.schema.check(batch)
        assert len(batch) == 256
        assert batch.dense.min() >= np.log(3) - 1e-6


@pytest.mark.parametrize("rows", [slice(5, 9), np.array([8, 5, 6])])
def test_a_row_depends_on_its_number_alone(data: CriteoSynthetic, rows: Rows) -> None:
    whole = data.source("train").batch(slice(0, 100))
    part = data.source("train").batch(rows)
    numbers = np.arange(100)[rows]
    assert torch.equal(part.dense, whole.dense[numbers])
    assert torch.equal(part.labels, whole.labels[numbers])
    assert torch.equal(part.sparse["cat_7"].values(), whole.sparse["cat_7"].values()[numbers])


def test_same_seed_same_data_other_seed_other_data(data: CriteoSynthetic) -> None:
    rows = slice(0, 64)
    assert equal(make().source("train").batch(rows), data.source("train").batch(rows))
    other = make(seed=1).source("train").batch(rows)
    assert not torch.equal(other.dense, data.source("train").batch(rows).dense)


def test_splits_do_not_overlap(data: CriteoSynthetic) -> None:
    first = {split: data.source(split).batch(slice(0, 300)) for split in ("train", "val", "test")}
    assert not torch.equal(first["train"].dense, first["val"].dense)
    assert not torch.equal(first["val"].dense, first["test"].dense)


@pytest.mark.parametrize("multi_hot", [False, True])
def test_in_memory_gives_the_same_batches(multi_hot: bool) -> None:
    lazy, held = (make(in_memory=flag, multi_hot=multi_hot) for flag in (False, True))
    for first, second in zip(lazy.val_dataloader(), held.val_dataloader(), strict=True):
        assert equal(first, second)


def test_multi_hot_bags(data: CriteoSynthetic) -> None:
    bags = make(multi_hot=True)
    batch = next(iter(bags.test_dataloader()))
    bags.schema.check(batch)
    single = next(iter(data.test_dataloader()))
    assert [f.hotness for f in bags.schema.sparse] == list(MLPERF_HOTNESS)
    for key, hot in zip(batch.sparse.keys(), MLPERF_HOTNESS, strict=True):
        ids = batch.sparse[key].values().view(256, hot)
        assert torch.equal(ids[:, 0], single.sparse[key].values())
    wide = batch.sparse["cat_20"].values().view(256, 100)
    assert all(len(set(bag)) == 100 for bag in wide.tolist())


def test_more_tables_and_tasks() -> None:
    data = make(num_sparse=30, num_tasks=3, test_rows=50_000)
    assert data.schema.tasks == ("task_0", "task_1", "task_2")
    sizes = [f.num_embeddings for f in data.schema.sparse]
    assert sizes[26:] == sizes[:4]
    batch = data.source("test").batch(slice(0, 50_000))
    data.schema.check(batch)
    repeated = batch.sparse.values().view(30, -1)
    assert not torch.equal(repeated[26], repeated[0]), "a table of its own"
    for task, truth in enumerate(data.source("test").probability(slice(0, 50_000))):
        found = oracle(truth, batch.labels[:, task].numpy())
        assert abs(found.auc - 0.81) < 0.01
        assert abs(found.click_rate - 0.256) < 0.015
    tasks = np.corrcoef(data.source("test").probability(slice(0, 50_000)))
    assert 0.2 < tasks[1, 2] < 0.9, "alike but not the same"


def test_missing_rates_are_criteos(big: CriteoSynthetic) -> None:
    batch = big.source("test").batch(slice(0, 50_000))
    ids = batch.sparse.values().view(26, -1)
    for column, rate in enumerate(SPARSE_MISSING):
        if rate:
            assert abs(float((ids[column] == 0).double().mean()) - rate) < 0.012
    zero = (batch.dense == batch.dense.min()).double().mean(dim=0)
    assert all(float(zero[i]) >= rate - 0.01 for i, rate in enumerate(DENSE_MISSING))


def test_ids_follow_a_power_law_over_the_whole_table(big: CriteoSynthetic) -> None:
    ids = big.source("test").batch(slice(0, 100_000)).sparse["cat_2"].values()
    values, counts = torch.unique(ids[ids > 0], return_counts=True)
    counts = counts.sort(descending=True).values.double()
    ranks = torch.arange(1, len(counts) + 1).double()
    head = slice(20, 400)
    slope = np.polyfit(ranks[head].log().numpy(), counts[head].log().numpy(), 1)[0]
    assert -1.1 < slope < -0.7
    assert len(values) > 30_000
    assert values.max() > 9_000_000
    assert abs(float(values.double().mean()) / 10_131_227 - 0.5) < 0.05


def test_tables_of_a_group_are_correlated(big: CriteoSynthetic) -> None:
    ids = big.source("test").batch(slice(0, 50_000)).sparse.values().view(26, -1)
    head = [(ids[column] == ids[column].mode().values).double().numpy() for column in (4, 8, 9)]
    assert np.corrcoef(head[0], head[1])[0, 1] > 0.05  # tables 4 and 8 share a group
    assert abs(np.corrcoef(head[0], head[2])[0, 1]) < 0.02  # table 9 is of another


def test_oracle_auc_is_the_one_asked_for(big: CriteoSynthetic) -> None:
    assert abs(big.oracle_auc - 0.81) < 0.006
    assert abs(big.oracles["test"].click_rate - 0.256) < 0.01
    assert abs(make(auc=0.7, test_rows=50_000).oracle_auc - 0.7) < 0.01


def test_oracle_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    data = make()
    assert f"best possible test AUC {data.oracle_auc:.4f}" in capsys.readouterr().out


def test_auc_of_known_cases() -> None:
    p = np.array([0.1, 0.4, 0.35, 0.8])
    assert oracle(p, np.array([0.0, 0.0, 1.0, 1.0])).auc == pytest.approx(0.75)
    rng = np.random.default_rng(0)
    truth = rng.uniform(size=200_000) ** 2
    labels = (rng.uniform(size=200_000) < truth).astype(np.float64)
    assert oracle(truth, labels).auc == pytest.approx(expected_auc(truth), abs=0.003)


def test_a_logistic_regression_learns() -> None:
    """Hashed one-hot weights and the dense features, one pass over 60,000 rows."""
    data = make(train_rows=60_000, test_rows=20_000, batch_size=512, max_rows_per_table=2000)
    sizes = torch.tensor([f.num_embeddings for f in data.schema.sparse])
    offsets = (sizes.cumsum(0) - sizes)[:, None]
    torch.manual_seed(0)
    weight = torch.nn.EmbeddingBag(int(sizes.sum()), 1, mode="sum")
    torch.nn.init.zeros_(weight.weight)
    linear = torch.nn.Linear(13, 1)
    optimizer = torch.optim.Adagrad([*weight.parameters(), *linear.parameters()], lr=0.1)

    def logit(batch: Batch) -> torch.Tensor:
        ids = batch.sparse.values().view(26, -1) + offsets
        return weight(ids.T) + linear(batch.dense - 2)

    for batch in data.train_dataloader():
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit(batch), batch.labels)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scored = [(logit(batch), batch.labels) for batch in data.test_dataloader()]
    scores = torch.cat([score for score, _ in scored])[:, 0].double().sigmoid().numpy()
    labels = torch.cat([label for _, label in scored])[:, 0].double().numpy()
    assert 0.66 < oracle(scores, labels).auc < data.oracle_auc


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"train_rows": 0}, "train_rows is 0, must be at least 1"),
        ({"max_rows_per_table": 1}, "max_rows_per_table is 1, must be from 2"),
        ({"auc": 0.4}, "auc is 0.4"),
        ({"click_rate": 1.0}, "click_rate is 1.0"),
    ],
)
def test_bad_options_are_refused_at_once(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CriteoSynthetic(**option)
