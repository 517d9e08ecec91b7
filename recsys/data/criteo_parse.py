"""Parse Criteo's tab-separated lines, a block of thousands of lines at a time.

A line holds a label, 13 integers and 26 hexadecimal words, all but the label possibly empty. Fields
are read eight characters at once as 64-bit words and decoded by arithmetic on all of a word's bytes
together, so the cost is some twenty array operations a field, whatever is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recsys.data.criteo_format import NUM_DENSE, NUM_SPARSE

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Places = NDArray[np.int64]

NUM_FIELDS = 1 + NUM_DENSE + NUM_SPARSE
_TAB, _NEWLINE, _RETURN, _MINUS = 9, 10, 13, 45
# Room before the text, so that the word that ends with the first field lies within the array.
_PAD = 16


@dataclass(frozen=True)
class BadLine:
    """A line that is no row: its place in the block, counted from 0, and what is wrong with it."""

    line: int
    reason: str


@dataclass
class Block:
    """The rows of some lines. Malformed lines are left out and told in `bad`.

    `dense`: float32 (R, 13), log(x + 3) with x = 0 where empty and at least -2 elsewhere;
    `sparse`: int32 (R, 26), the bits of the hexadecimal word, 0 where empty;
    `labels`: int32 (R, 1). The dtypes and shapes of TorchRec's binary files.
    """

    dense: NDArray[np.float32]
    sparse: NDArray[np.int32]
    labels: NDArray[np.int32]
    num_lines: int
    bad: list[BadLine] = field(default_factory=list[BadLine])


def parse(text: bytes) -> Block:
    """Parse whole lines, the last one ended by a newline too."""
    buffer = _padded(text)
    separators = np.flatnonzero(buffer[_PAD : _PAD + len(text)] <= _NEWLINE) + _PAD
    if not _is_regular(buffer, separators):
        return _parse_irregular(text)
    ends = separators.reshape(-1, NUM_FIELDS)
    starts = np.empty_like(ends)
    starts[:, 1:] = ends[:, :-1] + 1
    starts[0, 0] = _PAD
    starts[1:, 0] = ends[:-1, -1] + 1
    ends[:, -1] -= buffer[ends[:, -1] - 1] == _RETURN
    return _decode(buffer, starts, ends)


def _padded(text: bytes) -> Bytes:
    buffer = np.zeros(_PAD + (len(text) + 15) // 8 * 8, dtype=np.uint8)
    buffer[_PAD : _PAD + len(text)] = np.frombuffer(text, dtype=np.uint8)
    return buffer


def _is_regular(buffer: Bytes, separators: Places) -> bool:
    if len(separators) % NUM_FIELDS or not len(separators):
        return False
    kinds = buffer[separators].reshape(-1, NUM_FIELDS)
    return bool((kinds[:, :-1] == _TAB).all() and (kinds[:, -1] == _NEWLINE).all())


def _parse_irregular(text: bytes) -> Block:
    """Leave out the lines that have not 40 fields, then parse the rest."""
    lines = text.split(b"\n")[:-1]
    bad = [BadLine(i, _field_count(line)) for i, line in enumerate(lines) if not _has_40(line)]
    wrong = {item.line for item in bad}
    kept = [i for i in range(len(lines)) if i not in wrong]
    if not kept:
        return Block(*_no_rows(), num_lines=len(lines), bad=bad)
    block = parse(b"".join(lines[i] + b"\n" for i in kept))
    bad += [BadLine(kept[item.line], item.reason) for item in block.bad]
    block.num_lines, block.bad = len(lines), sorted(bad, key=lambda item: item.line)
    return block


def _has_40(line: bytes) -> bool:
    return line.count(b"\t") == NUM_FIELDS - 1 and min(line.replace(b"\t", b" ")) > _NEWLINE


def _field_count(line: bytes) -> str:
    if not line.strip():
        return "the line is empty"
    count = line.count(b"\t") + 1
    if count == NUM_FIELDS - 1:
        return f"39 fields, expected {NUM_FIELDS}: is the label missing, as in Kaggle's test.txt?"
    if count != NUM_FIELDS:
        return f"{count} fields, expected {NUM_FIELDS} (label, 13 integers, 26 hexadecimal words)"
    return "a control character within a field"


def _no_rows() -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]:
    sparse = np.empty((0, NUM_SPARSE), np.int32)
    return np.empty((0, NUM_DENSE), np.float32), sparse, np.empty((0, 1), np.int32)


def _decode(buffer: Bytes, starts: Places, ends: Places) -> Block:
    label = buffer[starts[:, 0]] - np.uint8(48)
    label_ok = (ends[:, 0] - starts[:, 0] == 1) & (label <= 1)
    integers, dense_ok = _integers(buffer, starts[:, 1 : 1 + NUM_DENSE], ends[:, 1 : 1 + NUM_DENSE])
    words, sparse_ok = _hexadecimal(buffer, starts[:, 1 + NUM_DENSE :], ends[:, 1 + NUM_DENSE :])
    block = Block(
        np.log(np.maximum(integers, -2) + 3).astype(np.float32),
        words.astype(np.uint32).view(np.int32),
        label.astype(np.int32)[:, None],
        num_lines=len(starts),
    )
    good = np.concatenate([label_ok[:, None], dense_ok, sparse_ok], axis=1)
    rows = good.all(axis=1)
    if not rows.all():
        for line in np.flatnonzero(~rows):
            column = int(np.argmin(good[line]))
            text = buffer[starts[line, column] : ends[line, column]].tobytes()
            block.bad.append(BadLine(int(line), _what_is_wrong(column, text)))
        block.dense, block.sparse = block.dense[rows], block.sparse[rows]
        block.labels = block.labels[rows]
    return block


def _what_is_wrong(column: int, text: bytes) -> str:
    shown = text[:40].decode("utf-8", "backslashreplace")
    if column == 0:
        return f"the label is {shown!r}, must be 0 or 1"
    if column <= NUM_DENSE:
        return f"field {column + 1} is {shown!r}, must be an integer or empty"
    return f"field {column + 1} is {shown!r}, must be up to 8 hexadecimal digits or empty"


def _integers(
    buffer: Bytes, starts: Places, ends: Places
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    length = ends - starts
    negative = (buffer[starts] == _MINUS) & (length > 0)
    digits = length - negative
    value, good = _decimal(buffer, ends, np.minimum(digits, 8))
    number = value.view(np.int64).astype(np.float64)
    long = np.nonzero(digits > 8)
    if long[0].size:
        more, more_good = _decimal(buffer, ends[long] - 8, np.minimum(digits[long] - 8, 8))
        number[long] += more.astype(np.float64) * 1e8
        good[long] &= more_good & (digits[long] <= 16)
    good &= (digits > 0) | ~negative
    return np.where(negative, -number, number), good


def _decimal(buffer: Bytes, ends: Places, length: Places) -> tuple[Words, NDArray[np.bool_]]:
    """Numbers of up to 8 digits that end before `ends`."""
    word = _words_before(buffer, ends)
    kept = _kept_bytes(length)
    digit = (word ^ _each(0x30)) & kept
    # A byte above 9 carries into its high half when 6 is added, or has something there already.
    good = (((digit + _each(0x06)) | digit) & _each(0xF0)) == 0
    pairs = (digit * np.uint64(10) + (digit >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    fours = (pairs * np.uint64(100) + (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return (fours * np.uint64(10_000) + (fours >> np.uint64(32))) & np.uint64(0xFFFFFFFF), good


def _hexadecimal(buffer: Bytes, starts: Places, ends: Places) -> tuple[Words, NDArray[np.bool_]]:
    length = ends - starts
    kept = _kept_bytes(np.minimum(length, 8))
    word = _words_before(buffer, ends) & kept
    letter = (word >> np.uint64(6)) & _each(0x01)
    nibble = (word & _each(0x0F)) + letter * np.uint64(9)
    # Good when the digit, written out again, gives the same character (in lower case).
    above_nine = ((nibble + _each(0x06)) >> np.uint64(4)) & _each(0x01)
    written = nibble + (_each(0x30) & kept) + above_nine * np.uint64(0x27)
    same = written == (word | (letter << np.uint64(5)))
    good = same & ((nibble & _each(0xF0)) == 0) & (length <= 8)
    pairs = ((nibble << np.uint64(4)) | (nibble >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    fours = ((pairs << np.uint64(8)) | (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return ((fours << np.uint64(16)) | (fours >> np.uint64(32))) & np.uint64(0xFFFFFFFF), good


def _words_before(buffer: Bytes, ends: Places) -> Words:
    """The eight bytes before each place, the first of them lowest, from two aligned words."""
    place = ends - 8
    index = place >> 3
    shift = ((place & 7) << 3).view(np.uint64)
    words = buffer.view(np.uint64)
    low = np.take(words, index) >> shift
    return low | ((np.take(words, index + 1) << np.uint64(1)) << (np.uint64(63) - shift))


def _kept_bytes(length: Places) -> Words:
    """A mask over the last `length` of eight bytes."""
    return np.take(_MASKS, length)


def _each(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


_MASKS = np.array([0, *((2**64 - 1) ^ (2 ** (8 * (8 - n)) - 1) for n in range(1, 9))], np.uint64)
