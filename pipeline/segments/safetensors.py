"""The safetensors container: eight bytes of header length, a JSON header, tensor data.

The header parser is our own, on the standard library. It accepts what is harmless and names what is not,
keeps no object per tensor (a file may hold millions), and refuses duplicate names, numbers that are not
plain non-negative integers, and entries larger than any honest one. Offsets are never assumed aligned,
ordered or gapless.

Source: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from operators.errors import FormatError
from operators.words import DTYPES, dtype_of
from pipeline.segments.base import (
    GROUP_BYTES,
    SMALL_BYTES,
    Layout,
    LayoutError,
    Segment,
    byte_segments,
)

HEADER_BYTES_MAX = 256 << 20
TENSORS_MAX = 4_000_000
RANK_MAX = 32
ENTRY_BYTES_MAX = 1 << 16
"""Longest ``{"dtype": ..., "shape": ..., "data_offsets": ...}`` that is read."""
MIN_COLUMNS = 32
"""Trailing dimensions join into a row until it has this many elements: the 3 x 3 of a kernel is no row."""

_SPACE = re.compile(rb"[ \t\n\r]*+")
_COMMA = re.compile(rb"[ \t\n\r]*+,[ \t\n\r]*+")
# Possessive repeats: linear time and constant memory, also on a header made to hurt.
_STRING = re.compile(rb'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+"')
_OBJECT = re.compile(rb"\{[^{}]{0,%d}+\}" % ENTRY_BYTES_MAX)
_NUMBER = rb"(0|[1-9][0-9]{0,17})"
_USUAL = re.compile(  # an entry as writers write it; any other goes through `json`
    rb'"([^"\\\x00-\x1f]*+)": ?\{"dtype": ?"([A-Z0-9_]{1,16})", ?"shape": ?'
    rb"\[((?:(?:0|[1-9][0-9]{0,17})(?:, ?(?!\])|(?=\])))*+)\], ?"
    rb'"data_offsets": ?\[' + _NUMBER + rb", ?" + _NUMBER + rb"\]\}"
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header; `begin` and `end` are offsets in the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header:
    """Index over a parsed header: a few integers per tensor; names and shapes are read again when asked for.

    Parameters
    ----------
    text : bytes
        The JSON, without the eight bytes of length. Kept, not copied.
    fast : bool
        Read usual entries with one regular expression; the plain path gives the same (tested).

    Attributes
    ----------
    begins, ends : int64 arrays, shape (n_tensors,)
        Offsets in the file, in the order of the header.
    dtypes : int32 array, shape (n_tensors,)
        Index into `dtype_names`.

    Raises
    ------
    LayoutError
        The text is not a sound header.
    """

    def __init__(self, text: bytes, fast: bool = True) -> None:
        self._text = text
        self._fast = fast
        _check_utf8(text)
        at, begins, ends, hashes = (array("q") for _ in range(4))
        dtypes, dtype_ids = array("i"), dict[str, int]()
        metadata_seen = False
        for position in self._keys():
            if self._is_metadata(position):
                if metadata_seen:
                    raise LayoutError("duplicate_key", "__metadata__")
                metadata_seen = True
                self._end = self._skip_metadata(position)
                continue
            name, dtype, shape, begin, end, self._end = self._entry(position)
            _check_entry(name, dtype, shape, begin, end)
            if len(at) == TENSORS_MAX:
                raise LayoutError("header_over_limit", f"more than {TENSORS_MAX} tensors")
            at.append(position)
            begins.append(begin)
            ends.append(end)
            dtypes.append(dtype_ids.setdefault(dtype, len(dtype_ids)))
            hashes.append(hash(name))
        self._at = _int64(at)
        self.begins, self.ends = 8 + len(text) + _int64(begins), 8 + len(text) + _int64(ends)
        self.dtypes = np.array(dtypes, np.int32)
        self.dtype_names = tuple(dtype_ids)
        _refuse_repeats(_int64(hashes), lambda index: self[index].name)

    def __len__(self) -> int:
        return len(self._at)

    def __getitem__(self, index: int) -> Tensor:
        name, dtype, shape, _, _, _ = self._entry(int(self._at[index]))
        return Tensor(name, dtype, shape, int(self.begins[index]), int(self.ends[index]))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def _keys(self) -> Iterator[int]:
        """Yield where each key of the outer object begins; the caller sets `_end` to the end of its value."""
        position = self._expect(0, b"{")
        if self._text[position : position + 1] == b"}":
            position += 1
        else:
            while True:
                yield position
                more = _COMMA.match(self._text, self._end)
                if more is None:
                    position = self._expect(self._end, b"}")
                    break
                position = more.end()
        if self._space(position) != len(self._text):
            self._syntax(position)

    def _is_metadata(self, position: int) -> bool:
        if self._text[position : position + 2] not in (b'"_', b'"\\'):
            return False
        return self._string(position)[0] == "__metadata__"

    def _entry(self, position: int) -> tuple[str, str, tuple[int, ...], int, int, int]:
        """Return name, dtype, shape and data_offsets of the entry at `position`, and where it ends."""
        usual = _USUAL.match(self._text, position) if self._fast else None
        if usual:
            name, dtype, shape, begin, end = usual.groups()
            sizes = tuple(map(int, shape.split(b","))) if shape else ()
            return name.decode(), dtype.decode(), sizes, int(begin), int(end), usual.end()
        text, position = self._string(position)
        position = self._expect(position, b":")
        body = _OBJECT.match(self._text, position)
        if body is None:
            raise LayoutError("header_type", f"{_short(text)} is no plain object of at most {ENTRY_BYTES_MAX} bytes")
        return text, *_fields(text, body[0]), body.end()

    def _skip_metadata(self, position: int) -> int:
        """Return where the value of ``__metadata__`` ends: null, or an object of strings."""
        position = self._expect(self._string(position)[1], b":")
        if self._text.startswith(b"null", position):
            return position + 4
        if self._text[position : position + 1] != b"{":
            raise LayoutError("header_type", "__metadata__ is no object of strings")
        position = self._expect(position, b"{")
        if self._text[position : position + 1] == b"}":
            return position + 1
        at, hashes = array("q"), array("q")
        while True:
            key, end = self._string(position)
            at.append(position)
            hashes.append(hash(key))
            position = self._expect(end, b":")
            value = _STRING.match(self._text, position)
            if value is None:
                raise LayoutError("header_type", f"__metadata__ {_short(key)} is no string")
            more = _COMMA.match(self._text, value.end())
            if more is None:
                break
            position = more.end()
        _refuse_repeats(_int64(hashes), lambda index: self._string(at[index])[0])
        position = self._space(value.end())
        if self._text[position : position + 1] != b"}":
            self._syntax(position)
        return position + 1

    def _string(self, position: int) -> tuple[str, int]:
        """Return the JSON string at `position`, and where it ends."""
        match = _STRING.match(self._text, position)
        if match is None:
            self._syntax(position)
        text = str(json.loads(match[0]))
        if not _is_text(text):
            raise LayoutError("header_syntax", f"half a surrogate pair at byte {position}")
        return text, match.end()

    def _expect(self, position: int, symbol: bytes) -> int:
        """Return where the next token begins, after white space, `symbol` and white space."""
        position = self._space(position)
        if self._text[position : position + 1] != symbol:
            self._syntax(position)
        return self._space(position + 1)

    def _space(self, position: int) -> int:
        match = _SPACE.match(self._text, position)
        return match.end() if match else position

    def _syntax(self, position: int) -> NoReturn:
        found = bytes(self._text[position : position + 8])
        raise LayoutError("header_syntax", f"{found!r} at byte {position} of the header")


def _int64(values: array[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def _short(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def _is_text(text: str) -> bool:
    """Whether UTF-8 can hold `text`: JSON may name half a surrogate pair."""
    return text.isascii() or not any("\ud800" <= symbol <= "\udfff" for symbol in text)


def _check_utf8(text: bytes) -> None:
    if text.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for offset in range(0, len(text), 1 << 20):
            decoder.decode(text[offset : offset + (1 << 20)])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise LayoutError("header_syntax", f"not UTF-8: {error.reason}") from None


def _refuse_repeats(hashes: NDArray[np.int64], name: Any) -> None:
    """Raise if two names are equal; hashes only say which to compare, so that the answer is exact."""
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(np.diff(hashes[order]) == 0)
    bucket: set[str] = set()
    bucket_hash: int | None = None
    for place in same.tolist():
        first, second = int(order[place]), int(order[place + 1])
        if bucket_hash != hashes[first]:
            bucket, bucket_hash = {name(first)}, int(hashes[first])
        text = name(second)
        if text in bucket:
            raise LayoutError("duplicate_key", _short(text))
        bucket.add(text)


def _fields(name: str, text: bytes) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, begin and end of an entry, read by `json`."""

    def refuse(number: str) -> NoReturn:
        raise LayoutError("header_type", f"{_short(name)}: {_short(number)} is no plain non-negative integer")

    def integer(number: str) -> int:
        return refuse(number) if number.startswith("-") or len(number) > 20 else int(number)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise LayoutError("duplicate_key", f"within {_short(name)}")
        return dict(pairs)

    try:
        entry = json.loads(text, parse_int=integer, parse_float=refuse, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise LayoutError("header_syntax", f"{_short(name)}: {error}") from None
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or not _is_text(dtype)
        or not (isinstance(shape, list) and all(type(size) is int for size in shape))
        or not (isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets))
    ):
        raise LayoutError("header_type", f"{_short(name)} needs a dtype, a shape and two data_offsets")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _check_entry(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> None:
    """Raise unless the entry agrees with itself."""
    if len(shape) > RANK_MAX:
        raise LayoutError("header_over_limit", f"{_short(name)} has {len(shape)} dimensions")
    if not begin <= end < 1 << 62:
        raise LayoutError("invalid_offsets", f"{_short(name)} from {begin} to {end}")
    known = DTYPES.get(dtype)
    if known and prod(shape) * known.element_bits != (end - begin) * 8:
        raise LayoutError("size_mismatch", f"{_short(name)}: {end - begin} bytes for {dtype} {list(shape)[:8]}")


def tensors_of(header: bytes) -> Header:
    """Return the tensors of a stored header, in its order: iterable, sized, and small whatever their number.

    Parameters
    ----------
    header : bytes
        The file from its first byte to the end of the header, as the header's segments hold it.

    Raises
    ------
    FormatError
        It is no header.
    """
    try:
        return Header(header[8:])
    except LayoutError as error:
        raise FormatError("a sound header of safetensors", f"{error.reason}: {error.detail}") from error


def layout(header: Header, data_begin: int, n_bytes: int, segment_bytes: int) -> Layout:
    """Cut a file of `n_bytes` along the tensors of its header.

    Raises
    ------
    LayoutError
        The data do not fit the header: `truncated` or `overlap`.
    """
    used = np.flatnonzero(header.ends > header.begins)
    order = used[np.lexsort((header.ends[used], header.begins[used]))]
    last = int(header.ends.max(initial=data_begin))
    if last > n_bytes:
        raise LayoutError("truncated", f"{n_bytes} bytes of {last}")
    begins, ends = header.begins[order], header.ends[order]
    clash = np.flatnonzero(begins[1:] < ends[:-1])
    if clash.size:
        pair = (_short(header[int(order[clash[0] + step])].name) for step in (0, 1))
        raise LayoutError("overlap", f"{' and '.join(pair)} share bytes")
    faults = []
    if order.size and (begins[0] > data_begin or np.any(begins[1:] > ends[:-1])):
        faults.append(LayoutError("hole", "bytes between tensors belong to none"))
    if last < n_bytes:
        faults.append(LayoutError("trailing_bytes", f"{n_bytes - last} bytes after the last tensor"))
    unknown = sorted(name for name in header.dtype_names if name not in DTYPES)
    if unknown:
        faults.append(LayoutError("unknown_dtype", f"{', '.join(map(_short, unknown[:8]))}: coded as bytes"))
    first, *rest = byte_segments(0, data_begin, segment_bytes)
    segments = (
        replace(first, n_tensors=len(header) - order.size),
        *rest,
        *_data_segments(header, order, data_begin, segment_bytes),
        *byte_segments(last, n_bytes, segment_bytes),
    )
    return Layout(
        "safetensors",
        faults[0].reason if faults else None,
        "; ".join(fault.detail for fault in faults),
        segments,
    )


def _data_segments(header: Header, order: NDArray[np.int64], position: int, segment_bytes: int) -> Iterator[Segment]:
    """Yield the segments of tensors and of gaps between them, in order of offset."""
    group = _Group(header, min(GROUP_BYTES, segment_bytes))
    for index, begin, end in _triples(header, order):
        if begin > position:
            yield from group.flush()
            yield from byte_segments(position, begin, segment_bytes)
        position = end
        if end - begin < min(SMALL_BYTES, segment_bytes):
            yield from group.add(index, begin, end)
        else:
            yield from group.flush()
            yield from tensor_segments(header[index], segment_bytes)
    yield from group.flush()


def _triples(header: Header, order: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    for start in range(0, order.size, 1 << 16):  # Python integers of a slice at a time
        part = order[start : start + (1 << 16)]
        yield from zip(part.tolist(), header.begins[part].tolist(), header.ends[part].tolist(), strict=True)


@dataclass(slots=True)
class _Run:
    """Small tensors of one dtype side by side: the last one's index, how many, and their range."""

    index: int
    dtype: int
    n_tensors: int
    begin: int
    end: int


class _Group:
    """Gathers small tensors that lie side by side.

    A run of one dtype that is large enough is a segment of that dtype. Shorter runs share a segment, of
    bytes where their dtypes differ.
    """

    def __init__(self, header: Header, max_bytes: int) -> None:
        self._header = header
        self._max_bytes = max_bytes
        self._run: _Run | None = None
        self._mixed: list[_Run] = []

    def add(self, index: int, begin: int, end: int) -> Iterator[Segment]:
        """Take the next small tensor; yield what is complete."""
        dtype, run = int(self._header.dtypes[index]), self._run
        if run and run.dtype == dtype and end - run.begin <= self._max_bytes:
            run.index, run.end = index, end
            run.n_tensors += 1
            return
        yield from self._close_run()
        self._run = _Run(index, dtype, 1, begin, end)

    def flush(self) -> Iterator[Segment]:
        """Yield all that is left."""
        yield from self._close_run()
        yield from self._close_mixed()

    def _close_run(self) -> Iterator[Segment]:
        run, self._run = self._run, None
        if run is None:
            return
        if run.end - run.begin >= SMALL_BYTES:
            yield from self._close_mixed()
            yield self._segment([run])
            return
        if self._mixed and run.end - self._mixed[0].begin > self._max_bytes:
            yield from self._close_mixed()
        self._mixed.append(run)

    def _close_mixed(self) -> Iterator[Segment]:
        if self._mixed:
            yield self._segment(self._mixed)
            self._mixed = []

    def _segment(self, runs: list[_Run]) -> Segment:
        begin, end = runs[0].begin, runs[-1].end
        if len(runs) == 1 and runs[0].n_tensors == 1:
            return next(tensor_segments(self._header[runs[0].index], end - begin))
        names = {self._header.dtype_names[run.dtype] for run in runs}
        dtype = names.pop() if len(names) == 1 else None
        n_tensors = sum(run.n_tensors for run in runs)
        return Segment(begin, end - begin, None, dtype, None, 0, 1, _n_words(end - begin, dtype), n_tensors)


def _n_words(n_bytes: int, dtype: str | None) -> int:
    return n_bytes * 8 // dtype_of(dtype).word_bits


def row_elements(shape: Iterable[int]) -> int:
    """Return the elements of a row: the last dimensions, joined until they are `MIN_COLUMNS` or all but one.

    A vector is one row.
    """
    sizes = tuple(shape)
    columns = 1
    for size in reversed(sizes[1:]):
        columns *= size
        if columns >= MIN_COLUMNS:
            break
    return columns if len(sizes) > 1 else prod(sizes)


def tensor_segments(tensor: Tensor, segment_bytes: int) -> Iterator[Segment]:
    """Cut one tensor at whole rows, evenly; a row longer than a segment is cut by itself.

    A tensor whose rows are no whole bytes, or whose dtype is unknown, is one row of bytes.
    """
    n_bytes = tensor.end - tensor.begin
    known = DTYPES.get(tensor.dtype)
    row_bits = row_elements(tensor.shape) * known.element_bits if known else 1
    row_bytes = row_bits // 8 if row_bits % 8 == 0 else n_bytes
    if row_bytes <= segment_bytes:
        n_rows = n_bytes // row_bytes
        n_pieces = -(-n_rows // (segment_bytes // row_bytes))
        step = -(-n_rows // n_pieces)
        for row in range(0, n_rows, step):
            rows = min(step, n_rows - row)
            yield _piece(tensor, row * row_bytes, rows * row_bytes, row, rows)
        return
    for row in range(n_bytes // row_bytes):
        for offset in range(0, row_bytes, segment_bytes):
            yield _piece(tensor, row * row_bytes + offset, min(segment_bytes, row_bytes - offset), row, 1)


def _piece(tensor: Tensor, offset: int, n_bytes: int, row_start: int, n_rows: int) -> Segment:
    row_words = _n_words(n_bytes, tensor.dtype) // n_rows
    return Segment(
        tensor.begin + offset,
        n_bytes,
        tensor.name,
        tensor.dtype,
        tensor.shape,
        row_start,
        n_rows,
        row_words,
        n_tensors=int(offset == 0),
    )
