"""Reading files and tensors out of an archive, whole or in part: only the segments that hold what is asked for.

Needs a store and `operators`, no search. Everything that gives bytes back comes through here: `brevis restore` and
`cat`, and `pipeline.open`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from operators.errors import DamageError, FormatError, NothingMatchedError, UnsupportedError, UsageError
from operators.run import execute
from pipeline.ahead import ahead
from pipeline.packs import WINDOW_BYTES, PackBooks, Record, read_records, record_windows
from pipeline.plan import is_selected
from pipeline.rooms import Room
from pipeline.rows import Row, Rows, spans_of, values_of
from pipeline.segments import Tensor, tensors_of
from pipeline.segments.header import HEADER_BYTES_MAX, Header
from pipeline.snapshots import FileEntry, Snapshot, file_digest
from pipeline.store import SourceStore

HEADER_LENGTH_BYTES = 8
REQUESTS = 16
"""Headers that are read side by side."""
_ALIGNED = 8
"""Decoded words may be written where an address is a multiple of this."""


# -- files --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """One file: its entry in the snapshot, and its rows in order of offset."""

    entry: FileEntry
    rows: Sequence[Row]

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return self.entry.n_bytes

    def touched(self, begin: int, end: int) -> Sequence[Row]:
        """Return the rows that hold some of the bytes `begin` to `end`."""
        spans = spans_of(self.rows)
        first = bisect_right(spans, begin, key=lambda span: span.end_bytes)
        stop = bisect_left(spans, end, key=lambda span: span.offset_bytes)
        return self.rows[first:stop] if begin < end else ()


def check_file(file: ArchivedFile) -> None:
    """Check that the rows are those of the file that the snapshot promises.

    Raises
    ------
    FormatError
        Their digests do not give the digest of the file.
    """
    segments = ((n_bytes, digest or b"") for n_bytes, digest in values_of(file.rows, "n_bytes", "digest"))
    entry, found = file.entry, file_digest(segments)
    if found != entry.digest:
        raise FormatError(f"segments of the file {entry.digest}", found, entry.key, "verify the manifest")


def check_files(snapshot: Snapshot, rows: Sequence[Row]) -> None:
    """Check every file of a snapshot with `check_file`; `rows` are those of its manifest."""
    for file in archived_files(snapshot, rows) if snapshot.files else ():
        check_file(file)


def archived_files(
    snapshot: Snapshot, rows: Sequence[Row], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> list[ArchivedFile]:
    """Return the files of a snapshot that the filters leave, each with its rows.

    Raises
    ------
    NothingMatchedError
        None is left.
    """
    by_file = {key: group for (key,), group in Rows.of(rows).by("file")}
    files = [
        ArchivedFile(entry, by_file.get(entry.key, ()))
        for entry in snapshot.files
        if is_selected(entry.key, include, exclude)
    ]
    if not files:
        found = f"none of {len(snapshot.files)}"
        raise NothingMatchedError("at least one file", found, snapshot.name, "see `brevis info`")
    return files


# -- segments and ranges ------------------------------------------------------------------------


class Decoder:
    """Decodes segments of an archive, into one reused buffer unless another is given.

    Parameters
    ----------
    archive : SourceStore
    """

    def __init__(self, archive: SourceStore) -> None:
        self._archive = archive
        self._books = PackBooks(archive)
        self._buffer = np.empty(0, np.uint8)

    def segments(self, rows: Sequence[Row]) -> Iterator[tuple[Row, memoryview]]:
        """Yield each row with the bytes of its segment; they are valid until the next one is asked for.

        Raises
        ------
        DamageError
            A record is damaged; the message names file and tensor.
        StoreError
            A pack cannot be read.
        """
        for row, record in read_records(self._archive, rows):
            yield row, self.decode(row, record)

    def decode(self, row: Row, record: memoryview, out: NDArray[np.uint8] | None = None) -> memoryview:
        """Return the bytes of a segment.

        Parameters
        ----------
        row : Row
        record : memoryview
        out : uint8 array, shape (row.n_bytes,), optional
            Caller's buffer, aligned to 8 bytes. By default what is returned is valid until the next call.

        Raises
        ------
        DamageError
            The record is damaged, or not that of the row; the message names file and tensor.
        """
        if out is None:
            if self._buffer.size < row.n_bytes:
                self._buffer = np.empty(row.n_bytes, np.uint8)
            out = self._buffer[: row.n_bytes]
        try:
            execute(record, self._books.of(row), n_bytes=row.n_bytes, digest=row.digest, out=out)
        except (DamageError, UnsupportedError) as error:
            raise type(error)(error.expected, error.found, row.where, error.next_step) from error
        return out.data

    def decode_part(self, row: Row, record: memoryview, begin: int, out: NDArray[np.uint8]) -> None:
        """Write the bytes of a segment that belong to `out`, whose first byte is byte `begin` of the file."""
        start, stop = max(row.offset_bytes - begin, 0), min(row.end_bytes - begin, out.size)
        place = out[start:stop]
        if place.size == row.n_bytes and place.ctypes.data % _ALIGNED == 0:
            self.decode(row, record, place)
        else:
            first = begin + start - row.offset_bytes
            place[:] = np.frombuffer(self.decode(row, record), np.uint8)[first : first + place.size]


def records_ahead(archive: SourceStore, rows: Sequence[Row], rooms: Sequence[Room] = ()) -> Iterator[Record]:
    """Yield each row with its record; the next are read while the caller works, where they are many.

    Parameters
    ----------
    archive : SourceStore
    rows : sequence of Row
    rooms : sequence of Room
        Two, to be read into; by default their own.
    """
    windows = record_windows(archive, rows, rooms or (Room(), Room()))
    are_many = sum(stored_bytes or 0 for stored_bytes, _ in values_of(rows, "stored_bytes", "task")) > WINDOW_BYTES
    for window in ahead(windows) if are_many else windows:
        yield from window


def range_bytes(archive: SourceStore, file: ArchivedFile, begin: int, end: int) -> Generator[memoryview]:
    """Yield bytes `begin` to `end` of a file in order; only the segments that hold some of them are read.

    Yields
    ------
    memoryview
        Valid until the next one is asked for.
    """
    decoder = Decoder(archive)
    for row, record in records_ahead(archive, file.touched(begin, end)):
        data = decoder.decode(row, record)
        yield data[max(begin - row.offset_bytes, 0) : min(end - row.offset_bytes, row.n_bytes)]


def range_of(archive: SourceStore, file: ArchivedFile, begin: int, end: int) -> bytes:
    """Return bytes `begin` to `end` of a file, few enough to be held at once."""
    return b"".join(map(bytes, range_bytes(archive, file, begin, end)))


def read_into(archive: SourceStore, file: ArchivedFile, begin: int, out: NDArray[np.uint8]) -> None:
    """Fill `out` with the bytes of a file from `begin`; a segment that lies in it whole is decoded in its place.

    Parameters
    ----------
    archive : SourceStore
    file : ArchivedFile
    begin : int
        ``begin + out.size`` is at most the size of the file.
    out : uint8 array
        Caller's buffer, aligned to 8 bytes; its content is undefined after an error.
    """
    decoder = Decoder(archive)
    for row, record in records_ahead(archive, file.touched(begin, begin + out.size)):
        decoder.decode_part(row, record, begin, out)


# -- tensors ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor, and the file that holds it."""

    file: ArchivedFile
    tensor: Tensor

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.tensor.end - self.tensor.begin

    @property
    def rows(self) -> Sequence[Row]:
        """The rows that hold some of its bytes."""
        return self.file.touched(self.tensor.begin, self.tensor.end)


