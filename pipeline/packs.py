"""Packs: written to scratch disk first, put whole, read by ranges.

A pack never sits in memory: it grows in a file of the scratch directory, hashed as it grows, and is put
under the digest of its bytes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import zstandard
from blake3 import blake3

from operators.errors import FormatError, LimitError, StoreError
from operators.record import pack_footer, pack_header
from operators.words import Bytes
from pipeline.rows import Row, from_parquet, to_parquet
from pipeline.store import ObjectInfo, SourceStore

WINDOW_BYTES = 32 << 20
"""Stored bytes that are read ahead at once; a larger record is read alone."""
INDEX_LEVEL = 19
INDEX_BYTES_MAX = 1 << 30
"""Most bytes of an index as rows."""
GAP_BYTES = 1 << 20
"""Records this close together in a pack are read in one go."""


def pack_index(rows: Iterable[Row]) -> bytes:
    """Return the index of a pack: one zstandard frame of the rows, without what the records themselves say.

    Without the place in the plan too, so that a task that did not change is the same pack every night.
    """
    return zstandard.ZstdCompressor(level=INDEX_LEVEL).compress(to_parquet(map(index_row, rows)))


def index_row(row: Row) -> Row:
    """Return `row` as the index of its pack has it."""
    return replace(
        row,
        task=0,
        digest=None,
        program=None,
        stored_digest=None,
        expansions=None,
        pack=None,
        pack_bytes=None,
    )


def read_index(data: Bytes, where: str) -> list[Row]:
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
    """A pack on its way, in a file that is removed in the end.

    Parameters
    ----------
    scratch_dir : str
        Folder for the file; empty takes the temporary directory of the system.

    Raises
    ------
    StoreError
        From every method: the folder is missing or full.
    """

    def __init__(self, scratch_dir: str) -> None:
        with _room(scratch_dir or "the temporary directory", scratch_dir):
            handle, name = tempfile.mkstemp(".pack", "brevis-", scratch_dir or None)
        self.path = Path(name)
        self._file = os.fdopen(handle, "wb")
        self._hasher = blake3()
        self.n_bytes = 0
        self._append(pack_header())

    def add(self, record: Bytes) -> int:
        """Append a record; return its offset."""
        offset = self.n_bytes
        self._append(record)
        return offset

    def finish(self, index: bytes) -> bytes:
        """Append the index and the footer; return the digest of the pack."""
        offset = self.n_bytes
        self._append(index)
        self._append(pack_footer(offset, len(index)))
        with self._room():
            self._file.close()
        return self._hasher.digest()

    def _append(self, data: Bytes) -> None:
        with self._room():
            self._file.write(data)
        self._hasher.update(data)
        self.n_bytes += len(data)

    def _room(self) -> contextlib.AbstractContextManager[None]:
        return _room(str(self.path.parent), str(self.path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk again, in place of the error that tells of it
            self._file.close()
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def _room(folder: str, where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        found = error.strerror or str(error)
        step = "set run.scratch_dir to a folder with room"
        raise StoreError(f"room for a pack in {folder}", found, where, step) from error


def read_records(store: SourceStore, rows: Sequence[Row]) -> Iterator[tuple[Row, memoryview]]:
    """Yield each row with its record, reading neighbours of one pack together.

    Parameters
    ----------
    store : SourceStore
        The archive.
    rows : sequence of Row
        Of a manifest or receipt, in any order; they are yielded in it. Rows in pack order are read best.

    Raises
    ------
    StoreError
        A pack is missing or shorter than it must be.
    """
    first = 0
    while first < len(rows):
        place = Place.of(rows[first])
        window = [place]
        while first + len(window) < len(rows) and window[-1].joins(Place.of(rows[first + len(window)]), place.offset):
            window.append(Place.of(rows[first + len(window)]))
        pack = ObjectInfo(pack_key(place.pack), place.pack_bytes, "")
        records = store.get_ranges(pack, [(place.offset, place.end) for place in window])
        yield from zip(rows[first : first + len(window)], records, strict=True)
        first += len(window)


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


def pack_key(pack: bytes) -> str:
    """Return the key of the pack with this digest."""
    name = pack.hex()
    return f"packs/{name[:2]}/{name}"
