"""Rows from packs alone, where receipts and manifests are gone. `ARCHIVE.md` says what packs cannot tell.

The index of a pack, and its records, give all that a manifest says of the segments of a task, but not to which version
of a file they belong, and nothing of a task that stored no record. What tells it is the digest of a file in a snapshot;
without one, a file is whole where packs hold one version of it that is cut as its own bytes say.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import cast

from blake3 import blake3

from operators.errors import ArchiveError, DamageError, DigestError, FormatError, UnsupportedError
from operators.limits import SEGMENT_BYTES
from operators.record import PACK_FOOTER_BYTES, PACK_HEADER_BYTES, index_range, take_record
from operators.run import digest_of
from pipeline.commit import file_entries
from pipeline.executors import each_attempt
from pipeline.keys import name_order
from pipeline.packs import SAMPLED, WINDOW_BYTES, Place, read_index
from pipeline.plan import Finding, Part
from pipeline.reading import ArchivedFile, check_file, range_of
from pipeline.rooms import Room
from pipeline.rows import Row
from pipeline.sampling import Fingerprints, sample_files
from pipeline.segments import layout_of
from pipeline.snapshots import FileEntry, Snapshot
from pipeline.store import Buffers, Dated, ObjectInfo, Range, SourceStore

READERS = 4
"""Packs that are read side by side, a window of each in memory."""
TILINGS = 1000
"""Most combinations of the versions of its segments that are tried for a file."""

_PACK = re.compile(r"packs/[0-9a-f]{2}/([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Told:
    """A row, and when the pack that tells it was written."""

    written: int
    row: Row


@dataclass(slots=True)
class Salvage:
    """What all packs of an archive tell.

    Attributes
    ----------
    told : dict of str to list of Told
        By file, of every version.
    ends : dict of int to dict of str to None
        The files that some segment ends at a place.
    faults : list of Finding
        Packs that could not be read.
    """

    told: dict[str, list[Told]] = field(default_factory=dict)
    ends: dict[int, dict[str, None]] = field(default_factory=dict)
    faults: list[Finding] = field(default_factory=list)

    def add(self, told: Told) -> None:
        """Take a row."""
        self.told.setdefault(told.row.file, []).append(told)
        self.ends.setdefault(told.row.end_bytes, {})[told.row.file] = None


class Packs:
    """The packs of an archive, read once, when they are first asked.

    Parameters
    ----------
    store : SourceStore
    """

    def __init__(self, store: SourceStore) -> None:
        self._store = store

    @cached_property
    def salvage(self) -> Salvage:
        """What they tell."""
        found = Salvage()
        packs = (item for item in self._store.dated("packs/") if _PACK.fullmatch(item.key))
        for outcome in each_attempt(lambda item: pack_rows(self._store, item), packs, READERS):
            if outcome.result is None:
                assert outcome.error is not None
                found.faults.append(Finding(outcome.item.key, outcome.error.kind, str(outcome.error)))
                continue
            for row in outcome.result:
                found.add(Told(outcome.item.written, row))
        return found

    def of_snapshot(self, snapshot: Snapshot, known: Iterable[Row] = ()) -> tuple[list[Row], list[Finding]]:
        """Return the rows of the files of a snapshot, and the files that packs do not hold whole.

        Parameters
        ----------
        snapshot : Snapshot
            The digests of its files tell one version from another.
        known : iterable of Row
            Of receipts that are left; they come first.
        """
        time = int(datetime.fromisoformat(snapshot.time).timestamp())
        given = Salvage()
        for row in known:
            given.add(Told(time, row))
        rows: list[Row] = []
        lost: list[Finding] = []
        for entry in snapshot.files:
            found = self._rows(entry, given, time) if entry.n_bytes else []
            if found is None:
                lost.append(Finding(entry.key, "lost_pack", "no packs hold all of its segments"))
            else:
                rows += self._with_fingerprints(found)
        return rows, lost

    def whole_files(self) -> tuple[list[Row], list[Finding]]:
        """Return the rows of the files that packs hold whole, and once, and why the others are not among them."""
        rows: list[Row] = []
        lost: list[Finding] = []
        for key in sorted(self.salvage.told, key=name_order):
            found = _once(self.salvage.told[key])
            fault = self._fault(key, found)
            if fault is None:
                rows += self._with_fingerprints(found)
            else:
                lost.append(fault)
        return rows, lost

    def _rows(self, entry: FileEntry, given: Salvage, time: int) -> list[Row] | None:
        """Return the rows of a file, or of another one of the same bytes, of the packs last written before `time`."""
        same_end = (*given.ends.get(entry.n_bytes, ()), *self.salvage.ends.get(entry.n_bytes, ()))
        for name in dict.fromkeys((entry.key, *same_end)):
            told = sorted(self.salvage.told.get(name, ()), key=lambda one: (one.written > time, -one.written))
            rows = [
                replace(one.row, file=entry.key)
                for one in (*given.told.get(name, ()), *told)
                if (one.row.format, one.row.reason) == (entry.format, entry.reason)
            ]
            for tiling in islice(_tilings(rows, entry.n_bytes), TILINGS):
                with contextlib.suppress(FormatError):
                    check_file(ArchivedFile(entry, tiling))
                    return list(tiling)
        return None

    def _fault(self, key: str, rows: Sequence[Row]) -> Finding | None:
        """Return why `rows`, in order, are not one file whole, as far as they tell."""
        end = 0
        for row in rows:
            if row.offset_bytes < end:
                return Finding(key, "ambiguous", f"several versions have bytes at {row.offset_bytes}")
            if row.offset_bytes > end:
                return Finding(key, "lost_pack", f"no pack holds bytes {end} to {row.offset_bytes}")
            end = row.end_bytes
        file = ArchivedFile(file_entries([ObjectInfo(key, end, "")], rows)[0], tuple(rows))
        try:
            layout = layout_of(lambda start, n_bytes: range_of(self._store, file, start, start + n_bytes), key, end)
        except ArchiveError as error:
            return Finding(key, error.kind, str(error))
        cut = (layout.format, layout.reason, layout.segments)
        if cut != (rows[0].format, rows[0].reason, tuple(row.segment for row in rows)):
            return Finding(key, "lost_pack", f"no pack holds what comes after byte {end}")
        if rows[-1].tensor is None and rows[-1].n_bytes == SEGMENT_BYTES:
            return Finding(key, "ambiguous", f"more may have come after byte {end}, where a segment is full")
        return None

    def _with_fingerprints(self, rows: list[Row]) -> list[Row]:
        """Return the rows of a file with the fingerprints that its run gave them."""
        if all(row.fingerprint != SAMPLED for row in rows):
            return rows
        info = ObjectInfo(rows[0].file, rows[-1].end_bytes, "")
        part = Part(info, rows[0].format, rows[0].reason, tuple(row.segment for row in rows))
        file = ArchivedFile(file_entries([info], rows)[0], tuple(rows))
        fingerprints = Fingerprints()
        for _ in fingerprints.watch(sample_files(cast("SourceStore", _Decoded(self._store, file)), [part])):
            pass
        found = fingerprints.of(part) or (None,) * len(rows)  # where it cannot be decoded, which others will tell
        return [replace(row, fingerprint=one) for row, one in zip(rows, found, strict=True)]


class _Decoded:
    """A file of the archive, for who samples a source."""

    def __init__(self, store: SourceStore, file: ArchivedFile) -> None:
        self._store = store
        self._file = file

    def get_ranges(self, _info: ObjectInfo, ranges: Sequence[Range], _room: Room | None = None) -> Buffers:
        """See `SourceStore.get_ranges`."""
        return [memoryview(range_of(self._store, self._file, start, stop)) for start, stop in ranges]


def pack_rows(store: SourceStore, pack: Dated) -> list[Row]:
    """Return the rows of the index of a pack, with what its records say; but for the index it is read once.

    Raises
    ------
    DamageError
        The pack has not the digest in its name, or it is none.
    StoreError
        It cannot be read.
    """
    info = ObjectInfo(pack.key, pack.n_bytes, "")
    digest = bytes.fromhex(pack.key.rpartition("/")[2])
    told: list[Row] = []
    own: list[Row] = []
    fault: ArchiveError | None = None
    try:
        for row in _index(store, info):
            (told if row.pack is not None else own).append(row)
        own = _in_turn([replace(row, pack=digest, pack_bytes=pack.n_bytes) for row in own])
    except (DamageError, UnsupportedError) as error:  # told only of a pack that has its digest
        own, fault = [], error
    hasher, start, waiting = blake3(), 0, deque(own)
    for stop in _stops(map(Place.of, own), pack.n_bytes):
        [data] = store.get_ranges(info, [(start, stop)])
        hasher.update(data)
        while waiting and (place := Place.of(waiting[0])).end <= stop:
            row, record = waiting.popleft(), data[place.offset - start : place.end - start]
            try:
                told.append(_told_by(record, row))
            except (DamageError, UnsupportedError) as error:
                fault = fault or error
        start = stop
    if hasher.digest() != digest:
        raise DigestError(digest.hex(), hasher.hexdigest(), pack.key, "restore the pack from another copy")
    if fault is not None:
        raise fault
    return told


def _index(store: SourceStore, info: ObjectInfo) -> Iterable[Row]:
    if info.n_bytes < PACK_HEADER_BYTES + PACK_FOOTER_BYTES:
        raise FormatError("a pack", f"{info.n_bytes} bytes", info.key)
    ends = [(0, PACK_HEADER_BYTES), (info.n_bytes - PACK_FOOTER_BYTES, info.n_bytes)]
    header, footer = store.get_ranges(info, ends)
    [index] = store.get_ranges(info, [index_range(header, footer, info.n_bytes)])
    return read_index(index, info.key)


def _in_turn(rows: Iterable[Row]) -> list[Row]:
    """Return rows in the order of their records, of which equal segments share one. Raises FormatError otherwise."""
    found = sorted(rows, key=lambda row: row.pack_offset or 0)
    last = (0, 0)
    for row in found:
        place = Place.of(row)
        if not (place.offset, place.end) == last and not last[1] <= place.offset <= place.end <= place.pack_bytes:
            raise FormatError("records one after the other", f"{place.offset} to {place.end}", row.where)
        last = (place.offset, place.end)
    return found


def _stops(places: Iterable[Place], n_bytes: int) -> Iterator[int]:
    """Yield where the pieces end in which a pack is read: each of about a window, and no record in two."""
    start = last = 0
    for offset, end in (*((place.offset, place.end) for place in places), (n_bytes, n_bytes)):
        if end - start > WINDOW_BYTES and last > start:
            yield (start := last)
        while offset - start > WINDOW_BYTES:
            yield (start := start + WINDOW_BYTES)
        last = end
    if start < n_bytes:
        yield n_bytes


def _told_by(data: memoryview, row: Row) -> Row:
    record = take_record(data)
    return replace(row, digest=record.digest, program=str(record.program), stored_digest=digest_of(data))


def _once(told: Iterable[Told]) -> list[Row]:
    """Return the rows that packs tell of a file in order; of equal segments at one place that of the newest pack."""
    found: dict[tuple[int, int, bytes | None], Row] = {}
    for one in sorted(told, key=lambda one: -one.written):
        found.setdefault((one.row.offset_bytes, one.row.n_bytes, one.row.digest), one.row)
    return sorted(found.values(), key=lambda row: row.offset_bytes)


def _tilings(rows: Iterable[Row], n_bytes: int) -> Iterator[tuple[Row, ...]]:
    """Yield every way to tile a file of `n_bytes` with `rows`, those that come first in the first ones."""
    starting: dict[int, dict[tuple[int, bytes | None], Row]] = {}
    for row in rows:
        starting.setdefault(row.offset_bytes, {}).setdefault((row.n_bytes, row.digest), row)
    leading = {n_bytes}
    """Places from which the end can be reached."""
    for start in sorted(starting, reverse=True):
        if any(row.end_bytes in leading for row in starting[start].values()):
            leading.add(start)
    path: list[Row] = []
    choices = [iter(starting.get(0, {}).values())]
    while choices:
        for row in choices[-1]:
            if row.end_bytes == n_bytes:
                yield (*path, row)
            elif row.end_bytes in leading:
                path.append(row)
                choices.append(iter(starting[row.end_bytes].values()))
                break
        else:
            choices.pop()
            del path[-1:]
