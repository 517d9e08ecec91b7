"""Find Criteo's data on disk: raw text or TorchRec's binary layout; open the arrays of a day."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recsys.data.criteo_format import NUM_DENSE, NUM_SPARSE

WANTED = (
    "give Criteo's train.txt, its day_* files (may be .gz), a list of them, a folder of them, or a "
    "folder of TorchRec's day_*_dense.npy, day_*_sparse.npy and day_*_labels.npy"
)
_TEXT_NAMES = (r"day_\d+(\.gz)?", r"train\.txt(\.gz)?", r".*\.(tsv|txt)(\.gz)?")
_DENSE = "_dense.npy"


def find(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The text files, or the `_dense.npy` files, that `path` stands for, in order of their days.

    `path` is a file, a folder or a list of files. In a folder the first kind that is there counts:
    binary files, `day_*`, `train.txt`, any .txt or .tsv but Kaggle's unlabelled `test.txt`.
    Raises FileNotFoundError, PermissionError or ValueError, saying what would be right.
    """
    if isinstance(path, str | Path):
        path = Path(path)
        files = _in_folder(path) if path.is_dir() else [path]
    else:
        files = [Path(part) for part in path]
    if not files:
        raise ValueError(f"no files given: {WANTED}")
    for file in files:
        _check_readable(file)
    if len({is_binary(file) for file in files}) > 1:
        raise ValueError(f"text and binary files are mixed: {[str(file) for file in files]}")
    for file in files:
        if file.suffix == ".npy" and not is_binary(file):
            raise ValueError(f"{file} is only a part of a day: give its folder or its *{_DENSE}")
    return files


def is_binary(file: Path) -> bool:
    """Whether it is the first part of a day in TorchRec's layout."""
    return file.name.endswith(_DENSE)


def _in_folder(folder: Path) -> list[Path]:
    files = [file for file in folder.iterdir() if file.is_file()]
    binary = [file for file in files if is_binary(file)]
    if binary:
        return sorted(binary, key=_day_order)
    for pattern in _TEXT_NAMES:
        found = [
            f for f in files if re.fullmatch(pattern, f.name) and not f.name.startswith("test.")
        ]
        if found:
            return sorted(found, key=_day_order)
    names = ", ".join(sorted(file.name for file in folder.iterdir())[:5]) or "nothing"
    raise FileNotFoundError(f"no Criteo data in {folder} (it holds {names}): {WANTED}")


def _day_order(file: Path) -> tuple[int, str]:
    number = re.search(r"\d+", file.name)
    return (int(number.group()) if number else 0, file.name)


def _check_readable(file: Path) -> None:
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: {WANTED}")
    if file.is_dir():
        raise ValueError(f"{file} is a folder within a list: {WANTED}")
    if not os.access(file, os.R_OK):
        raise PermissionError(f"{file} may not be read by this user")


class _Mapped:
    """A memory-mapped .npy array, or one stored in an .npz, opened where it is used.

    Each process maps the file for itself: an open map would be pickled by value.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset
        self._array: NDArray[Any] | None = None

    @property
    def modified_ns(self) -> int:
        """When the file was last written, nanoseconds since 1970."""
        return self._path.stat().st_mtime_ns

    @property
    def array(self) -> NDArray[Any]:
        """The array, read-only."""
        if self._array is None:
            self._array = _map(self._path, self._offset)
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_offset": self._offset, "_array": None}


def _map(path: Path, offset: int) -> NDArray[Any]:
    with path.open("rb") as file:
        file.seek(offset)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        read = read if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        order: Literal["F", "C"] = "F" if fortran else "C"
        return np.memmap(path, dtype, "r", offset=file.tell(), shape=shape, order=order)


@dataclass(frozen=True)
class Day:
    """The arrays of one day: N rows.

    `dense`: float32 (N, 13); `sparse`: integers, one (N, 26) or 26 of (N, ids a sample);
    `labels`: integers (N, 1) or (N,).
    """

    name: str
    dense: _Mapped
    sparse: tuple[_Mapped, ...]
    labels: _Mapped

    def __len__(self) -> int:
        return len(self.labels.array)

    @property
    def modified_ns(self) -> int:
        """When the ids were last written, nanoseconds since 1970."""
        return max(part.modified_ns for part in self.sparse)

    @property
    def hotness(self) -> tuple[int, ...]:
        """Ids a sample of each of the 26 features."""
        if len(self.sparse) == 1:
            return (1,) * NUM_SPARSE
        return tuple(part.array.shape[1] for part in self.sparse)


def open_day(dense: Path, multi_hot: bool = False) -> Day:
    """The day whose `_dense.npy` this is. Raises ValueError, naming the file, for other shapes."""
    name = dense.name.removesuffix(_DENSE)
    sparse = dense.with_name(f"{name}_sparse{'_multi_hot.npz' if multi_hot else '.npy'}")
    labels = dense.with_name(f"{name}_labels.npy")
    for file in (sparse, labels):
        if not file.exists():
            raise FileNotFoundError(f"{file} is missing beside {dense}")
    parts = _npz_parts(sparse) if multi_hot else (_Mapped(sparse),)
    day = Day(name, _Mapped(dense), parts, _Mapped(labels))
    _check(dense, day.dense.array, (len(day), NUM_DENSE), "f")
    for part in parts:
        columns = part.array.shape[-1] if multi_hot else NUM_SPARSE
        _check(sparse, part.array, (len(day), columns), "iu")
    _check(labels, day.labels.array.reshape(len(day), -1), (len(day), 1), "iuf")
    return day


def _check(file: Path, array: NDArray[Any], shape: tuple[int, int], kinds: str) -> None:
    if array.shape != shape or array.dtype.kind not in kinds:
        kind = "floats" if kinds == "f" else "integers"
        raise ValueError(f"{file} holds {array.dtype} {array.shape}, must be {kind} {shape}")


def _npz_parts(path: Path) -> tuple[_Mapped, ...]:
    """The arrays "0" to "25" of an .npz, mapped where they lie in it."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = {info.filename: info for info in archive.infolist()}
        missing = [i for i in range(NUM_SPARSE) if f"{i}.npy" not in members]
        if missing:
            raise ValueError(f"{path} lacks arrays {missing}; it must hold 0 to {NUM_SPARSE - 1}")
        return tuple(_member(path, file, members[f"{i}.npy"]) for i in range(NUM_SPARSE))


def _member(path: Path, file: Any, info: zipfile.ZipInfo) -> _Mapped:
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{path} is compressed and cannot be mapped: store it with numpy.savez")
    # The local header's own lengths say where the data begin; the central one's may differ.
    file.seek(info.header_offset + 26)
    name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return _Mapped(path, info.header_offset + 30 + name + extra)
