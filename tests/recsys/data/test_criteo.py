"""The Criteo data module on files the tests write: text and TorchRec's binary layout."""

from __future__ import annotations

import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recsys.data import Batch
from recsys.data.criteo import Criteo
from recsys.data.criteo_convert import MalformedLineError
from recsys.data.criteo_files import find
from recsys.data.criteo_format import SPARSE_NAMES
from recsys.data.criteo_source import CriteoSource

OPTIONS: dict[str, Any] = {"batch_size": 16, "shuffle": "none"}


def write_text(path: Path, count: int, first: int = 0) -> Path:
    """Lines that carry their number in the first integer; 49 hashed ids a column, one empty."""
    rng = np.random.default_rng(first)
    with path.open("w") as file:
        for number in range(first, first + count):
            words = [f"{int(x) * 2654435761 % 2**32:08x}" for x in rng.integers(1, 50, 26)]
            words[3] = ""
            file.write("\t".join([str(number % 2), str(number), *["5"] * 12, *words]) + "\n")
    return path


def write_binary(folder: Path, day: int, count: int, first: int = 0) -> None:
    number = np.arange(first, first + count)
    ids = (number[:, None] + np.arange(26)) % np.arange(3, 29)
    np.save(folder / f"day_{day}_dense.npy", np.repeat(number[:, None], 13, 1).astype(np.float32))
    np.save(folder / f"day_{day}_sparse.npy", ids.astype(np.int32))
    np.save(folder / f"day_{day}_labels.npy", (number[:, None] % 2).astype(np.int32))


def ready(*args: Any, **options: Any) -> Criteo:
    data = Criteo(*args, **{**OPTIONS, **options})
    data.prepare_data()
    data.setup()
    return data


def numbers(batches: Any, text: bool = True) -> list[int]:
    dense = torch.cat([batch.dense[:, 0] for batch in batches])
    return (dense.exp() - 3).round().int().tolist() if text else dense.int().tolist()


def test_text_end_to_end(tmp_path: Path) -> None:
    data = ready(write_text(tmp_path / "train.txt", 200), data_dir=tmp_path / "data")
    assert numbers(data.train_dataloader()) == list(range(160))
    assert numbers(data.val_dataloader()) == list(range(160, 180))
    assert numbers(data.test_dataloader()) == list(range(180, 200))
    batch = next(iter(data.train_dataloader()))
    data.schema.check(batch)
    assert batch.labels[:, 0].tolist() == [0, 1] * 8
    assert torch.equal(batch.sparse["cat_3"].values(), torch.zeros(16, dtype=torch.int64))
    # 49 values get 4 rows each and "missing" one; the estimate may be off by a few.
    assert abs(data.schema.sparse[0].num_embeddings - 197) <= 8


def test_equal_words_share_a_row_and_words_never_get_the_row_of_missing(tmp_path: Path) -> None:
    data = ready(write_text(tmp_path / "train.txt", 400), data_dir=tmp_path / "data")
    ids = torch.cat([batch.sparse["cat_0"].values() for batch in data.train_dataloader()])
    assert ids.min() >= 1
    assert 40 <= len(ids.unique()) <= 49


def test_table_sizes_can_be_given_and_capped(tmp_path: Path) -> None:
    path = write_text(tmp_path / "train.txt", 200)
    capped = ready(path, data_dir=tmp_path / "data", max_rows_per_table=20)
    assert {f.num_embeddings for f in capped.schema.sparse} == {2, 20}
    given = Criteo(path, data_dir=tmp_path / "data", num_embeddings=[7] * 26, **OPTIONS)
    given.prepare_data()
    given.setup()
    assert {f.num_embeddings for f in given.schema.sparse} == {7}
    for data in (capped, given):
        data.schema.check(next(iter(data.test_dataloader())))


def test_random_split_holds_every_row_once(tmp_path: Path) -> None:
    path = write_text(tmp_path / "train.txt", 200)
    data = ready(path, data_dir=tmp_path / "data", split="random")
    parts = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    seen = [numbers(part) for part in parts]
    assert sorted(itertools.chain(*seen)) == list(range(200))
    assert seen[1] != sorted(seen[1])
    again = ready(path, data_dir=tmp_path / "data", split="random")
    assert numbers(again.val_dataloader()) == seen[1]


