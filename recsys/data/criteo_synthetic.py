"""Synthetic Criteo: learnable click logs of any size, made as they are read, best AUC known."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray

from recsys.data.batch import Batch, fixed_hot_kjt
from recsys.data.criteo_format import (
    DENSE_NAMES,
    KAGGLE_CARDINALITIES,
    MLPERF_HOTNESS,
    NUM_SPARSE,
    repeated,
    sparse_names,
)
from recsys.data.datamodule import SPLITS, RecDataModule
from recsys.data.plan import Rows
from recsys.data.schema import Schema, SparseFeature
from recsys.data.source import MemorySource, Source, blocks_of
from recsys.data.synthetic import MOST_IDS, Columns, Floats, Ids, RowGenerator, Words, coprime
from recsys.data.teacher import Oracle, Teacher, mean_oracle


class CriteoSynthetic(RecDataModule):
    """Criteo-like data that needs no download and can be learnt.

    `train_rows`, `val_rows`, `test_rows`: sizes of the splits, any numbers. `max_rows_per_table`
    caps the tables, which otherwise have the cardinalities of the Kaggle data set (34 million rows
    together). With more tables than Criteo's 26, `num_sparse`, their sizes begin again; `num_tasks`
    are alike but not the same, each with a truth of its own. `multi_hot`: each id becomes a bag, as
    many ids as in MLPerf's multi-hot data set. `in_memory` makes all rows once, at the start (160
    bytes a row of 26 tables), for models that train faster than some 300,000 rows a second and
    worker; otherwise rows are made when read. `auc` is that of the true click probabilities, which
    no model can beat on average, and `click_rate` their mean.
    The further arguments are those of LoaderSettings; all data depend on `seed` alone.

    Raises ValueError for sizes and rates that make no data set.
    """

    def __init__(
        self,
        *,
        train_rows: int = 1_000_000,
        val_rows: int = 100_000,
        test_rows: int = 100_000,
        max_rows_per_table: int | None = 100_000,
        num_sparse: int = NUM_SPARSE,
        num_tasks: int = 1,
        multi_hot: bool = False,
        in_memory: bool = False,
        auc: float = 0.81,
        click_rate: float = 0.256,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        self._sizes = {"train": train_rows, "val": val_rows, "test": test_rows}
        sizes = {f"{split}_rows": rows for split, rows in self._sizes.items()}
        sizes |= {"num_sparse": num_sparse, "num_tasks": num_tasks}
        _check(sizes, max_rows_per_table, auc, click_rate)
        cap = max_rows_per_table or MOST_IDS
        kaggle = repeated(KAGGLE_CARDINALITIES, num_sparse)
        self._cardinalities = tuple(min(size, cap) for size in kaggle)
        self._hotness = repeated(MLPERF_HOTNESS, num_sparse) if multi_hot else (1,) * num_sparse
        self._num_tasks = num_tasks
        self._in_memory = in_memory
        self._auc, self._click_rate = auc, click_rate
        self._sources: dict[str, Source] = {}

    @property
    def schema(self) -> Schema:
        """13 dense features, log(count + 3); the sparse ones; `click` or `task_0`, `task_1`, ..."""
        parts = zip(self._names, self._cardinalities, self._hotness, strict=True)
        sparse = tuple(SparseFeature(n, s, hotness=h) for n, s, h in parts)
        if self._num_tasks == 1:
            return Schema(DENSE_NAMES, sparse)
        return Schema(DENSE_NAMES, sparse, tuple(f"task_{i}" for i in range(self._num_tasks)))

    @property
    def _names(self) -> tuple[str, ...]:
        return sparse_names(len(self._cardinalities))

    def setup(self, stage: str | None = None) -> None:
        """Make the rows if they are to be in memory; say what the best possible scores are."""
        del stage
        if self._sources:
            return
        for split in SPLITS:
            source = self._rows(split)
            self._sources[split] = (
                MemorySource.of(source, self._hotness, split) if self._in_memory else source
            )
        self._announce()

    def source(self, split: str) -> Source:
        """Rows of a split; after `setup`."""
        return self._sources[split]

    @cached_property
    def oracles(self) -> dict[str, Oracle]:
        """The truth's own scores, means over tasks, on the first million rows of a split."""
        return {split: self._rows(split).oracle() for split in ("val", "test")}

    @property
    def oracle_auc(self) -> float:
        """Best possible AUC on the test split."""
        return self.oracles["test"].auc

    def _rows(self, split: str) -> SyntheticSource:
        start = sum(self._sizes[before] for before in SPLITS[: SPLITS.index(split)])
        rows = range(start, start + self._sizes[split])
        return SyntheticSource(self._generator, self._teachers, self._names, self._hotness, rows)

    @cached_property
    def _generator(self) -> RowGenerator:
        return RowGenerator(self._cardinalities, self.loader_settings.seed)

    @cached_property
    def _teachers(self) -> list[Teacher]:
        seed = self.loader_settings.seed
        truth = self._generator, self._cardinalities, seed, self._auc, self._click_rate
        return [Teacher(*truth, task=task) for task in range(self._num_tasks)]

    @rank_zero_only
    def _announce(self) -> None:
        for split, best in self.oracles.items():
            print(
                f"criteo_synthetic: best possible {split} AUC {best.auc:.4f}, "
                f"logloss {best.logloss:.4f}, click rate {best.click_rate:.4f}",
                flush=True,
            )


