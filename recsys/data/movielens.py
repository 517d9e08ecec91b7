"""MovieLens 1M and 100K: does a user like a film?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.data.batch import Batch, jagged_kjt
from recsys.data.datamodule import SPLITS, RecDataModule
from recsys.data.movielens_files import ML_1M, ML_100K, Release, ratings
from recsys.data.movielens_parse import Ratings
from recsys.data.plan import Rows
from recsys.data.schema import Schema, SparseFeature
from recsys.data.shuffle import key64, permute
from recsys.data.source import Source

_ONE_HOT = ("user_id", "item_id", "gender", "age", "occupation", "zip_code")
KEYS = (*_ONE_HOT, "genres")


class MovieLens(RecDataModule):
    """Base of the two editions.

    Features: user and film, the user's gender, age, occupation and zip code, the film's genres (a
    bag, mean-pooled) and, as the dense feature, its year of release. `split`: "random", 80/10/10 by
    the seed, or "temporal", the last tenths in order of time. Fetched into `data_dir` on first use.
    The further arguments are those of LoaderSettings.
    """

    release: Release
    # Least rating that counts as liked, and the rating that is left out as neither.
    liked: int
    neutral: int | None

    def __init__(
        self, *, data_dir: str | Path = "data", split: str = "random", **loader: Any
    ) -> None:
        super().__init__(**loader)
        if split not in ("random", "temporal"):
            raise ValueError(f"split is {split!r}, must be random or temporal")
        self._data_dir, self._split = Path(data_dir), split
        self._ratings: Ratings | None = None
        self._sources: dict[str, Source] = {}

    @property
    def schema(self) -> Schema:
        """One dense feature, seven sparse ones, one task. Known after `setup`."""
        if self._ratings is None:
            raise RuntimeError("table sizes are read from the data: call prepare_data and setup")
        kept = self._ratings
        sizes = [len(kept.gender), len(kept.year)]
        sizes += [_size(c) for c in (kept.gender, kept.age, kept.occupation, kept.zip_code)]
        one_hot = [SparseFeature(name, size) for name, size in zip(_ONE_HOT, sizes, strict=True)]
        genres = SparseFeature(
            "genres", _size(kept.genres), "mean", len(kept.genres) / len(kept.year)
        )
        return Schema(("release_year",), (*one_hot, genres), ("like",))

    def prepare_data(self) -> None:
        """Fetch the data unless they are there."""
        ratings(self.release, self._data_dir)

    def setup(self, stage: str | None = None) -> None:
        """Load the ratings and cut the splits."""
        del stage
        if self._ratings is not None:
            return
        kept = ratings(self.release, self._data_dir)
        for name, rows in zip(SPLITS, self._cut(kept), strict=True):
            self._sources[name] = _RatingSource(kept, rows, self.liked)
        self._ratings = kept

    def source(self, split: str) -> Source:
        """Rows of a split; after `setup`."""
        return self._sources[split]

    def _cut(self, kept: Ratings) -> list[NDArray[np.int64]]:
        """Rows of the training, validation and test split."""
        if self._split == "temporal":
            order = np.argsort(kept.timestamp, kind="stable")
        else:
            order = np.arange(len(kept.rating))
        if self.neutral is not None:
            order = order[kept.rating[order] != self.neutral]
        if self._split == "random":
            key = key64(self.loader_settings.seed, 5)
            order = order[permute(np.arange(len(order)), len(order), key)]
        tenth = len(order) // 10
        return np.split(order, [len(order) - 2 * tenth, len(order) - tenth])


class MovieLens1M(MovieLens):
    """1,000,209 ratings of 2000 to 2003; 3 is left out, 4 and 5 are likes: 739,012 rows."""

    release, liked, neutral = ML_1M, 4, 3


class MovieLens100K(MovieLens):
    """100,000 ratings of 1997 and 1998; 4 and 5 are likes."""

    release, liked, neutral = ML_100K, 4, None


class _RatingSource:
    """Some of the ratings, joined with what is known of user and film as they are read."""

    def __init__(self, kept: Ratings, rows: NDArray[np.int64], liked: int) -> None:
        people = (kept.gender, kept.age, kept.occupation, kept.zip_code)
        self._people = np.stack(people).astype(np.int64)
        self._user, self._item = kept.user[rows].astype(np.int64), kept.item[rows].astype(np.int64)
        self._labels = (kept.rating[rows] >= liked).astype(np.float32)[:, None]
        self._genre_starts = kept.genre_starts
        self._genres = kept.genres.astype(np.int64)
        # Decades from 1980; unknown years count as 1980.
        self._year = np.nan_to_num((kept.year - 1980) / 10).astype(np.float32)[:, None]

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, rows: Rows) -> Batch:
        """The batch of these rows."""
        user, item = self._user[rows], self._item[rows]
        one_hot = np.concatenate([[user, item], self._people[:, user]])
        genres, counts = self._bags(item)
        values = np.concatenate([one_hot.reshape(-1), genres])
        lengths = np.ones((len(KEYS), len(user)), dtype=np.int64)
        lengths[-1] = counts
        sparse = jagged_kjt(KEYS, torch.from_numpy(values), torch.from_numpy(lengths))
        dense, labels = (
            torch.from_numpy(self._year[item]),
            torch.from_numpy(self._labels[rows].copy()),
        )
        return Batch(dense, sparse, labels)

    def _bags(self, item: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The genres of these films, one film after the other, and how many each has."""
        starts = self._genre_starts[item]
        counts = self._genre_starts[item + 1] - starts
        before = np.cumsum(counts) - counts
        place = np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
        return self._genres[place], counts


def _size(column: NDArray[np.int32]) -> int:
    return int(column.max()) + 1