def test_folder_of_days(tmp_path: Path) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    for day in (0, 2, 10):
        write_text(folder / f"day_{day}", 60, first=100 * day)
    (folder / "README").write_text("not data")
    assert [file.name for file in find(folder)] == ["day_0", "day_2", "day_10"]
    data = ready(folder, data_dir=tmp_path / "data", val_days=[2], test_days=[2], batch_size=20)
    assert numbers(data.train_dataloader()) == [*range(60), *range(200, 260)]
    assert numbers(data.val_dataloader()) == list(range(1000, 1030))
    assert numbers(data.test_dataloader()) == list(range(1030, 1060))


def test_changed_text_is_read_anew(tmp_path: Path) -> None:
    path = write_text(tmp_path / "train.txt", 200)
    ready(path, data_dir=tmp_path / "data")
    write_text(path, 100, first=500)
    assert numbers(ready(path, data_dir=tmp_path / "data").train_dataloader()) == list(
        range(500, 580)
    )


def test_malformed_lines(tmp_path: Path) -> None:
    path = write_text(tmp_path / "train.txt", 200)
    path.write_text(path.read_text().replace("\t", " ", 1))
    with pytest.raises(MalformedLineError, match=r"train\.txt, line 1: 39 fields.*label missing"):
        ready(path, data_dir=tmp_path / "data")
    with pytest.warns(UserWarning, match="1 malformed lines left out, line 1"):
        data = ready(path, data_dir=tmp_path / "data", max_malformed=1)
    assert numbers(data.test_dataloader()) == list(range(181, 200))


@pytest.mark.parametrize("shuffle", ["rows", "none"])
def test_binary_layout(tmp_path: Path, shuffle: str) -> None:
    for day in range(3):
        write_binary(tmp_path, day, 64, first=100 * day)
    data = ready(tmp_path, data_dir=tmp_path / "data", shuffle=shuffle)
    assert [f.num_embeddings for f in data.schema.sparse] == list(range(3, 29))
    whole = [*range(64), *range(100, 164), *range(200, 264)]
    seen = numbers(data.train_dataloader(), text=False)
    assert len(seen) == len(set(seen)) == 144
    assert set(seen) <= set(whole[:154])
    for batch in data.train_dataloader():
        data.schema.check(batch)
        number = batch.dense[:, 0].long()
        assert torch.equal(batch.labels[:, 0].long(), number % 2)
        for column, key in enumerate(SPARSE_NAMES):
            assert torch.equal(batch.sparse[key].values(), (number + column) % (column + 3))


def test_binary_sizes_are_remembered(tmp_path: Path) -> None:
    write_binary(tmp_path, 0, 64)
    first = ready(tmp_path, data_dir=tmp_path / "data").schema
    assert list((tmp_path / "data").rglob("sizes.json"))
    assert ready(tmp_path, data_dir=tmp_path / "data").schema == first
    capped = ready(tmp_path, data_dir=tmp_path / "data", max_rows_per_table=5)
    assert max(f.num_embeddings for f in capped.schema.sparse) == 5


@pytest.mark.parametrize("shuffle", ["rows", "none"])
def test_multi_hot(tmp_path: Path, shuffle: str) -> None:
    hotness = [1 + i % 3 for i in range(26)]
    bags = [np.arange(64 * h).reshape(64, h).astype(np.int32) for h in hotness]
    for day in range(2):
        write_binary(tmp_path, day, 64, first=64 * day)
        today: dict[str, Any] = {str(i): bag + day * bag.size for i, bag in enumerate(bags)}
        np.savez(tmp_path / f"day_{day}_sparse_multi_hot.npz", **today)
    data = ready(tmp_path, data_dir=tmp_path / "data", multi_hot=True, shuffle=shuffle)
    assert [f.hotness for f in data.schema.sparse] == hotness
    assert [f.num_embeddings for f in data.schema.sparse] == [128 * h for h in hotness]
    for batch in data.train_dataloader():
        data.schema.check(batch)
        number = batch.dense[:, 0].long()
        for key, hot in zip(SPARSE_NAMES, hotness, strict=True):
            wanted = number[:, None] * hot + torch.arange(hot)
            assert torch.equal(batch.sparse[key].values().view(-1, hot), wanted)


