"""Restoring: whole files, or one tensor as a safetensors file. Needs a store and `operators`, no search.

A file appears under its key only when every segment had the digest that the manifest promises. Files are
independent items, so that any executor can restore many at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from threading import Lock

from blake3 import blake3

from operators.errors import ExistsError, FormatError, NotFoundError
from pipeline.ahead import ahead
from pipeline.packs import record_windows
from pipeline.reading import HEADER_LENGTH_BYTES, ArchivedFile, Decoder, FoundTensor, check_file, range_bytes
from pipeline.rows import Row
from pipeline.store import ObjectInfo, Room, SourceStore, Store, open_source, open_store

COMPARE_BYTES = 8 << 20
"""Part of an existing file that is compared at once."""
SMALL_BYTES = 1 << 20
"""A file up to this size is restored in one thread."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of a file; `identical` means that it was there already and was left alone."""

    segments: int
    identical: bool


@dataclass(frozen=True, slots=True)
class RestoreJob:
    """What a worker needs to restore files."""

    archive_url: str
    target_url: str
    storage_options: Mapping[str, str]
    overwrite: bool

    def open(self) -> Restorer:
        """Open the archive and the target."""
        return Restorer(
            open_source(self.archive_url, self.storage_options),
            open_store(self.target_url, self.storage_options),
            overwrite=self.overwrite,
        )


class Restorer:
    """Restores files.

    Called from several threads it works on as many files, but on one that is large at a time.

    Parameters
    ----------
    archive : SourceStore
    target : Store
    overwrite : bool
        Replace files that are there and differ.
    """

    def __init__(self, archive: SourceStore, target: Store, *, overwrite: bool) -> None:
        self._archive = archive
        self._target = target
        self._overwrite = overwrite
        self._large = Lock()
        self._rooms = (Room(), Room())
        self._decoders = (Decoder(archive), Decoder(archive))

    def __call__(self, item: ArchivedFile) -> Restored:
        """Restore one file.

        Raises
        ------
        ExistsError
            Another file of that name is there.
        DamageError, StoreError
            A segment cannot be restored; nothing appears under the name.
        """
        entry = item.entry
        check_file(item)
        existing = self._existing(entry.key)
        if existing is not None:
            if self._is_same(existing, item):
                return Restored(len(item.rows), True)
            if not self._overwrite:
                raise ExistsError("no other file of this name", "one that differs", entry.key, "use --overwrite")
        with self._target.create(entry.key, overwrite=self._overwrite, n_bytes=entry.n_bytes) as writer:
            with self._large if item.n_bytes > SMALL_BYTES else contextlib.nullcontext():
                for data in self._segments(item):
                    writer.write(data)
            writer.commit()
        return Restored(len(item.rows), False)

    def _segments(self, item: ArchivedFile) -> Iterator[memoryview]:
        """Yield the segments of a file; those of a large one are read and decoded while others are written."""
        if item.n_bytes <= SMALL_BYTES:
            return (data for _, data in Decoder(self._archive).segments(item.rows))
        return ahead(self._decoded(item.rows))

    def _decoded(self, rows: Sequence[Row]) -> Generator[memoryview]:
        decoders = cycle(self._decoders)
        for window in ahead(record_windows(self._archive, rows, self._rooms)):
            for row, record in window:
                yield next(decoders).decode(row, record)

    def _existing(self, key: str) -> ObjectInfo | None:
        try:
            return self._target.head(key)
        except NotFoundError:
            return None

    def _is_same(self, existing: ObjectInfo, item: ArchivedFile) -> bool:
        if existing.n_bytes != item.n_bytes:
            return False
        for row in item.rows:
            hasher = blake3()
            end_bytes = row.segment.end_bytes
            for start in range(row.offset_bytes, end_bytes, COMPARE_BYTES):
                part = self._target.get_ranges(existing, [(start, min(start + COMPARE_BYTES, end_bytes))])[0]
                hasher.update(part)
            if hasher.digest() != row.digest:
                return False
        return True


def tensor_bytes(archive: SourceStore, found: FoundTensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; each part is valid until the next one is asked for."""
    return range_bytes(archive, found.file, found.tensor.begin, found.tensor.end)


def write_tensor(archive: SourceStore, target: Store, key: str, found: FoundTensor, *, overwrite: bool) -> int:
    """Write a tensor as a safetensors file of its own; return the bytes of the tensor.

    Raises
    ------
    FormatError
        The segments do not give all bytes of the tensor; nothing appears under the key.
    """
    tensor, n_bytes = found.tensor, found.n_bytes
    entry = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [0, n_bytes]}
    text = json.dumps({tensor.name: entry}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.create(key, overwrite=overwrite, n_bytes=HEADER_LENGTH_BYTES + len(text) + n_bytes) as writer:
        writer.write(len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text)
        left_bytes = n_bytes
        for part in tensor_bytes(archive, found):
            writer.write(part)
            left_bytes -= len(part)
        if left_bytes:
            raise FormatError(f"{n_bytes} bytes of a tensor", f"{n_bytes - left_bytes}", found.file.entry.key)
        writer.commit()
    return n_bytes
