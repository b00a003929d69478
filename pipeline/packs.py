"""Packs: made in memory, put whole, read by ranges.

A pack is put under the digest of its bytes. One that outgrows its memory goes on in a file, of the scratch directory or
beside the objects of the archive.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from operators.books import MAX_BOOKS_BYTES, Books
from operators.errors import DamageError, FormatError, LimitError, NotFoundError, StoreError
from operators.literals.fixed import Fixed
from operators.record import PACK_FOOTER_BYTES, books_range, pack_footer, pack_header
from operators.words import Bytes
from pipeline.parquet import from_parquet, to_parquet
from pipeline.rooms import Room
from pipeline.rows import Row, Rows
from pipeline.store import ObjectInfo, SourceStore, Store, Whole

Record = tuple[Row, memoryview]
"""A row and its record."""
WINDOW_BYTES = 32 << 20
"""Stored bytes that are read ahead at once; a larger record is read alone."""
INDEX_LEVEL = 19
INDEX_BYTES_MAX = 1 << 30
"""Most bytes of an index as rows."""
BOOKS_READ_BYTES = 4 << 10
"""Last bytes of a pack, which nearly always hold all of its codebooks."""
SAMPLED = bytes(8)
"""Stands in an index for any fingerprint."""
KEPT_BYTES = 64 << 10
"""Records of so many bytes stay where they were made: to close the gap before one costs a copy of it."""
GAP_BYTES = 1 << 20
"""Records this close together in a pack are read in one go."""


def pack_index(rows: Iterable[Row]) -> bytes:
    """Return the index of a pack: one zstandard frame of the rows of its task, as `index_row` has them."""
    return zstandard.ZstdCompressor(level=INDEX_LEVEL).compress(to_parquet(map(index_row, rows), compress=False))


def index_row(row: Row) -> Row:
    """Return `row` as the index of the pack of its task has it.

    What its record says is left out, unless that is in another pack; of a fingerprint, which the segment gives again,
    only that there is one. The place in the plan is left out too, so that a task that did not change is the same pack
    every night.
    """
    row = replace(row, task=0, fingerprint=None if row.fingerprint is None else SAMPLED)
    return row if row.pack is not None else replace(row, digest=None, program=None, stored_digest=None)


def read_index(data: Bytes, where: str) -> Rows:
    """Return the rows of the index of a pack.

    Raises
    ------
    DamageError
        It is damaged, or larger than any index.
    """
    try:
        n_bytes = zstandard.frame_content_size(data)
        if not 0 <= n_bytes <= INDEX_BYTES_MAX:
            raise LimitError(f"an index of at most {INDEX_BYTES_MAX} bytes", str(n_bytes), where)
        return from_parquet(zstandard.ZstdDecompressor().decompress(data, n_bytes), where)
    except zstandard.ZstdError as error:
        raise FormatError("the index of a pack", str(error), where) from error


class PackSpool:
    """A pack on its way to a store.

    Records gather in memory, so that the caller need not wait for them to be hashed while it has something to compute.
    What finds no room writes them to a file, where the rest follows.

    Parameters
    ----------
    store : Store
        That the pack will be put into.
    scratch_dir : str
        Folder for the file; empty lets the store choose.
    memory : uint8 array
        Of the caller, not used by others until the pack is closed; at least as large as any record.

    Raises
    ------
    StoreError
        From every method: the folder is missing or full.
    """

    def __init__(self, store: Store, scratch_dir: str, memory: NDArray[np.uint8]) -> None:
        self._store, self._scratch_dir = store, scratch_dir
        self._path: Path | None = None
        self._file = -1
        self._pieces: list[memoryview] = []
        """What is hashed and not in the file."""
        self._memory = memory
        self._held: list[tuple[int, int]] = []
        self._first = memory.__array_interface__["data"][0]
        self._hasher = blake3()
        self.n_bytes = 0
        self.digests: dict[int, bytes] = {}
        """Digest of each record that was written, by its offset."""
        self._written_bytes = 0
        self.before_flush: Callable[[], None] = _nothing
        """Called before what is held is let go; it may add more."""
        self._append(pack_header())

    def room(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return memory in which the next record may be made; `add` finds it there."""
        self._make_room(n_bytes)
        return self._memory[self._held_bytes :]

    def add(self, record: Bytes) -> tuple[int, memoryview]:
        """Append a record; return its offset, and where it is held until the next `flush`."""
        n_bytes = len(record)
        self._make_room(n_bytes)
        start = self._held_bytes
        made_at = np.frombuffer(record, np.uint8).__array_interface__["data"][0] - self._first
        if n_bytes >= KEPT_BYTES and start <= made_at <= self._memory.size - n_bytes:
            start = made_at
        else:  # not by numpy, which would make a copy of one that lies here already, a few bytes from its place
            self._memory.data[start : start + n_bytes] = memoryview(record).cast("B")
        self._held.append((start, start + n_bytes))
        offset, self.n_bytes = self.n_bytes, self.n_bytes + n_bytes
        return offset, self._memory.data[start : start + n_bytes].toreadonly()

    @property
    def whole(self) -> Whole:
        """The finished pack, to be put: its file, or its pieces, some in `memory`."""
        return self._pieces if self._path is None else self._path

    def flush(self) -> None:
        """Hash what is held in memory and write it to the file."""
        self._hash()
        self._spill()

    def _hash(self) -> None:
        self.before_flush()
        offset = self._written_bytes
        stretches: list[tuple[int, int]] = []
        for start, stop in self._held:
            self.digests[offset] = blake3(self._memory.data[start:stop]).digest()
            offset += stop - start
            if stretches and stretches[-1][1] == start:
                stretches[-1] = stretches[-1][0], stop
            else:
                stretches.append((start, stop))
        self._held = []
        for start, stop in stretches:
            self._write(self._memory.data[start:stop])

    def finish(self, index: bytes, books: bytes = b"") -> bytes:
        """Append the index, the codebooks that the records name, and the footer; return the digest of the pack."""
        self._hash()
        offset = self.n_bytes
        self._append(index)
        self._append(books)
        self._append(pack_footer(offset, len(index)))
        if self._path is not None:
            self._spill()
            with _room(self._scratch_dir, str(self._path)):
                self._close()
        return self._hasher.digest()

    def _make_room(self, n_bytes: int) -> None:
        if self._held_bytes + n_bytes > self._memory.size:
            self.flush()

    @property
    def _held_bytes(self) -> int:
        return self._held[-1][1] if self._held else 0

    def _append(self, data: bytes) -> None:
        self._write(memoryview(data))
        self.n_bytes += len(data)

    def _write(self, data: memoryview) -> None:
        self._hasher.update(data)
        self._written_bytes += len(data)
        self._pieces.append(data)

    def _spill(self) -> None:
        """Write the pieces to the file: their memory is needed, or what comes before them is there."""
        if self._path is None:
            with _room(self._scratch_dir, self._scratch_dir):
                self._path = self._store.spool(self._scratch_dir)
                self._file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        with _room(self._scratch_dir, str(self._path)):
            for data in self._pieces:
                while data:
                    data = data[os.write(self._file, data) :]
        self._pieces = []

    def _close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.before_flush = _nothing  # it has this pack: each would keep the other, and its memory, until a collection
        with contextlib.suppress(OSError):  # in place of the error that tells of it
            self._close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)  # it is gone where the store has taken it


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _room(scratch_dir: str, where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        folder = scratch_dir or "the archive or the temporary directory"
        found = error.strerror or str(error)
        step = "set run.scratch_dir to a folder with room"
        raise StoreError(f"room for a pack in {folder}", found, where, step) from error


def read_records(store: SourceStore, rows: Sequence[Row]) -> Iterator[tuple[Row, memoryview]]:
    """Yield each row with its record, reading neighbours of one pack together; a record lasts until the next one.

    Parameters
    ----------
    store : SourceStore
        The archive.
    rows : sequence of Row
        Of a manifest or receipt, in any order; they are yielded in it. Rows in pack order are read best.

    Raises
    ------
    DamageError
        A pack is missing.
    StoreError
        A pack is shorter than it must be, or cannot be read.
    """
    for window in record_windows(store, rows, [Room()]):
        yield from window


def record_windows(store: SourceStore, rows: Sequence[Row], rooms: Sequence[Room]) -> Generator[list[Record]]:
    """Yield what `read_records` does, as it is read; each lasts until as many more were asked for as there are rooms.

    Raises
    ------
    DamageError
        A pack is missing.
    StoreError
        A pack is shorter than it must be, or cannot be read.
    """
    turns = cycle(rooms)
    for window in _windows(rows):
        place = Place.of(window[0])
        pack = ObjectInfo(pack_key(place.pack), place.pack_bytes, "")
        room = next(turns)
        room.clear()
        places = map(Place.of, window)
        try:
            records = store.get_ranges(pack, [(place.offset, place.end) for place in places], room)
        except NotFoundError as error:  # a manifest or receipt names it: the archive is not what it was
            step = "restore the pack from another copy, or archive again"
            raise DamageError("a pack that is named", "none", pack.key, step) from error
        yield list(zip(window, records, strict=True))


def _windows(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Cut rows into those that are worth reading in one go."""
    window: list[Row] = []
    start, last = 0, None
    for row in rows:
        place = Place.of(row)
        if last is not None and not last.joins(place, start):
            yield window
            window = []
        if not window:
            start = place.offset
        window.append(row)
        last = place
    if window:
        yield window


@dataclass(frozen=True, slots=True)
class Place:
    """Where the record of a row lies."""

    pack: bytes
    pack_bytes: int
    offset: int
    end: int

    @classmethod
    def of(cls, row: Row) -> Self:
        """Return the place of a row that has one. Raises FormatError for a row of a plan."""
        if row.pack is None or row.pack_bytes is None or row.pack_offset is None or row.stored_bytes is None:
            raise FormatError("a row with a pack", "none", row.where)
        return cls(row.pack, row.pack_bytes, row.pack_offset, row.pack_offset + row.stored_bytes)

    def joins(self, after: Place, window_start: int) -> bool:
        """Whether `after` is worth reading in one go with a window that ends here."""
        repeated = (self.offset, self.end) == (after.offset, after.end)
        near = repeated or 0 <= after.offset - self.end <= GAP_BYTES
        return after.pack == self.pack and near and after.end - window_start <= WINDOW_BYTES


class PackBooks:
    """Codebooks of packs, read from the end of a pack when a record of it first needs one.

    Parameters
    ----------
    store : SourceStore
        The archive.
    """

    def __init__(self, store: SourceStore) -> None:
        self._store = store
        self._kept: tuple[bytes, Books] | None = None

    def of(self, row: Row) -> Books | None:
        """Return the codebooks of the pack of `row`, None where its program names none; the last pack's are kept.

        Raises
        ------
        DamageError, UnsupportedError
            They are not codebooks.
        StoreError
            The pack cannot be read.
        """
        if row.program is not None and f"{Fixed.name}[" not in row.program:
            return None
        place = Place.of(row)
        kept = self._kept  # looked at once: threads may share these books
        if kept is None or kept[0] != place.pack:
            kept = self._kept = place.pack, self._read(place)
        return kept[1]

    def _read(self, place: Place) -> Books:
        pack = ObjectInfo(pack_key(place.pack), place.pack_bytes, "")
        tail_start = max(0, place.pack_bytes - BOOKS_READ_BYTES)
        tail = self._store.get_ranges(pack, [(tail_start, place.pack_bytes)])[0]
        start, stop = books_range(tail[-PACK_FOOTER_BYTES:], place.pack_bytes)
        if stop - start > MAX_BOOKS_BYTES:
            raise LimitError(f"codebooks of at most {MAX_BOOKS_BYTES} bytes", str(stop - start), pack.key)
        if start < tail_start:
            return Books.from_bytes(self._store.get_ranges(pack, [(start, stop)])[0])
        return Books.from_bytes(tail[start - tail_start : stop - tail_start])


def pack_key(pack: bytes) -> str:
    """Return the key of the pack with this digest."""
    name = pack.hex()
    return f"packs/{name[:2]}/{name}"