def test_source_is_pickled_by_name_not_by_value(tmp_path: Path) -> None:
    write_binary(tmp_path, 0, 5000)
    data = ready(tmp_path, data_dir=tmp_path / "data")
    source = data.source("train")
    first: Batch = source.batch(slice(0, 4))
    packed = pickle.dumps(source)
    assert len(packed) < 5000
    assert torch.equal(pickle.loads(packed).batch(slice(0, 4)).dense, first.dense)


def test_a_slice_over_two_days(tmp_path: Path) -> None:
    for day in range(3):
        write_binary(tmp_path, day, 10, first=10 * day)
    data = Criteo(tmp_path, data_dir=tmp_path, val_days=[1], test_days=[2], **OPTIONS)
    source = CriteoSource(data._open(), (30,) * 26, hashed=False)
    assert source.batch(slice(5, 25)).dense[:, 0].tolist() == list(range(5, 25))
    rows = np.array([29, 0, 15, 9, 10])
    assert source.batch(rows).dense[:, 0].tolist() == rows.tolist()


def refused(*args: Any, **options: Any) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        Criteo(*args, **options)
    return str(caught.value)


def test_bad_paths_are_refused_at_once(tmp_path: Path) -> None:
    assert "nowhere does not exist: give Criteo's train.txt" in refused(tmp_path / "nowhere")
    assert "no Criteo data in" in refused(tmp_path)
    (tmp_path / "test.txt").write_text("")
    assert "it holds test.txt" in refused(tmp_path)
    assert "no files given" in refused([])
    write_binary(tmp_path, 0, 10)
    text = write_text(tmp_path / "train.txt", 10)
    assert "mixed" in refused([text, tmp_path / "day_0_dense.npy"])
    assert "only a part of a day" in refused(tmp_path / "day_0_sparse.npy")
    assert "must differ in name" in refused([text, text])
    (tmp_path / "day_0_labels.npy").unlink()
    assert "day_0_labels.npy is missing" in refused(tmp_path)
    np.save(tmp_path / "day_0_labels.npy", np.zeros((9, 1), dtype=np.int32))
    assert "day_0_dense.npy holds float32 (10, 13), must be floats (9, 13)" in refused(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_refused_at_once(tmp_path: Path) -> None:
    path = write_text(tmp_path / "train.txt", 10)
    path.chmod(0)
    assert "may not be read" in refused(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"split": "weekly"}, "split is 'weekly', must be time or random"),
        ({"max_malformed": -1}, "max_malformed is -1"),
        ({"max_rows_per_table": 1}, "max_rows_per_table is 1"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "leave something to train on"),
        ({"num_embeddings": [5] * 25}, "must be 26 sizes"),
        ({"multi_hot": True}, "multi_hot needs TorchRec's binary files"),
        ({"val_days": [0]}, "both or neither"),
        ({"val_days": [0], "test_days": [0]}, "leave one to train on"),
        ({"val_days": [1], "test_days": [1]}, "among the 1 files"),
    ],
)
def test_bad_options_are_refused_at_once(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    assert message in refused(write_text(tmp_path / "train.txt", 10), **options)


def test_compressed_or_incomplete_multi_hot_is_refused(tmp_path: Path) -> None:
    write_binary(tmp_path, 0, 8)
    bags: dict[str, Any] = {str(i): np.zeros((8, 2), dtype=np.int32) for i in range(26)}
    np.savez_compressed(tmp_path / "day_0_sparse_multi_hot.npz", **bags)
    assert "store it with numpy.savez" in refused(tmp_path, multi_hot=True)
    del bags["5"]
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", **bags)
    assert "lacks arrays [5]" in refused(tmp_path, multi_hot=True)


def test_hashed_ids_in_binary_files_need_sizes(tmp_path: Path) -> None:
    write_binary(tmp_path, 0, 64)
    np.save(tmp_path / "day_0_sparse.npy", np.full((64, 26), -5, dtype=np.int32))
    with pytest.raises(ValueError, match="give num_embeddings"):
        ready(tmp_path, data_dir=tmp_path / "data")
    data = ready(tmp_path, data_dir=tmp_path / "data", num_embeddings=[9] * 26)
    data.schema.check(next(iter(data.train_dataloader())))


def test_schema_is_not_guessed(tmp_path: Path) -> None:
    data = Criteo(write_text(tmp_path / "train.txt", 50), data_dir=tmp_path)
    with pytest.raises(RuntimeError, match="call prepare_data and setup"):
        _ = data.schema
