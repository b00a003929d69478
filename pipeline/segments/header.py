"""The header of safetensors: its parser, and an index over its tensors.

The parser is our own, on the standard library. It accepts what is harmless and names what is not, keeps no
object per tensor (a file may hold millions), and refuses duplicate names, numbers that are not plain
non-negative integers, and entries larger than any honest one.

Source: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from operators.errors import FormatError
from operators.words import DTYPES
from pipeline.segments.base import LayoutError

HEADER_BYTES_MAX = 256 << 20
TENSORS_MAX = 4_000_000
RANK_MAX = 32
ENTRY_BYTES_MAX = 1 << 16
"""Longest ``{"dtype": ..., "shape": ..., "data_offsets": ...}`` that is read."""
_SPACE = re.compile(rb"[ \t\n\r]*+")
_COMMA = re.compile(rb"[ \t\n\r]*+,[ \t\n\r]*+")
# Possessive repeats: linear time and constant memory, also on a header made to hurt.
# Before Python 3.11.4 such a repeat goes on from where its last turn failed, so no turn may fail behind its first byte:
# what follows a backslash is looked at apart.
_STRING = re.compile(rb'"[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+"')
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(.))', re.DOTALL)
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
        self._metadata = slice(0, 0)
        position = self._expect(0, b"{")
        more = not self._at_symbol(position, b"}")
        while more:
            if self._is_metadata(position):
                if self._metadata.stop:
                    raise LayoutError("duplicate_key", "__metadata__")
                start = self._expect(self._string(position)[1], b":")
                position = self._skip_metadata(start)
                self._metadata = slice(start, position)
            else:
                name, dtype, shape, begin, end, after = self._entry(position)
                _check_entry(name, dtype, shape, begin, end)
                if len(at) == TENSORS_MAX:
                    raise LayoutError("header_over_limit", f"more than {TENSORS_MAX} tensors")
                at.append(position)
                begins.append(begin)
                ends.append(end)
                dtypes.append(dtype_ids.setdefault(dtype, len(dtype_ids)))
                hashes.append(hash(name))
                position = after
            position, more = self._next(position)
        position = self._space(self._end(position))
        if position != len(text):
            self._syntax(position)
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

    @property
    def metadata(self) -> dict[str, str]:
        """What ``__metadata__`` holds, in its order."""
        text = self._text[self._metadata]
        return json.loads(text) or {} if text else {}

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
            raise LayoutError("header_type", f"{short(text)} is no plain object of at most {ENTRY_BYTES_MAX} bytes")
        return text, *_fields(text, body[0]), body.end()

    def _skip_metadata(self, position: int) -> int:
        """Return where the value of ``__metadata__`` ends that begins at `position`: null, or an object of strings."""
        if self._text.startswith(b"null", position):
            return position + 4
        if not self._at_symbol(position, b"{"):
            raise LayoutError("header_type", "__metadata__ is no object of strings")
        position = self._expect(position, b"{")
        more = not self._at_symbol(position, b"}")
        at, hashes = array("q"), array("q")
        while more:
            key, end = self._string(position)
            at.append(position)
            hashes.append(hash(key))
            start = self._expect(end, b":")
            if not self._at_symbol(start, b'"'):
                raise LayoutError("header_type", f"__metadata__ {short(key)} is no string")
            position, more = self._next(self._string_end(start))
        _refuse_repeats(_int64(hashes), lambda index: self._string(at[index])[0])
        return self._end(position)

    def _string(self, position: int) -> tuple[str, int]:
        """Return the JSON string at `position`, and where it ends."""
        end = self._string_end(position)
        text = str(json.loads(self._text[position:end]))
        if not _is_text(text):
            raise LayoutError("header_syntax", f"half a surrogate pair at byte {position}")
        return text, end

    def _string_end(self, position: int) -> int:
        """Return where the JSON string at `position` ends."""
        match = _STRING.match(self._text, position)
        if match is None or any(escape[1] for escape in _ESCAPE.finditer(self._text, *match.span())):
            self._syntax(position)
        return match.end()

    def _next(self, position: int) -> tuple[int, bool]:
        """Return where the next token begins, after a comma if there is one, and whether there is."""
        comma = _COMMA.match(self._text, position)
        return (comma.end(), True) if comma else (self._space(position), False)

    def _end(self, position: int) -> int:
        """Return where the object ends whose closing brace is at `position`."""
        if not self._at_symbol(position, b"}"):
            self._syntax(position)
        return position + 1

    def _at_symbol(self, position: int, symbol: bytes) -> bool:
        return self._text[position : position + 1] == symbol

    def _expect(self, position: int, symbol: bytes) -> int:
        """Return where the next token begins, after white space, `symbol` and white space."""
        position = self._space(position)
        if not self._at_symbol(position, symbol):
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


def short(text: str) -> str:
    """Return a name for a message: escaped, and cut."""
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


def _refuse_repeats(hashes: NDArray[np.int64], name: Callable[[int], str]) -> None:
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
            raise LayoutError("duplicate_key", short(text))
        bucket.add(text)


def _fields(name: str, text: bytes) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, begin and end of an entry, read by `json`."""

    def refuse(number: str) -> NoReturn:
        raise LayoutError("header_type", f"{short(name)}: {short(number)} is no plain non-negative integer")

    def integer(number: str) -> int:
        return refuse(number) if number.startswith("-") or len(number) > 20 else int(number)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise LayoutError("duplicate_key", f"within {short(name)}")
        return dict(pairs)

    try:
        entry = json.loads(text, parse_int=integer, parse_float=refuse, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise LayoutError("header_syntax", f"{short(name)}: {error}") from None
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or not _is_text(dtype)
        or not (isinstance(shape, list) and all(type(size) is int for size in shape))
        or not (isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets))
    ):
        raise LayoutError("header_type", f"{short(name)} needs a dtype, a shape and two data_offsets")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _check_entry(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> None:
    """Raise unless the entry agrees with itself."""
    if len(shape) > RANK_MAX:
        raise LayoutError("header_over_limit", f"{short(name)} has {len(shape)} dimensions")
    if not begin <= end < 1 << 62:
        raise LayoutError("invalid_offsets", f"{short(name)} from {begin} to {end}")
    known = DTYPES.get(dtype)
    if known and prod(shape) * known.element_bits != (end - begin) * 8:
        raise LayoutError("size_mismatch", f"{short(name)}: {end - begin} bytes for {dtype} {list(shape)[:8]}")


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
