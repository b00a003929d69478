"""Restoring: whole files, or one tensor as a safetensors file. Needs a store and `operators`, no search.

A file appears under its key only when every segment had the digest that the manifest promises. Files are
independent items, so that any executor can restore many at once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from threading import Lock

import numpy as np
from blake3 import blake3

from operators.errors import DamageError, ExistsError, FormatError, NotFoundError, NothingMatchedError, UsageError
from operators.run import execute
from pipeline.ahead import ahead
from pipeline.packs import read_records, record_windows
from pipeline.plan import matches
from pipeline.rows import Row
from pipeline.segments import Tensor, tensors_of
from pipeline.segments.header import HEADER_BYTES_MAX
from pipeline.snapshots import FileEntry, Snapshot
from pipeline.store import ObjectInfo, Room, SourceStore, Store, open_source, open_store

COMPARE_BYTES = 8 << 20
"""Part of an existing file that is compared at once."""
SMALL_BYTES = 1 << 20
"""A file up to this size is restored in one thread."""
HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class RestoreItem:
    """One file: its entry in the snapshot, and its rows in order of offset."""

    entry: FileEntry
    rows: tuple[Row, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return self.entry.n_bytes


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

    def __call__(self, item: RestoreItem) -> Restored:
        """Restore one file.

        Raises
        ------
        ExistsError
            Another file of that name is there.
        DamageError, StoreError
            A segment cannot be restored; nothing appears under the name.
        """
        entry = item.entry
        check_file(entry, item.rows)
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

    def _segments(self, item: RestoreItem) -> Iterator[memoryview]:
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

    def _is_same(self, existing: ObjectInfo, item: RestoreItem) -> bool:
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


class Decoder:
    """Decodes segments of an archive into one reused buffer.

    Parameters
    ----------
    archive : SourceStore
    """

    def __init__(self, archive: SourceStore) -> None:
        self._archive = archive
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

    def decode(self, row: Row, record: memoryview) -> memoryview:
        """Return the bytes of a segment; they are valid until the next call.

        Raises
        ------
        DamageError
            The record is damaged, or not that of the row; the message names file and tensor.
        """
        if self._buffer.size < row.n_bytes:
            self._buffer = np.empty(row.n_bytes, np.uint8)
        data = self._buffer[: row.n_bytes]
        try:
            execute(record, n_bytes=row.n_bytes, digest=row.digest, out=data)
        except DamageError as error:
            raise type(error)(error.expected, error.found, row.where, error.next_step) from error
        return data.data


def check_file(entry: FileEntry, rows: Sequence[Row]) -> None:
    """Check that `rows` are those of the file that the snapshot promises.

    Raises
    ------
    FormatError
        Their digests do not give the digest of the file.
    """
    hasher = blake3()
    for row in rows:
        hasher.update(row.n_bytes.to_bytes(8, "little") + (row.digest or b""))
    if hasher.hexdigest() != entry.digest:
        raise FormatError(f"segments of the file {entry.digest}", hasher.hexdigest(), entry.key, "verify the manifest")


def check_files(snapshot: Snapshot, rows: Sequence[Row]) -> None:
    """Check every file of a snapshot with `check_file`; `rows` are those of its manifest."""
    for item in items_of(snapshot, rows) if snapshot.files else ():
        check_file(item.entry, item.rows)


def items_of(
    snapshot: Snapshot, rows: Sequence[Row], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> list[RestoreItem]:
    """Return the files of a snapshot that the filters leave, each with its rows.

    Raises
    ------
    NothingMatchedError
        None is left.
    """
    by_file = {key: tuple(group) for key, group in groupby(rows, lambda row: row.file)}
    items = [
        RestoreItem(entry, by_file.get(entry.key, ()))
        for entry in snapshot.files
        if (not include or matches(entry.key, include)) and not matches(entry.key, exclude)
    ]
    if not items:
        found = f"none of {len(snapshot.files)}"
        raise NothingMatchedError("at least one file", found, snapshot.name, "see `brevis info`")
    return items


# -- one tensor ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor, the file that holds it, and the rows that its bytes touch."""

    item: RestoreItem
    tensor: Tensor
    rows: tuple[Row, ...]


