"""Restoring: whole files, or one tensor as a safetensors file. Needs a store and `operators`, no search.

The unit of work is a stretch of a file. A file that is one stretch is written by one worker. A larger one is staged
(`Store.stage`), its stretches are written by any workers in any order, and the driver publishes it once all are there.
A stretch is there when each of its segments had the digest that the manifest promises; so a file appears under its
key whole and right, or not at all.
"""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
from blake3 import blake3

from operators.errors import ArchiveError, ExistsError, FormatError, NotFoundError
from operators.limits import RECORD_BYTES, SEGMENT_BYTES
from pipeline.executors import Executor, Outcome, each_attempt
from pipeline.locations import open_source, open_store
from pipeline.reading import (
    HEADER_LENGTH_BYTES,
    REQUESTS,
    ArchivedFile,
    Decoder,
    FoundTensor,
    check_file,
    range_bytes,
    records_ahead,
)
from pipeline.rooms import Room
from pipeline.rows import spans_of
from pipeline.store import Data, ObjectInfo, SourceStore, Staged, Store, Stretch

COMPARE_BYTES = 8 << 20
"""Part of an existing file that is compared at once."""
MAX_STRETCHES = 4096
"""About so many stretches at most are restored, whatever the size of the files."""
STEPPED_STRETCHES = 4
"""How much longer stretches are where they cannot end with a segment: two neighbours then decode the one between."""


