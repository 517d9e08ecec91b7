"""Read MovieLens in the formats it comes in, into one."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

Column = list[str]


@dataclass(frozen=True)
class Ratings:
    """N ratings of I films by U users; ids count from 0 in the order of the original files.

    `user`, `item`: int32 (N,); `rating`: int8 (N,), 1 to 5; `timestamp`: int64 (N,), seconds.
    `gender`, `age`, `occupation`, `zip_code`: int32 (U,), each numbered from 0.
    `genre_starts`: int64 (I + 1,) into `genres`: int32, the genres of each film in turn.
    `year`: float32 (I,), of release, NaN where unknown.
    """

    user: NDArray[np.int32]
    item: NDArray[np.int32]
    rating: NDArray[np.int8]
    timestamp: NDArray[np.int64]
    gender: NDArray[np.int32]
    age: NDArray[np.int32]
    occupation: NDArray[np.int32]
    zip_code: NDArray[np.int32]
    genre_starts: NDArray[np.int64]
    genres: NDArray[np.int32]
    year: NDArray[np.float32]

    def save(self, file: BinaryIO) -> None:
        """Write all arrays as one .npz."""
        arrays: dict[str, Any] = {part.name: getattr(self, part.name) for part in fields(self)}
        np.savez(file, **arrays)

    @classmethod
    def load(cls, path: Path) -> Ratings:
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(**arrays)


def parse_grouplens(folder: Path) -> Ratings:
    """GroupLens's own files, of ml-1m or of ml-100k."""
    if (folder / "ratings.dat").exists():
        users = _table(folder / "users.dat", "::", "latin-1")
        films = _table(folder / "movies.dat", "::", "latin-1")
        events = _table(folder / "ratings.dat", "::", "latin-1")
        user_id, gender, age, occupation, zip_code = users
        years = [_year_of(title) for title in films[1]]
        genres = [text.split("|") for text in films[2]]
    else:
        users = _table(folder / "u.user", "|", "latin-1")
        films = _table(folder / "u.item", "|", "latin-1")
        events = _table(folder / "u.data", "\t", "latin-1")
        names = _table(folder / "u.genre", "|", "latin-1")[0]
        user_id, age, gender, occupation, zip_code = users
        years = [_year_of(title) for title in films[1]]
        flags = np.array(films[5 : 5 + len(names)]) == "1"
        genres = [[names[i] for i in np.flatnonzero(flags[:, film])] for film in range(len(years))]
    people = {"gender": gender, "age": age, "occupation": occupation, "zip_code": zip_code}
    return _Tables(events, user_id, people, films[0], genres, years).ratings()


def parse_registry(folder: Path) -> Ratings:
    """RecBole's atomic files: tab-separated, with a header of name:type."""
    users, films, events = (
        _with_header(folder / f"{folder.name}.{kind}") for kind in ("user", "item", "inter")
    )
    genres = [text.split(" ") for text in films.get("genre", films.get("class", []))]
    years = [
        float(year) if re.fullmatch(r"\d{4}", year) else np.nan for year in films["release_year"]
    ]
    people = {name: users[name] for name in ("gender", "age", "occupation", "zip_code")}
    columns = [events[name] for name in ("user_id", "item_id", "rating", "timestamp")]
    user_ids, item_ids = users["user_id"], films["item_id"]
    return _Tables(columns, user_ids, people, item_ids, genres, years).ratings()


@dataclass(frozen=True)
class _Tables:
    """What all formats hold: texts, column by column. `events`: user, item, rating, timestamp."""

    events: list[Column]
    user_ids: Column
    people: dict[str, Column]
    item_ids: Column
    genres: list[list[str]]
    years: list[float]

    def ratings(self) -> Ratings:
        """The same as numbers."""
        user_number = {name: number for number, name in enumerate(self.user_ids)}
        item_number = {name: number for number, name in enumerate(self.item_ids)}
        user, item, rating, timestamp = self.events
        lengths = [len(of_film) for of_film in self.genres]
        people = {name: _numbered(column) for name, column in self.people.items()}
        return Ratings(
            user=np.array([user_number[name] for name in user], dtype=np.int32),
            item=np.array([item_number[name] for name in item], dtype=np.int32),
            rating=np.array(rating, dtype=np.int8),
            timestamp=np.array(timestamp, dtype=np.int64),
            genre_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            genres=_numbered([genre for of_film in self.genres for genre in of_film]),
            year=np.array(self.years, dtype=np.float32),
            **people,
        )


def _numbered(column: Column) -> NDArray[np.int32]:
    """Each distinct text its number, in sorted order."""
    return np.unique(np.array(column), return_inverse=True)[1].astype(np.int32)


def _year_of(title: str) -> float:
    found = re.search(r"\((\d{4})\)\s*$", title)
    return float(found.group(1)) if found else np.nan


def _table(path: Path, separator: str, encoding: str) -> list[Column]:
    lines = path.read_text(encoding).splitlines()
    rows = [line.split(separator) for line in lines if line]
    return [list(column) for column in zip(*rows, strict=True)]


def _with_header(path: Path) -> dict[str, Column]:
    columns = _table(path, "\t", "utf-8")
    return {column[0].split(":")[0]: column[1:] for column in columns}