def find_tensor(archive: SourceStore, items: Sequence[RestoreItem], name: str) -> FoundTensor:
    """Find the tensor that a user names as ``NAME`` or ``FILE:NAME``.

    Raises
    ------
    UsageError
        No file or several files have it.
    FormatError
        The header of a file is damaged, or the tensor would end beyond its file.
    """
    decoder = Decoder(archive)
    found = []
    for item in items:
        if item.entry.format != "safetensors":
            continue
        prefix = f"{item.entry.key}:"
        wanted = {name, name.removeprefix(prefix)} if name.startswith(prefix) else {name}
        found += [(item, tensor) for tensor in tensors_of(read_header(decoder, item)) if tensor.name in wanted]
    if len(found) != 1:
        files = ", ".join(sorted({item.entry.key for item, _ in found}))
        hint = f"name one as FILE:NAME: {files}" if found else "see `brevis info`"
        raise UsageError("one tensor of that name", str(len(found)), name, hint)
    item, tensor = found[0]
    if tensor.end > item.n_bytes:
        raise FormatError(f"a tensor that ends at {item.n_bytes} or before", f"{tensor.end}", item.entry.key)
    touched = [row for row in item.rows if row.offset_bytes < tensor.end and row.segment.end_bytes > tensor.begin]
    return FoundTensor(item, tensor, tuple(touched))


def read_header(decoder: Decoder, item: RestoreItem) -> bytes:
    """Return the header of a safetensors file, its length included, from the first rows alone.

    Raises
    ------
    FormatError
        It would be longer than the file or than any header; nothing more is decoded.
    """
    header = bytearray()
    most_bytes = min(item.n_bytes, HEADER_LENGTH_BYTES + HEADER_BYTES_MAX)
    for _, data in decoder.segments(item.rows):
        header += data
        if len(header) < HEADER_LENGTH_BYTES:
            continue
        n_bytes = HEADER_LENGTH_BYTES + int.from_bytes(header[:HEADER_LENGTH_BYTES], "little")
        if n_bytes > most_bytes:
            raise FormatError(f"a header that ends at {most_bytes} or before", f"{n_bytes}", item.entry.key)
        if len(header) >= n_bytes:
            return bytes(header[:n_bytes])
    raise FormatError("a header", f"{len(header)} bytes", item.entry.key)


def range_bytes(archive: SourceStore, rows: Iterable[Row], begin: int, end: int) -> Iterator[memoryview]:
    """Yield bytes `begin` to `end` of a file in order; only the segments that hold some of them are read.

    Parameters
    ----------
    archive : SourceStore
    rows : iterable of Row
        Of the file, in order.
    begin, end : int

    Yields
    ------
    memoryview
        Valid until the next one is asked for.
    """
    touched = [row for row in rows if row.offset_bytes < end and begin < row.offset_bytes + row.n_bytes]
    for row, data in Decoder(archive).segments(touched):
        yield data[max(begin - row.offset_bytes, 0) : min(end - row.offset_bytes, row.n_bytes)]


def tensor_bytes(archive: SourceStore, found: FoundTensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; each part is valid until the next one is asked for."""
    return range_bytes(archive, found.rows, found.tensor.begin, found.tensor.end)


def write_tensor(archive: SourceStore, target: Store, key: str, found: FoundTensor, *, overwrite: bool) -> int:
    """Write a tensor as a safetensors file of its own; return the bytes of the tensor.

    Raises
    ------
    FormatError
        The segments do not give all bytes of the tensor; nothing appears under the key.
    """
    tensor = found.tensor
    n_bytes = tensor.end - tensor.begin
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
            raise FormatError(f"{n_bytes} bytes of a tensor", f"{n_bytes - left_bytes}", found.item.entry.key)
        writer.commit()
    return n_bytes