@dataclass(frozen=True, slots=True)
class RestoreItem:
    """A stretch of a file.

    Attributes
    ----------
    file : ArchivedFile
        With the rows that hold some of the stretch.
    begin, end : int
        Bytes of the file.
    staged : Staged or None
        What it is written to; None where it is a whole file, which is then published too.
    existing : ObjectInfo or None
        The file that is there, to be compared with the stretch; nothing is written then.
    """

    file: ArchivedFile
    begin: int
    end: int
    staged: Staged | None = None
    existing: ObjectInfo | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the stretch."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of an item; `identical` means that the bytes were there already and were left alone."""

    identical: bool
    stretches: tuple[Stretch, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreJob:
    """What a worker needs to restore files."""

    archive_url: str
    target_url: str
    storage_options: Mapping[str, str]
    overwrite: bool

    def open(self) -> Restorer:
        """Open the archive and the target."""
        return Restorer(open_source(self.archive_url, self.storage_options), self.open_target(), self.overwrite)

    def open_target(self) -> Store:
        """Open the target."""
        return open_store(self.target_url, self.storage_options)


# -- workers ------------------------------------------------------------------------------------


class Restorer:
    """Restores stretches of files, and whole files.

    Called from several threads it works on as many items and decodes for one of them: the others read and write.

    Parameters
    ----------
    archive : SourceStore
    target : Store
    overwrite : bool
        Replace files that are there and differ.
    """

    def __init__(self, archive: SourceStore, target: Store, overwrite: bool) -> None:
        self._archive = archive
        self._target = target
        self._overwrite = overwrite
        self._decoding = Lock()
        self._idle: list[_Hand] = []

    def __call__(self, item: RestoreItem) -> Restored:
        """Restore one item.

        Raises
        ------
        ExistsError
            Another file of that name is there.
        DamageError, StoreError
            A segment cannot be restored; nothing appears under the name.
        """
        if item.existing is not None:
            return Restored(self._is_there(item, item.existing))
        if item.staged is not None:
            with self._data(item) as data:
                return Restored(False, self._target.write_stretch(item.staged, item.begin, item.end, data))
        key = item.file.entry.key
        existing = found_at(self._target, key)
        if existing is not None:
            if existing.n_bytes == item.n_bytes and self._is_there(item, existing):
                return Restored(True)
            refuse_other(key, overwrite=self._overwrite)
        with self._data(item) as data:
            entry = item.file.entry
            self._target.write(key, data, n_bytes=item.n_bytes, overwrite=self._overwrite, headers=entry.headers)
        return Restored(False)

    @contextlib.contextmanager
    def _data(self, item: RestoreItem) -> Iterator[Iterator[memoryview]]:
        """Give the bytes of an item; whatever becomes of them, no thread reads for it afterwards."""
        hand = self._idle.pop() if self._idle else _Hand(Decoder(self._archive))
        with contextlib.closing(self._decoded(item, hand)) as data:
            yield data
        self._idle.append(hand)

    def _decoded(self, item: RestoreItem, hand: _Hand) -> Generator[memoryview]:
        for row, record in records_ahead(self._archive, item.file.rows, hand.rooms):
            with self._decoding:
                data = hand.decoder.decode(row, record, hand.segment[: row.n_bytes])
            yield data[max(item.begin - row.offset_bytes, 0) : min(item.end - row.offset_bytes, row.n_bytes)]

    def _is_there(self, item: RestoreItem, existing: ObjectInfo) -> bool:
        for row in item.file.rows:
            hasher = blake3()
            end_bytes = row.end_bytes
            for start in range(row.offset_bytes, end_bytes, COMPARE_BYTES):
                part = self._target.get_ranges(existing, [(start, min(start + COMPARE_BYTES, end_bytes))])[0]
                hasher.update(part)
            if hasher.digest() != row.digest:
                return False
        return True


class _Hand:
    """What one thread decodes with: memory for the largest record and segment, which never grows."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.rooms = Room(RECORD_BYTES), Room(RECORD_BYTES)
        self.segment = np.empty(SEGMENT_BYTES, np.uint8)


def found_at(target: Store, key: str) -> ObjectInfo | None:
    """Return what is there under a key."""
    try:
        return target.head(key)
    except NotFoundError:
        return None


def refuse_other(key: str, *, overwrite: bool) -> None:
    """Refuse to replace another file, unless that is wanted."""
    if not overwrite:
        raise ExistsError("no other file of this name", "one that differs", key, "use --overwrite")


# -- the driver ---------------------------------------------------------------------------------


def restore_files(
    job: RestoreJob, files: Sequence[ArchivedFile], executor: Executor, retries: int, done: Callable[[int], None]
) -> Iterator[Outcome[ArchivedFile, Restored]]:
    """Yield what became of each file, in any order; of one that failed nothing is left.

    Parameters
    ----------
    job : RestoreJob
    files : sequence of ArchivedFile
    executor : Executor
        Runs the stretches.
    retries : int
        How often it is tried again to stage or to publish a file.
    done : callable
        Takes numbers of bytes as they are done.
    """
    target = job.open_target()
    stretch_bytes = max(SEGMENT_BYTES, sum(file.n_bytes for file in files) // MAX_STRETCHES)
    pending = {file.entry.key: _Pending(file, target, job.overwrite, stretch_bytes, retries) for file in files}
    try:
        while pending:  # twice, where files are replaced that were compared first
            items: list[RestoreItem] = []
            for begun in each_attempt(_Pending.begin, list(pending.values()), REQUESTS, retries):
                items += begun.result or ()
                if begun.error is not None:
                    file = pending.pop(begun.item.file.entry.key).file
                    done(file.n_bytes)
                    yield Outcome(file, None, begun.error)
            for outcome in executor.run(job, items):
                one = pending[outcome.item.file.entry.key]
                ended = one.take(outcome)
                if outcome.item.existing is None:
                    done(outcome.item.n_bytes)
                elif ended is not None:
                    done(one.file.n_bytes)
                if ended is not None:
                    del pending[one.file.entry.key]
                    yield ended
    finally:
        for one in pending.values():
            one.abandon()


class _Pending:
    """A file that is not restored yet."""

    def __init__(self, file: ArchivedFile, target: Store, overwrite: bool, stretch_bytes: int, retries: int) -> None:
        self.file = file
        self._key = file.entry.key
        self._target, self._overwrite = target, overwrite
        self._stretch_bytes, self._retries = stretch_bytes, retries
        self._existing: ObjectInfo | None = None
        """What is there is compared with it."""
        self._staged: Staged | None = None
        self._n_left = 0
        self._results: list[Restored] = []
        self._error: ArchiveError | None = None

    def begin(self) -> list[RestoreItem]:
        """Return what workers have to do now. Raises ArchiveError."""
        check_file(self.file)
        self._results = []
        items = self._items()
        self._n_left = len(items)
        return items

    def _items(self) -> list[RestoreItem]:
        whole = RestoreItem(self.file, 0, self.file.n_bytes)
        if whole.n_bytes <= self._stretch_bytes:
            return [whole]
        if self._existing is None and (existing := found_at(self._target, self._key)) is not None:
            if existing.n_bytes == whole.n_bytes:
                self._existing = existing
                return [replace(item, existing=existing) for item in cut(self.file, self._stretch_bytes)]
            refuse_other(self._key, overwrite=self._overwrite)
        self._existing = None  # or it was compared, and is replaced
        self._staged = staged = self._target.stage(
            self._key, n_bytes=whole.n_bytes, overwrite=self._overwrite, headers=self.file.entry.headers
        )
        if staged is None:
            return [whole]
        stretch_bytes = self._stretch_bytes * (1 if staged.step_bytes == 1 else STEPPED_STRETCHES)
        return [replace(item, staged=staged) for item in cut(self.file, stretch_bytes, staged.step_bytes)]

    def take(self, outcome: Outcome[RestoreItem, Restored]) -> Outcome[ArchivedFile, Restored] | None:
        """Take what became of an item; return what became of the file, once that is known."""
        self._n_left -= 1
        if outcome.result is not None:
            self._results.append(outcome.result)
        elif self._error is None:
            self._error = outcome.error
            self.abandon()  # so that its other items fail at once
        if self._n_left:
            return None
        ended: Outcome[Any, Restored | None] = Outcome(self, None, self._error)
        if self._error is None:
            [ended] = each_attempt(_Pending._end, [self], 1, self._retries)
        if ended.error is not None:
            self.abandon()  # once more: parts may have come after the first time
        elif ended.result is None:
            return None
        return Outcome(self.file, ended.result, ended.error)

    def _end(self) -> Restored | None:
        """Publish what was staged; None where all is to be done again, to replace what is there."""
        if self._staged is not None:
            self._target.publish(self._staged, [one for result in self._results for one in result.stretches])
            self._staged = None
            return Restored(False)
        if self._existing is None or all(result.identical for result in self._results):
            return self._results[0]
        refuse_other(self._key, overwrite=self._overwrite)
        return None

    def abandon(self) -> None:
        """Leave nothing of what was staged and not published."""
        if self._staged is not None:
            self._target.abandon(self._staged)


def cut(file: ArchivedFile, stretch_bytes: int, step_bytes: int = 1) -> Iterator[RestoreItem]:
    """Cut a file into stretches of at least `stretch_bytes`, at ends of segments, rounded up to a step."""
    begin, spans = 0, spans_of(file.rows)
    while begin < file.n_bytes:
        last = bisect_left(spans, begin + stretch_bytes, key=lambda span: span.end_bytes)
        end = spans[last].end_bytes if last < len(spans) else file.n_bytes
        end = min(-(-end // step_bytes) * step_bytes, file.n_bytes)
        yield RestoreItem(ArchivedFile(file.entry, file.touched(begin, end)), begin, end)
        begin = end


# -- tensors ------------------------------------------------------------------------------------


def tensor_bytes(archive: SourceStore, found: FoundTensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; each part is valid until the next one is asked for."""
    return range_bytes(archive, found.file, found.tensor.begin, found.tensor.end)


def write_tensor(archive: SourceStore, target: Store, key: str, found: FoundTensor, *, overwrite: bool) -> int:
    """Write a tensor as a safetensors file of its own, unless it is there; return the bytes of the tensor.

    Raises
    ------
    ExistsError
        Another file of that name is there.
    FormatError
        The segments do not give all bytes of the tensor; nothing appears under the key.
    """
    tensor, n_bytes = found.tensor, found.n_bytes
    entry = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [0, n_bytes]}
    text = json.dumps({tensor.name: entry}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text

    def parts() -> Iterator[Data]:
        yield head
        left_bytes = n_bytes
        for part in tensor_bytes(archive, found):
            left_bytes -= len(part)
            if left_bytes >= 0:
                yield part
        if left_bytes:
            raise FormatError(f"{n_bytes} bytes of a tensor", f"{n_bytes - left_bytes}", found.file.entry.key)

    file_bytes = len(head) + n_bytes
    existing = found_at(target, key)
    if existing is not None:
        if existing.n_bytes == file_bytes and _holds(target, existing, parts()):
            return n_bytes
        refuse_other(key, overwrite=overwrite)
    target.write(key, parts(), n_bytes=file_bytes, overwrite=overwrite)
    return n_bytes


def _holds(target: Store, existing: ObjectInfo, parts: Iterator[Data]) -> bool:
    """Whether what is there is these parts, one after another."""
    end = 0
    for part in parts:
        data = np.frombuffer(part, np.uint8)
        for start in range(0, data.size, COMPARE_BYTES):
            piece = data[start : start + COMPARE_BYTES]
            begin, end = end, end + piece.size
            if not np.array_equal(np.frombuffer(target.get_ranges(existing, [(begin, end)])[0], np.uint8), piece):
                return False
    return True
