"""One task, from source bytes to a stored pack: read, hash, synthesise, encode, decode, compare, put.

Everything a worker does is here, but for the records themselves, which `encoder.py` makes. A task may run any number
of times, anywhere: its pack is named by its bytes, its receipt is create-only, and whoever comes second adopts what is
stored.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from threading import Lock

import numpy as np

from operators.errors import ArchiveError, StoreError
from operators.limits import RECORD_BYTES, SEGMENT_BYTES
from operators.run import Encoded, digest_of
from operators.words import Bytes
from pipeline.ahead import ahead
from pipeline.carried import Carried, Settled
from pipeline.commit import adopt_receipt, find_receipt
from pipeline.encoder import Encoder, record_room
from pipeline.executors import may_retry, without_frames
from pipeline.locations import open_source, open_store
from pipeline.meters import timed
from pipeline.packs import PackSpool, pack_index, pack_key
from pipeline.plan import Part, Task
from pipeline.rooms import Room
from pipeline.rows import Row
from pipeline.store import Buffers, SourceStore, Store
from synth.options import SearchOptions
from synth.prior import Prior

Read = tuple[Row, memoryview]
"""A segment with its digest, and its bytes."""
RECORDS_BYTES = RECORD_BYTES
"""Records of a task that are held before they are written, for as long as each of its segments has room."""
READ_BYTES = SEGMENT_BYTES
"""Segments of one file are read together up to this many bytes."""
ROOM_BYTES = READ_BYTES + READ_BYTES // 8
"""What they take where each begins on a cache line."""
GATHERED_BYTES = 8 << 20
"""Small files make windows of up to so many bytes together."""


@dataclass(frozen=True, slots=True)
class ArchiveJob:
    """What a worker needs before its first task.

    Attributes
    ----------
    source_url, archive_url : str
    storage_options : mapping of str to str
        For both stores.
    run : str
        Id of the run, under which receipts are stored.
    options : SearchOptions
    prior : bytes
        The prior of the run, as stored with it.
    scratch_dir : str
        Where packs grow; empty lets the store choose (`Store.spool`).
    single_writer : bool
        The user promises that nobody else writes to the archive.
    as_of : str or None
        The time of the source, where that is not now.
    """

    source_url: str
    archive_url: str
    storage_options: Mapping[str, str]
    run: str
    options: SearchOptions
    prior: bytes
    scratch_dir: str
    single_writer: bool = False
    as_of: str | None = None

    def open(self) -> TaskWorker:
        """Open the stores and load the prior."""
        return TaskWorker(
            open_source(self.source_url, self.storage_options, versions=True, as_of=self.as_of),
            open_store(self.archive_url, self.storage_options, single_writer=self.single_writer),
            self.run,
            partial(Encoder, self.options, Prior.load(self.prior)),
            self.scratch_dir,
        )


@dataclass(frozen=True, slots=True)
class Receipt:
    """What came of a task.

    Attributes
    ----------
    rows : sequence of Row
        One per segment, in order, with the columns of the record.
    resumed : bool
        An earlier attempt had stored it.
    alarms : tuple of str
        Segments whose record did not decode to them; they are stored as plain bytes.
    failures : tuple of (str, ArchiveError)
        Files that could not be read, with why; the task has no receipt then, so that a rerun tries again.
    """

    rows: Sequence[Row]
    resumed: bool
    alarms: tuple[str, ...] = ()
    failures: tuple[tuple[str, ArchiveError], ...] = ()


class TaskWorker:
    """Runs tasks of one run against open stores.

    Called from several threads it works on as many tasks: while one is encoded, another is decoded and compared, read
    and hashed, or written and stored. A worker so keeps one CPU at work, whatever the stores take, and a second one
    that has nothing else to do.

    Parameters
    ----------
    source : SourceStore
    archive : Store
    run : str
    encoder : callable
        Returns one more `Encoder`; each task that is in work has one of its own.
    scratch_dir : str
    """

    def __init__(
        self, source: SourceStore, archive: Store, run: str, encoder: Callable[[], Encoder], scratch_dir: str
    ) -> None:
        self._source = source
        self._archive = archive
        self._run = run
        self._encoder = encoder
        self._scratch_dir = scratch_dir
        self._encoding, self._checking = Lock(), Lock()
        """One task is encoded at a time, and one is checked: memory for that is there once."""
        self._decoded = np.empty(SEGMENT_BYTES, np.uint8)
        self._idle: list[_Desk] = []

    def __call__(self, task: Task) -> Receipt:
        """Store `task` unless it is stored already.

        Raises
        ------
        ChangedError, NotFoundError, DeniedError, StoreError
            The source or the archive failed; nothing is left but perhaps a pack that nothing refers to.
        """
        stored = find_receipt(self._archive, self._run, task)
        if stored is not None:
            return Receipt(stored, True)
        desk = self._idle.pop() if self._idle else _Desk(self._encoder())
        desk.grow(max((segment.n_bytes for part in task.parts for segment in part.segments), default=0))
        try:
            return self._work(task, desk)
        finally:
            self._idle.append(desk)

    def _work(self, task: Task, desk: _Desk, *, may_book: bool = True, alarms: tuple[str, ...] = ()) -> Receipt:
        """Store a task, without codebooks where they do not pay; nobody uses its desk any more after this.

        `alarms` are those of an attempt before it: what failed once is told even where it does not fail again.
        """
        failures: dict[str, ArchiveError] = {}
        with (
            PackSpool(self._archive, self._scratch_dir, desk.records) as pack,
            closing(ahead(self._windows(task, desk.rooms, failures))) as windows,
        ):
            carried = Carried(is_open=may_book)
            rows = self._stored(desk.encoder, pack, windows, task.candidates, carried)
            # A file that failed midway has no rows; what it left in the pack may serve others.
            rows = [row for row in rows if row.file not in failures]
            index = pack_index(rows)
            pays = carried.pays(rows, index)
            if pays:
                digest = pack.finish(index, carried.books.to_bytes())
                if any(row.pack is None for row in rows):
                    with timed("store"):
                        self._archive.put(pack_key(digest), pack.whole)
        alarms = tuple(dict.fromkeys((*alarms, *desk.encoder.alarms)))
        if not pays:
            return self._work(task, desk, may_book=False, alarms=alarms)
        rows = [
            row
            if row.pack is not None
            else replace(row, stored_digest=pack.digests[row.pack_offset or 0], pack=digest, pack_bytes=pack.n_bytes)
            for row in rows
        ]
        if failures:
            return Receipt(rows, False, alarms, tuple(failures.items()))
        return Receipt(adopt_receipt(self._archive, self._run, task, rows), False, alarms)

    def _windows(self, task: Task, rooms: _Rooms, failures: dict[str, ArchiveError]) -> Generator[list[Read]]:
        """Yield segments as they are read, with their digests; a window lasts until the one after the next is made."""
        gathered: list[Read] = []
        n_bytes = 0
        for part in task.parts:
            if n_bytes + part.n_bytes > GATHERED_BYTES:
                if gathered:
                    yield gathered
                    rooms.turn()
                gathered, n_bytes = [], 0
            n_bytes += part.n_bytes
            rows = iter(part.rows(task.ordinal))
            try:
                for buffers in read_segments(self._source, part, repeat(rooms.current) if gathered else rooms):
                    gathered += [(next(rows).with_digest(digest_of(data)), data) for data in buffers]
                    if n_bytes > GATHERED_BYTES:
                        yield gathered
                        rooms.turn()
                        gathered = []
            except StoreError as error:
                if may_retry(error):
                    raise
                failures[part.info.key] = without_frames(error)
        if gathered:
            yield gathered

    def _stored(
        self,
        encoder: Encoder,
        pack: PackSpool,
        windows: Iterable[list[Read]],
        candidates: Iterable[Row],
        carried: Carried,
    ) -> list[Row]:
        """Append the record of each segment to `pack`; equal segments share that of the first, or of the base."""
        encoder.start()
        rows: list[Row] = []
        known = {row.digest or b"": row for row in candidates}

        unchecked: list[tuple[Row, memoryview, Bytes]] = []
        replaced: dict[bytes, Encoded] = {}

        def store(settled: Iterable[Settled]) -> None:
            for digest, encoded in settled:
                pack.room(len(encoded.record))  # what is held is checked now, if there is none, and not after this
                encoded = replaced.pop(digest, encoded)
                known[digest] = _with_record(known[digest], encoded, pack.add(encoded.record)[0])

        def check() -> None:
            """Decode and compare records; where one does not restore its segment, another is stored in its place."""
            held = unchecked.copy()
            unchecked.clear()
            with self._checking, timed("check"):
                others = [
                    (row.digest or b"", encoder.checked(row, data, record, self._decoded)) for row, data, record in held
                ]
            for digest, other in others:
                if other is not None and known[digest].pack_offset is None:
                    replaced[digest] = other  # it waits yet
                elif other is not None:
                    store([(digest, other)])

        pack.before_flush = check
        for window in windows:
            with self._encoding:
                for row, data in window:
                    assert row.digest is not None
                    rows.append(row)
                    if row.digest in known:
                        continue
                    known[row.digest] = row
                    with timed("encode"):
                        plain, _ = encoder.write(row, data, pack.room(record_room(len(data))))
                        booked = encoder.booked(row, data, plain) if carried.is_open else None
                    if booked is None and carried.is_idle:
                        offset, record = pack.add(plain.record)
                        known[row.digest] = _with_record(row, plain, offset)
                        unchecked.append((row, data, record))
                        continue
                    plain = replace(plain, record=bytes(plain.record))
                    if booked is None:
                        unchecked.append((row, data, plain.record))
                    elif booked[1].id not in carried.books:  # it may be stored without the book
                        plain = encoder.checked(row, data, plain.record) or plain
                    store(carried.settle(row.digest, plain, booked))
            check()
        store(carried.rest())
        return [_placed(row, known[row.digest or b""]) for row in rows]


class _Rooms(Iterator[Room]):
    """Two rooms by turns: one is read into while what lies in the other is used.

    Until a window is handed out, which is when they `turn`, it is the same one: a read that failed leaves it free.
    """

    def __init__(self) -> None:
        self.current, self._other = Room(ROOM_BYTES), Room(ROOM_BYTES)

    def __next__(self) -> Room:
        self.current.clear()
        return self.current

    def turn(self) -> None:
        """Take the other one, which nobody uses any more."""
        self.current, self._other = self._other, self.current


class _Desk:
    """What a task reads into, gathers its records in, and encodes with; the next one uses it again."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.rooms = _Rooms()
        self.records = np.empty(0, np.uint8)

    def grow(self, largest_bytes: int) -> None:
        """Make `records` large enough for the record of any segment."""
        n_bytes = max(record_room(largest_bytes), RECORDS_BYTES)
        if self.records.size < n_bytes:
            self.records = np.empty(n_bytes, np.uint8)


def _placed(row: Row, stored: Row) -> Row:
    """Return `row` with the record of an equal segment, or its own."""
    return replace(
        row,
        program=stored.program,
        stored_bytes=stored.stored_bytes,
        stored_digest=stored.stored_digest,
        pack=stored.pack,
        pack_bytes=stored.pack_bytes,
        pack_offset=stored.pack_offset,
    )


def _with_record(row: Row, encoded: Encoded, offset: int) -> Row:
    return replace(row, program=str(encoded.program), stored_bytes=len(encoded.record), pack_offset=offset)


def read_segments(source: SourceStore, part: Part, rooms: Iterator[Room]) -> Iterator[Buffers]:
    """Yield the bytes of the segments of a part, neighbours together, each time in the next of `rooms`."""
    window: list[tuple[int, int]] = []
    for segment in part.segments:
        if window and segment.end_bytes - window[0][0] > READ_BYTES:
            yield _read(source, part, window, next(rooms))
            window = []
        window.append((segment.offset_bytes, segment.end_bytes))
    yield _read(source, part, window, next(rooms))


def _read(source: SourceStore, part: Part, window: list[tuple[int, int]], room: Room) -> Buffers:
    with timed("read"):
        return source.get_ranges(part.info, window, room)
