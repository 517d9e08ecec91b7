"""Criteo's text: parsed right, malformed lines told, conversion resumable and never half done."""

from __future__ import annotations

import errno
import gzip
import math
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from recsys.data import criteo_convert
from recsys.data.criteo_convert import PARTS, MalformedLineError, Progress, convert
from recsys.data.criteo_parse import Block, parse


def make_lines(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    numbers = ("-3", "-1", "0", "7", "123", "45678", "9876543", "12345678", "1234567890", "")

    def line() -> str:
        words = (f"{rng.getrandbits(32):08x}" if rng.random() < 0.9 else "" for _ in range(26))
        return "\t".join([rng.choice("01"), *rng.choices(numbers, k=13), *words])

    return [line() for _ in range(count)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def expected(lines: list[str]) -> dict[str, np.ndarray]:
    """The slow, obvious way."""
    fields = [line.split("\t") for line in lines]
    dense = [[math.log(max(int(x or "0"), -2) + 3) for x in f[1:14]] for f in fields]
    sparse = [[int(x or "0", 16) for x in f[14:]] for f in fields]
    return {
        "dense": np.array(dense, dtype=np.float32),
        "sparse": np.array(sparse, dtype=np.uint32).view(np.int32),
        "labels": np.array([[int(f[0])] for f in fields], dtype=np.int32),
    }


def arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    return {part: np.load(folder / f"{name}_{part}.npy", mmap_mode="r") for part in PARTS}


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for part, values in first.items():
        assert values.dtype == second[part].dtype
        np.testing.assert_array_equal(values, second[part])


def test_parse_agrees_with_the_obvious_way() -> None:
    lines = make_lines(500)
    block = parse(("\n".join(lines) + "\n").encode())
    assert not block.bad
    wanted = expected(lines)
    np.testing.assert_allclose(block.dense, wanted["dense"], rtol=1e-6)
    np.testing.assert_array_equal(block.sparse, wanted["sparse"])
    np.testing.assert_array_equal(block.labels, wanted["labels"])


def test_parse_takes_upper_case_short_words_and_crlf() -> None:
    line = make_lines(1)[0].split("\t")
    line[14:18] = ["ABCDEF01", "a", "", "00000001"]
    block = parse(("\t".join(line) + "\r\n").encode())
    assert block.sparse[0, :4].tolist() == [0xABCDEF01 - 2**32, 10, 0, 1]
    assert block.sparse[0, 25] == expected(["\t".join(line)])["sparse"][0, 25]


BAD_FIELDS = [
    (0, "2", "the label is '2', must be 0 or 1"),
    (0, "", "the label is ''"),
    (0, "10", "the label is '10'"),
    (1, "1.5", "field 2 is '1.5', must be an integer"),
    (13, "-", "field 14 is '-'"),
    (5, "12a", "field 6 is '12a'"),
    (5, "1234567890123456789", "field 6 is '1234567890123456789'"),
    (5, "12345x789", "field 6 is '12345x789'"),
    (5, "5\x1c", r"field 6 is '5\\x1c'"),
    (14, "12345678g", "field 15 is '12345678g', must be up to 8 hexadecimal"),
    (39, "0000000g", "field 40 is '0000000g'"),
    (20, "zz", "field 21 is 'zz'"),
    (20, "123456789", "field 21 is '123456789'"),
    (20, "\x10\x11", "field 21"),
    (20, "é", "field 21 is 'é'"),
    (20, "1 2", "field 21 is '1 2'"),
    (20, "1\x0b2", "field 21"),
    (20, "1\x002", "control character"),
]


@pytest.mark.parametrize(("column", "text", "reason"), BAD_FIELDS)
def test_every_kind_of_bad_field_is_told(column: int, text: str, reason: str) -> None:
    lines = make_lines(20)
    fields = lines[11].split("\t")
    fields[column] = text
    block = parse("".join(f"{x}\n" for x in [*lines[:11], "\t".join(fields), *lines[12:]]).encode())
    assert [bad.line for bad in block.bad] == [11]
    assert reason.replace("\\\\", "\\") in block.bad[0].reason
    np.testing.assert_array_equal(block.sparse, expected(lines[:11] + lines[12:])["sparse"])


def test_convert_writes_numpy_files(tmp_path: Path) -> None:
    lines = make_lines(3000)
    progress = convert(write(tmp_path / "train.txt", lines), tmp_path / "out")
    assert (progress.rows, progress.lines, progress.malformed) == (3000, 3000, 0)
    got, wanted = arrays(tmp_path / "out", "train"), expected(lines)
    np.testing.assert_allclose(got.pop("dense"), wanted.pop("dense"), rtol=1e-6)
    assert_same(got, wanted)
    assert sorted(p.suffix for p in (tmp_path / "out").iterdir()) == [
        ".json",
        *[".npy"] * 3,
    ]


def test_convert_takes_gzip_and_a_last_line_without_an_end(tmp_path: Path) -> None:
    lines = make_lines(2000)
    convert(write(tmp_path / "day_0", lines), tmp_path / "plain")
    with gzip.open(tmp_path / "day_0.gz", "wb") as file:
        file.write("\n".join(lines).encode())
    assert convert(tmp_path / "day_0.gz", tmp_path / "packed").rows == 2000
    assert_same(arrays(tmp_path / "packed", "day_0"), arrays(tmp_path / "plain", "day_0"))


def test_convert_once_and_again_when_the_text_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", make_lines(100))
    convert(path, tmp_path / "out")
    before = (tmp_path / "out" / "train_dense.npy").stat().st_mtime_ns
    convert(path, tmp_path / "out")
    assert (tmp_path / "out" / "train_dense.npy").stat().st_mtime_ns == before
    write(path, make_lines(120, seed=1))
    assert convert(path, tmp_path / "out").rows == 120
    assert len(arrays(tmp_path / "out", "train")["dense"]) == 120


def test_damaged_arrays_are_made_anew(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "train.txt", make_lines(100)), tmp_path / "out"
    convert(path, folder)
    (folder / "train_labels.npy").unlink()
    convert(path, folder)
    os.truncate(folder / "train_dense.npy", 1000)
    convert(path, folder)
    assert len(arrays(folder, "train")["dense"]) == len(arrays(folder, "train")["labels"]) == 100


def test_malformed_line_is_told_with_file_number_and_reason(tmp_path: Path) -> None:
    lines = make_lines(5000)
    lines[4321] = "1\t2\t3"
    path = write(tmp_path / "train.txt", lines)
    with pytest.raises(MalformedLineError, match=r"train\.txt, line 4322: 3 fields, expected 40"):
        convert(path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_malformed_line_leaves_behind_is_told_and_gone_on_from(tmp_path: Path) -> None:
    lines = make_lines(5000)
    lines[4321] = "1\t2\t3"
    path, folder = write(tmp_path / "train.txt", lines), tmp_path / "out"
    with pytest.raises(MalformedLineError, match=r"rows before it are kept in .*/out, \*\.part"):
        convert(path, folder, commit_bytes=1 << 18)
    assert {file.suffix for file in folder.iterdir()} == {".part", ".journal"}
    assert 0 < _offset(folder) < path.stat().st_size
    assert convert(path, folder, max_malformed=1).rows == 4999
    good = [line for i, line in enumerate(lines) if i != 4321]
    np.testing.assert_array_equal(arrays(folder, "train")["sparse"], expected(good)["sparse"])


def test_malformed_lines_are_left_out_up_to_the_limit(tmp_path: Path) -> None:
    lines = make_lines(5000)
    lines[7] = ""
    lines[4000] = lines[4000] + "\t0"
    path = write(tmp_path / "train.txt", lines)
    with pytest.raises(MalformedLineError, match=r"line 4001: 41 fields.*2 malformed lines.*is 1"):
        convert(path, tmp_path / "out", max_malformed=1)
    progress = convert(path, tmp_path / "out", max_malformed=2)
    assert progress.examples[0] == "line 8: the line is empty"
    good = [line for i, line in enumerate(lines) if i not in (7, 4000)]
    np.testing.assert_array_equal(
        arrays(tmp_path / "out", "train")["sparse"], expected(good)["sparse"]
    )
    with pytest.raises(MalformedLineError):
        convert(path, tmp_path / "out", max_malformed=1)


def test_not_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\x01" * 300_000)
    with pytest.raises(MalformedLineError, match=r"line 1: no end of line.*is this a text file"):
        convert(path, tmp_path / "out")


def test_empty_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.txt holds no rows"):
        convert(write(tmp_path / "train.txt", []), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "day_0.gz").write_bytes(gzip.compress(b"0\t" * 1000)[:-9])
    with pytest.raises(OSError, match=r"day_0\.gz cannot be decompressed"):
        convert(tmp_path / "day_0.gz", tmp_path / "out")


def _convert_slowly(text: Path, folder: Path) -> None:
    def slowly(piece: bytes) -> Block:
        time.sleep(0.02)
        return parse(piece)

    criteo_convert.parse = slowly
    convert(text, folder, commit_bytes=1 << 19)


def test_killed_conversion_goes_on_and_gives_the_same_arrays(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", make_lines(40_000))
    convert(path, tmp_path / "whole")
    folder = tmp_path / "killed"
    for _ in range(3):
        before = _offset(folder)
        process = multiprocessing.get_context("fork").Process(
            target=_convert_slowly, args=(path, folder), daemon=True
        )
        process.start()
        deadline = time.monotonic() + 120
        while _offset(folder) <= before and process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not list(folder.glob("*.npy"))
    assert 0 < _offset(folder) < path.stat().st_size
    progress = convert(path, folder)
    assert (progress.rows, progress.lines) == (40_000, 40_000)
    assert_same(arrays(folder, "train"), arrays(tmp_path / "whole", "train"))


def _offset(folder: Path) -> int:
    journal = folder / "train.journal"
    progress = Progress.load(journal, criteo_convert.Origin.of(folder.parent / "train.txt"))
    return progress.offset if progress else 0


def test_full_disk_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = write(tmp_path / "train.txt", make_lines(5000)), tmp_path / "out"
    flush, calls = os.fsync, iter(range(1000))

    def full_from_the_sixth(descriptor: int) -> None:
        if next(calls) >= 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", full_from_the_sixth)
    with pytest.raises(OSError, match=r"no space left in .*goes on from where it stopped"):
        convert(path, folder, commit_bytes=1 << 18)
    assert not list(folder.glob("*.npy"))
    assert not list(folder.glob("*.json"))
    monkeypatch.undo()
    convert(path, folder)
    np.testing.assert_array_equal(
        arrays(folder, "train")["sparse"], expected(make_lines(5000))["sparse"]
    )


def test_too_little_space_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(criteo_convert.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"takes about 0.0 GB in .*where 0.0 GB are free"):
        convert(write(tmp_path / "train.txt", make_lines(100)), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.part"))