_Named: TypeAlias = tuple[Header, dict[str, int]]
"""A header, and the place in it of each name."""


class Tensors:
    """Finds tensors by name; headers are read when they are needed, and kept.

    Safe to use from several threads.

    Parameters
    ----------
    archive : SourceStore
    files : sequence of ArchivedFile
    """

    def __init__(self, archive: SourceStore, files: Sequence[ArchivedFile]) -> None:
        self._archive = archive
        self._files = {file.entry.key: file for file in files if file.entry.format == "safetensors"}
        self._headers: dict[str, _Named] = {}

    def names(self) -> list[str]:
        """Return a name that `find` takes for each tensor, in the order of files and headers.

        It is ``NAME``, or ``FILE:NAME`` where several files have that one.
        """
        found = [(key, name) for key, (_, places) in self._all().items() for name in places]
        seen: dict[str, str | None] = {}
        for key, name in found:
            seen[name] = None if name in seen else key
        return [name if seen[name] else f"{key}:{name}" for key, name in found]

    def find(self, name: str) -> FoundTensor:
        """Find the tensor that a user names as ``NAME`` or ``FILE:NAME``; the latter reads no other header.

        Raises
        ------
        UsageError
            No file or several files have it.
        FormatError
            The header of a file is damaged, or the tensor would end beyond its file.
        """
        parts = name.split(":")
        ways = [(":".join(parts[:cut]), ":".join(parts[cut:])) for cut in range(1, len(parts))]
        found = [self._at(key, rest) for key, rest in ways if key in self._files and rest in self._header(key)[1]]
        if not found:
            found = [self._at(key, name) for key, (_, places) in self._all().items() if name in places]
        if len(found) != 1:
            files = ", ".join(sorted({item.file.entry.key for item in found}))
            hint = f"name one as FILE:NAME: {files[:400]}" if found else "see `brevis info`"
            raise UsageError("one tensor of that name", str(len(found)), name, hint)
        return found[0]

    def _at(self, key: str, name: str) -> FoundTensor:
        file, (header, places) = self._files[key], self._header(key)
        tensor = header[places[name]]
        if tensor.end > file.n_bytes:
            raise FormatError(f"a tensor that ends at {file.n_bytes} or before", f"{tensor.end}", key)
        return FoundTensor(file, tensor)

    def _all(self) -> dict[str, _Named]:
        """Return what `_header` does for every file; what is not known yet is read side by side."""
        with ThreadPoolExecutor(REQUESTS) as pool:
            return dict(zip(self._files, pool.map(self._header, self._files), strict=True))

    def _header(self, key: str) -> _Named:
        known = self._headers.get(key)
        if known is None:  # two threads may both read it, and find the same
            check_file(self._files[key])
            header = tensors_of(read_header(Decoder(self._archive), self._files[key]))
            known = self._headers[key] = header, {tensor.name: place for place, tensor in enumerate(header)}
        return known


def read_header(decoder: Decoder, file: ArchivedFile) -> bytes:
    """Return the header of a safetensors file, its length included, from the first rows alone.

    Raises
    ------
    FormatError
        It would be longer than the file or than any header; nothing more is decoded.
    """
    header = bytearray()
    most_bytes = min(file.n_bytes, HEADER_LENGTH_BYTES + HEADER_BYTES_MAX)
    for row in file.rows:  # one by one, since it is rarely more, and what follows is large
        [(_, data)] = decoder.segments([row])
        header += data
        if len(header) < HEADER_LENGTH_BYTES:
            continue
        n_bytes = HEADER_LENGTH_BYTES + int.from_bytes(header[:HEADER_LENGTH_BYTES], "little")
        if n_bytes > most_bytes:
            raise FormatError(f"a header that ends at {most_bytes} or before", f"{n_bytes}", file.entry.key)
        if len(header) >= n_bytes:
            return bytes(header[:n_bytes])
    raise FormatError("a header", f"{len(header)} bytes", file.entry.key)
