"""Criteo's click logs, from raw text or from TorchRec's binary files."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recsys.data.criteo_convert import convert, stem
from recsys.data.criteo_files import Day, find, is_binary, open_day
from recsys.data.criteo_format import DENSE_NAMES, NUM_SPARSE, SPARSE_NAMES
from recsys.data.criteo_source import CriteoSource
from recsys.data.criteo_tables import contiguous_sizes, hashed_sizes, mark_seen
from recsys.data.datamodule import RecDataModule
from recsys.data.schema import Schema, SparseFeature
from recsys.data.shuffle import key64
from recsys.data.source import PermutedSource, Source, SplitSource


class Criteo(RecDataModule):
    """Criteo's Kaggle or 1 TB data set, or anything in their formats.

    `path`: a text file (Kaggle's train.txt, a day_* file; may be .gz), a list or a folder of them,
    or a folder of TorchRec's day_*_{dense,sparse,labels}.npy. Text is converted once, into
    `data_dir`/criteo, at some 300,000 rows a second, and never read again while it stays the same.
    `max_malformed`: lines that may be left out of each text file; by default none.

    `num_embeddings`: rows of the 26 tables; by default as many as there are values (four times as
    many below 10,000, since hashed ids collide), at most `max_rows_per_table`. `multi_hot` reads
    day_*_sparse_multi_hot.npz in place of day_*_sparse.npy.

    Validation and test rows are the last `val_fraction` and `test_fraction` in order of time, or,
    with `split="random"`, as many drawn by the seed; or whole files, counted from 0: `val_days` and
    `test_days`; where both name the same files, their first and second halves, as MLPerf has it.

    The further arguments are those of LoaderSettings. Raises at once for what is not there, cannot
    be read or makes no sense.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        data_dir: str | Path = "data",
        max_malformed: int = 0,
        num_embeddings: Sequence[int] | None = None,
        max_rows_per_table: int = 1_000_000,
        multi_hot: bool = False,
        split: str = "time",
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        val_days: Sequence[int] | None = None,
        test_days: Sequence[int] | None = None,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        self._files = find(path)
        self._from_text = not is_binary(self._files[0])
        self._folder = Path(data_dir) / "criteo" / _folder_name(self._files)
        self._max_malformed, self._cap = max_malformed, max_rows_per_table
        self._multi_hot, self._split = multi_hot, split
        self._fractions = (val_fraction, test_fraction)
        self._days = (_day_list(val_days), _day_list(test_days))
        self._sizes = tuple(num_embeddings) if num_embeddings is not None else None
        self._hotness: tuple[int, ...] | None = None
        self._sources: dict[str, Source] = {}
        self._check()
        if not self._from_text:
            self._open()

    @property
    def schema(self) -> Schema:
        """13 dense features, log(x + 3), 26 sparse ones, one task. Known after `setup`."""
        if self._sizes is None or self._hotness is None:
            raise RuntimeError("table sizes are read from the data: call prepare_data and setup")
        parts = zip(SPARSE_NAMES, self._sizes, self._hotness, strict=True)
        return Schema(DENSE_NAMES, tuple(SparseFeature(n, s, hotness=h) for n, s, h in parts))

    def prepare_data(self) -> None:
        """Convert text that has not been converted, and count its ids."""
        if not self._from_text:
            return
        for text in self._files:
            done = convert(text, self._folder, self._max_malformed)
            if done.malformed:
                warnings.warn(
                    f"{text}: {done.malformed} malformed lines left out, {done.examples[0]}",
                    stacklevel=2,
                )
            day = open_day(self._array(text))
            mark_seen(day, self._seen(text))

    def setup(self, stage: str | None = None) -> None:
        """Map the arrays, size the tables and cut the splits."""
        del stage
        if self._sources:
            return
        days = self._open()
        self._hotness = days[0].hotness
        if self._sizes is None:
            self._sizes = self._measure(days)
        self._sources = self._cut(days, self._sizes)

    def source(self, split: str) -> Source:
        """Rows of a split; after `setup`."""
        return self._sources[split]

    def _open(self) -> list[Day]:
        files = [self._array(file) for file in self._files] if self._from_text else self._files
        return [open_day(file, self._multi_hot) for file in files]

    def _measure(self, days: list[Day]) -> tuple[int, ...]:
        if self._from_text:
            return hashed_sizes([self._seen(text) for text in self._files], self._cap)
        return contiguous_sizes(days, self._cap, self._folder / "sizes.json")

    def _cut(self, days: list[Day], sizes: tuple[int, ...]) -> dict[str, Source]:
        def whole(chosen: list[Day]) -> CriteoSource:
            return CriteoSource(chosen, sizes, hashed=self._from_text)

        val_days, test_days = self._days
        if val_days is not None and test_days is not None:
            held = {*val_days, *test_days}
            train = whole([day for i, day in enumerate(days) if i not in held])
            val, test = (whole([days[i] for i in part]) for part in (val_days, test_days))
            if val_days != test_days:
                return {"train": train, "val": val, "test": test}
            half = len(val) // 2
            halves = {"val": SplitSource(val, 0, half), "test": SplitSource(val, half, len(val))}
            return {"train": train, **halves}
        rows: Source = whole(days)
        if self._split == "random":
            rows = PermutedSource(rows, key64(self.loader_settings.seed, 4))
        num_val, num_test = (int(len(rows) * fraction) for fraction in self._fractions)
        first, second = len(rows) - num_val - num_test, len(rows) - num_test
        bounds = {"train": (0, first), "val": (first, second), "test": (second, len(rows))}
        return {name: SplitSource(rows, *bound) for name, bound in bounds.items()}

    def _array(self, text: Path) -> Path:
        return self._folder / f"{stem(text)}_dense.npy"

    def _seen(self, text: Path) -> Path:
        return self._folder / f"{stem(text)}_seen.npy"

    def _check(self) -> None:
        if self._split not in ("time", "random"):
            raise ValueError(f"split is {self._split!r}, must be time or random")
        if self._max_malformed < 0:
            raise ValueError(f"max_malformed is {self._max_malformed}, must be at least 0")
        if self._cap < 2:
            raise ValueError(f"max_rows_per_table is {self._cap}, must be at least 2")
        if self._multi_hot and self._from_text:
            raise ValueError("multi_hot needs TorchRec's binary files; text has one id a feature")
        self._check_split()
        sizes = self._sizes
        if sizes is not None and (len(sizes) != NUM_SPARSE or min(sizes) < 2):
            raise ValueError(
                f"num_embeddings must be {NUM_SPARSE} sizes of at least 2, got {sizes}"
            )
        stems = [stem(file) for file in self._files]
        if self._from_text and len(set(stems)) < len(stems):
            raise ValueError(f"text files must differ in name, these do not: {stems}")

    def _check_split(self) -> None:
        if min(self._fractions) <= 0 or sum(self._fractions) >= 1:
            raise ValueError(
                f"val_fraction and test_fraction are {self._fractions}, "
                "must be above 0 and leave something to train on"
            )
        val_days, test_days = self._days
        if (val_days is None) != (test_days is None):
            raise ValueError("give val_days and test_days both or neither")
        if val_days is None or test_days is None:
            return
        count, held = len(self._files), {*val_days, *test_days}
        if not val_days or not test_days or not held <= set(range(count)) or len(held) == count:
            raise ValueError(
                f"val_days {val_days} and test_days {test_days} must be among the {count} files, "
                "counted from 0, and leave one to train on"
            )
        if val_days != test_days and {*val_days} & {*test_days}:
            raise ValueError(
                "val_days and test_days overlap: name the same files or different ones"
            )


def _day_list(days: Sequence[int] | None) -> list[int] | None:
    return None if days is None else list(days)


def _folder_name(files: list[Path]) -> str:
    """Readable, and different for files of one name in different places."""
    places = "\n".join(str(file.resolve()) for file in files)
    return f"{files[0].resolve().parent.name}-{hashlib.sha256(places.encode()).hexdigest()[:8]}"
