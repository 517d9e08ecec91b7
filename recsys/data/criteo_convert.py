"""Convert Criteo's text to TorchRec's binary layout: bounded memory, resumable, never half a file.

A text file becomes `<name>_{dense,sparse,labels}.npy` and, last, `<name>.json`. The arrays are
written under other names and get their own when they are whole; a journal says how far they are
valid, so a conversion that was killed goes on where the journal was last written.
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from tqdm import tqdm

from recsys.data.atomic import flush, only_one, written
from recsys.data.criteo_format import NUM_DENSE, NUM_SPARSE
from recsys.data.criteo_parse import Block, parse

PARTS = {"dense": ("<f4", NUM_DENSE), "sparse": ("<i4", NUM_SPARSE), "labels": ("<i4", 1)}
BYTES_PER_ROW = 4 * (NUM_DENSE + NUM_SPARSE + 1)

_VERSION = 1
_HEADER_BYTES = 128
# Small enough for the parser's arrays to stay in cache, which doubles its speed.
_BLOCK_BYTES = 1 << 18
_COMMIT_BYTES = 1 << 27
_LONGEST_LINE = 1 << 16
# Malformed lines written down: the first ones and the last.
_EXAMPLES = 20


class MalformedLineError(ValueError):
    """A line that is no row of Criteo's, told with its file, its number and what is wrong."""


@dataclass(frozen=True)
class Origin:
    """The text file a conversion belongs to, as it was."""

    path: str
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> Origin:
        """Describe the file as it is."""
        status = path.stat()
        return cls(str(path.resolve()), status.st_size, status.st_mtime_ns)