class SyntheticSource:
    """A range of synthetic rows, each made when asked for."""

    def __init__(
        self,
        generator: RowGenerator,
        teachers: Sequence[Teacher],
        names: tuple[str, ...],
        hotness: tuple[int, ...],
        rows: range,
    ) -> None:
        self._generator, self._teachers = generator, teachers
        self._names, self._hotness, self._rows = names, hotness, rows

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Rows) -> Batch:
        """The batch of these rows."""
        numbers = self._numbers(rows)
        columns = self._generator.columns(numbers)
        labels = torch.from_numpy(self._labels(numbers, self._truth(columns)).T).contiguous()
        dense = torch.from_numpy(np.log(columns.counts.T + np.float32(3))).contiguous()
        ids = columns.ids if max(self._hotness) == 1 else self._bags(columns.ids)
        flat = torch.from_numpy(ids.reshape(-1))
        return Batch(dense, fixed_hot_kjt(self._names, flat, len(numbers), self._hotness), labels)

    def probability(self, rows: Rows) -> Floats:
        """The true click probabilities of these rows, (T, B)."""
        return self._truth(self._generator.columns(self._numbers(rows)))

    def oracle(self, most_rows: int = 1_000_000) -> Oracle:
        """Scores of the true probabilities on the first rows, the means over the tasks."""
        blocks = [slice(a, b) for a, b in blocks_of(min(len(self), most_rows))]
        truth = np.concatenate([self.probability(rows) for rows in blocks], axis=1)
        numbers = self._numbers(slice(0, truth.shape[1]))
        return mean_oracle(truth, self._labels(numbers, truth))

    def _truth(self, columns: Columns) -> Floats:
        return np.stack([teacher.probability(columns) for teacher in self._teachers])

    def _labels(self, numbers: Words, truth: Floats) -> NDArray[np.float32]:
        uniforms = self._generator.label_uniforms(numbers, len(self._teachers))
        return (uniforms < truth).astype(np.float32)

    def _numbers(self, rows: Rows) -> Words:
        index = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return (index + self._rows.start).astype(np.uint64)

    def _bags(self, ids: Ids) -> Ids:
        """Bags of ids, (sum(hotness) * B,): the id itself, then ids that follow from it."""
        return np.concatenate([self._bag(column, ids[column]) for column in range(len(ids))])

    def _bag(self, column: int, ids: Ids) -> Ids:
        size = self._generator.cardinalities[column]
        # Steps of a golden section of the table: distinct while the bag is smaller than the table.
        steps = np.arange(self._hotness[column]) * coprime(size)
        return ((ids[:, None] + steps) % size).reshape(-1)


def _check(sizes: dict[str, int], cap: int | None, auc: float, click_rate: float) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, must be at least 1")
    if cap is not None and not 2 <= cap <= MOST_IDS:
        raise ValueError(f"max_rows_per_table is {cap}, must be from 2 to {MOST_IDS}, or None")
    if not 0.5 < auc < 1:
        raise ValueError(f"auc is {auc}, must be between 0.5 and 1")
    if not 0 < click_rate < 1:
        raise ValueError(f"click_rate is {click_rate}, must be between 0 and 1")
