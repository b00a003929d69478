"""Packs: written to scratch disk first, put whole, read by ranges.

A pack never sits in memory: it grows in a file of the scratch directory, hashed as it grows, and is put
under the digest of its bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

from blake3 import blake3

from operators.record import pack_footer, pack_header
from operators.words import Bytes
from pipeline.store import ObjectInfo, SourceStore

WINDOW_BYTES = 32 << 20
"""Stored bytes that are read ahead at once; a larger record is read alone."""
GAP_BYTES = 1 << 20
"""Records this close together in a pack are read in one go."""


class Stored(Protocol):
    """Where a record lies: what both a manifest row and a receipt row say."""

    @property
    def pack(self) -> str: ...
    @property
    def pack_offset(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...


StoredT = TypeVar("StoredT", bound=Stored)


class PackSpool:
    """A pack on its way, in a file that is removed in the end.

    Parameters
    ----------
    scratch_dir : str
        Folder for the file; empty takes the temporary directory of the system.
    """

    def __init__(self, scratch_dir: str) -> None:
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

    def finish(self, index: bytes) -> str:
        """Append the index and the footer; return the digest of the pack in hexadecimal."""
        offset = self.n_bytes
        self._append(index)
        self._append(pack_footer(offset, len(index)))
        self._file.close()
        return self._hasher.hexdigest()

    def _append(self, data: Bytes) -> None:
        self._file.write(data)
        self._hasher.update(data)
        self.n_bytes += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


def read_records(store: SourceStore, rows: Sequence[StoredT]) -> Iterator[tuple[StoredT, memoryview]]:
    """Yield each row with its record, reading neighbours of one pack together.

    Parameters
    ----------
    store : SourceStore
        The archive.
    rows : sequence
        In any order; they are yielded in it, so rows that lie in pack order are read best.

    Raises
    ------
    StoreError
        A pack is missing or shorter than it must be.
    """
    first = 0
    while first < len(rows):
        window = [rows[first]]
        while first + len(window) < len(rows) and _joins(window, rows[first + len(window)]):
            window.append(rows[first + len(window)])
        pack = ObjectInfo(pack_key(window[0].pack), -1, "", None)
        ranges = [(row.pack_offset, row.pack_offset + row.stored_bytes) for row in window]
        yield from zip(window, store.get_ranges(pack, ranges), strict=True)
        first += len(window)


def _joins(window: Sequence[Stored], row: Stored) -> bool:
    """Whether `row` is worth reading in one go with `window`."""
    last = window[-1]
    gap = row.pack_offset - last.pack_offset - last.stored_bytes
    n_bytes = row.pack_offset + row.stored_bytes - window[0].pack_offset
    repeated = row.pack_offset == last.pack_offset
    return row.pack == last.pack and (repeated or 0 <= gap <= GAP_BYTES) and n_bytes <= WINDOW_BYTES


def pack_key(pack: str) -> str:
    """Return the key of the pack with this digest."""
    return f"packs/{pack[:2]}/{pack}"