@dataclass
class Progress:
    """How far a conversion is: all before `offset` (bytes of text) is in the arrays."""

    origin: Origin
    offset: int = 0
    lines: int = 0
    rows: int = 0
    malformed: int = 0
    examples: list[str] = field(default_factory=list[str])
    version: int = _VERSION
    done: bool = False

    @classmethod
    def load(cls, path: Path, origin: Origin) -> Progress | None:
        """What the file says, or None when there is none, or of another text or version."""
        try:
            saved = json.loads(path.read_text())
            progress = cls(**{**saved, "origin": Origin(**saved["origin"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        same = progress.origin == origin and progress.version == _VERSION
        return progress if same else None

    def save(self, path: Path) -> None:
        """Replace the file in one step."""
        with written(path) as file:
            file.write(json.dumps(asdict(self)).encode())


def convert(
    text: Path,
    folder: Path,
    max_malformed: int = 0,
    *,
    commit_bytes: int = _COMMIT_BYTES,
) -> Progress:
    """Convert one text file (may be gzipped) into `folder`, or find that it has been.

    Shows a progress bar. `max_malformed` lines may be left out; one more is a MalformedLineError.
    A full disk is an OSError that says so. What a stopped conversion had noted in its journal is
    kept for the next call, which goes on from there unless the text has changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / f"{stem(text)}.json"
    with only_one(folder / f"{stem(text)}.lock"), _told_when_full(text, folder):
        done = Progress.load(result, Origin.of(text))
        if done is None or not _is_whole(folder, stem(text), done):
            return _Conversion(text, folder, max_malformed, commit_bytes).run()
    _check_malformed(text, done, max_malformed)
    return done


def stem(text: Path) -> str:
    """The name of a text file without its ending: day_0.gz is day_0, train.txt is train."""
    name = text.name.removesuffix(".gz")
    return name.rsplit(".", 1)[0] if "." in name else name


class _Conversion:
    """One run over one text, from where the last run stopped."""

    def __init__(self, text: Path, folder: Path, max_malformed: int, commit_bytes: int) -> None:
        self._text, self._folder, self._name = text, folder, stem(text)
        self._max_malformed, self._commit_bytes = max_malformed, commit_bytes
        self._journal = folder / f"{self._name}.journal"
        origin = Origin.of(text)
        self._progress = Progress.load(self._journal, origin) or Progress(origin)
        if not self._parts_reach(self._progress.rows):
            self._progress = Progress(origin)

    def run(self) -> Progress:
        """Convert what is left and give the arrays their names."""
        try:
            return self._run()
        except BaseException as error:
            noted = Progress.load(self._journal, self._progress.origin)
            if noted is None or not noted.rows:
                self._drop()
            elif isinstance(error, MalformedLineError):
                raise MalformedLineError(
                    f"{error}; {noted.rows:,} rows before it are kept in {self._folder}, *.part, "
                    "to go on from with a larger max_malformed"
                ) from error
            raise

    def _run(self) -> Progress:
        _check_malformed(self._text, self._progress, self._max_malformed)
        if not self._progress.offset:
            _check_space(self._text, self._folder)
        with ExitStack() as stack:
            source, raw = stack.enter_context(_opened(self._text))
            parts = {name: stack.enter_context(self._open_part(name)) for name in PARTS}
            source.seek(self._progress.offset)
            bar = stack.enter_context(_bar(self._text, raw.tell()))
            committed = self._progress.offset
            for piece in _pieces(source, self._text, self._progress):
                self._add(piece, parts)
                bar.update(raw.tell() - bar.n)
                if self._progress.offset - committed >= self._commit_bytes:
                    self._commit(parts)
                    committed = self._progress.offset
            self._commit(parts)
            self._write_headers(parts)
        return self._publish()

    def _add(self, piece: bytes, parts: dict[str, BinaryIO]) -> None:
        block = parse(piece)
        self._note_malformed(block)
        for name, file in parts.items():
            file.write(getattr(block, name).tobytes())
        self._progress.rows += len(block.labels)
        self._progress.lines += block.num_lines
        self._progress.offset += len(piece)

    def _note_malformed(self, block: Block) -> None:
        for bad in block.bad:
            number = self._progress.lines + bad.line + 1
            self._progress.malformed += 1
            self._progress.examples = [
                *self._progress.examples[: _EXAMPLES - 1],
                f"line {number}: {bad.reason}",
            ]
            _check_malformed(self._text, self._progress, self._max_malformed)

    def _commit(self, parts: dict[str, BinaryIO]) -> None:
        for file in parts.values():
            flush(file)
        self._progress.save(self._journal)

    def _open_part(self, name: str) -> BinaryIO:
        path = self._part(name)
        file = path.open("r+b" if self._progress.rows else "w+b")
        file.truncate(_part_size(name, self._progress.rows))
        file.seek(0, os.SEEK_END)
        return file

    def _write_headers(self, parts: dict[str, BinaryIO]) -> None:
        for name, file in parts.items():
            file.seek(0)
            file.write(_npy_header(name, self._progress.rows))
            flush(file)

    def _publish(self) -> Progress:
        if not self._progress.rows:
            raise ValueError(f"{self._text} holds no rows")
        for name in PARTS:
            self._part(name).replace(self._folder / f"{self._name}_{name}.npy")
        self._progress.done = True
        self._progress.save(self._folder / f"{self._name}.json")
        self._journal.unlink(missing_ok=True)
        return self._progress

    def _drop(self) -> None:
        """Leave nothing behind: the next call would not go on from it."""
        for name in PARTS:
            self._part(name).unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)

    def _part(self, name: str) -> Path:
        return self._folder / f"{self._name}_{name}.part"

    def _parts_reach(self, rows: int) -> bool:
        return all(
            self._part(name).exists() and self._part(name).stat().st_size >= _part_size(name, rows)
            for name in PARTS
        )


def _part_size(name: str, rows: int) -> int:
    return _HEADER_BYTES + rows * 4 * PARTS[name][1]


def _is_whole(folder: Path, name: str, progress: Progress) -> bool:
    files = {part: folder / f"{name}_{part}.npy" for part in PARTS}
    return progress.done and all(
        file.exists() and file.stat().st_size == _part_size(part, progress.rows)
        for part, file in files.items()
    )


def _pieces(source: BinaryIO, text: Path, progress: Progress) -> Iterator[bytes]:
    """Whole lines, some 256 KiB of them at a time."""
    rest = b""
    while read := source.read(_BLOCK_BYTES):
        lines, newline, tail = read.rpartition(b"\n")
        if newline:
            yield rest + lines + newline
            rest = tail
        else:
            rest += tail
        if len(rest) > _LONGEST_LINE:
            raise MalformedLineError(
                f"{text}, line {progress.lines + 1}: no end of line within {_LONGEST_LINE} bytes; "
                "is this a text file?"
            )
    if rest:
        yield rest + b"\n"


@contextmanager
def _opened(text: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The text and the file it is read from: not the same when it is gzipped."""
    with text.open("rb") as raw:
        if text.suffix != ".gz":
            yield raw, raw
            return
        try:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast("BinaryIO", unpacked), raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(f"{text} cannot be decompressed: {error}") from error


def _bar(text: Path, done: int) -> tqdm[Any]:
    name, size = f"converting {text.name}", text.stat().st_size
    return tqdm(total=size, initial=done, desc=name, unit="B", unit_scale=True)


def _npy_header(name: str, rows: int) -> bytes:
    """The header of NumPy's format 1.0, padded to a fixed length so that it can be written last."""
    dtype, columns = PARTS[name]
    described = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({rows}, {columns}), }}"
    length = _HEADER_BYTES - 10
    body = described.ljust(length - 1).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + body


def _check_malformed(text: Path, progress: Progress, most: int) -> None:
    if progress.malformed <= most:
        return
    many = f" ({progress.malformed} malformed lines, max_malformed is {most})" if most else ""
    raise MalformedLineError(f"{text}, {progress.examples[-1]}{many}")


def _check_space(text: Path, folder: Path) -> None:
    with _opened(text) as (source, raw):
        start = source.read(_BLOCK_BYTES)
        packed = text.stat().st_size * len(start) / max(raw.tell(), 1)
    rows = packed * start.count(b"\n") / max(len(start), 1)
    needed, free = rows * BYTES_PER_ROW, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"converting {text} takes about {needed / 1e9:.1f} GB in {folder}, "
            f"where {free / 1e9:.1f} GB are free",
        )


@contextmanager
def _told_when_full(text: Path, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or str(text) in str(error):
            raise
        raise OSError(
            error.errno,
            f"no space left in {folder} while converting {text}: free some and run again, "
            "it goes on from where it stopped",
        ) from error
