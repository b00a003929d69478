"""Verifying an archive without its source: what is damaged is named, and the rest is still looked at.

========== ==================================================================================
`manifest` snapshot and manifest have their digests, the rows tile the files, packs have their sizes
`bytes`    and every record and every pack has its digest
`decode`   and every record decodes to the digest of its segment
========== ==================================================================================

A part is chosen by the digest of the segments: the same segments on every machine, and T parts of T
cover everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from blake3 import blake3

from operators.errors import (
    ArchiveError,
    DamageError,
    DeniedError,
    DigestError,
    FormatError,
    InternalError,
    StoreError,
    UsageError,
)
from operators.record import PACK_FOOTER_BYTES, index_range, pack_header
from operators.run import digest_of
from pipeline.executors import Executor
from pipeline.locations import open_source
from pipeline.packs import WINDOW_BYTES, Place, pack_key, read_index, read_records
from pipeline.plan import Finding
from pipeline.reading import Decoder
from pipeline.rows import Row, Rows
from pipeline.store import ObjectInfo, SourceStore
from pipeline.summary import Failed

UNSEEN = frozenset((StoreError.kind, DeniedError.kind, InternalError.kind))
"""Reasons that say nothing of the archive: the store did not answer, or a worker died."""


@dataclass(frozen=True, slots=True)
class Part:
    """Slice `number` (1 to `total`) of all segments."""

    number: int
    total: int

    def has(self, digest: bytes | None) -> bool:
        """Whether the segment of this digest belongs to the slice."""
        return int.from_bytes((digest or b"")[:8], "little") % self.total == self.number - 1

    def of(self, rows: Rows) -> Rows:
        """Return the rows that belong to the slice."""
        return rows.where(self.has(digest) for (digest,) in rows.values("digest"))


@dataclass(frozen=True, slots=True)
class PackItem:
    """A pack and the rows of it that are to be checked.

    Attributes
    ----------
    rows : sequence of Row
        In the order of their offsets in the pack.
    whole : bool
        They are all, so that the index is checked against them.
    """

    rows: Sequence[Row]
    whole: bool

    @property
    def n_bytes(self) -> int:
        """Source bytes of the rows."""
        return sum(row.n_bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class Verified:
    """Segments that were checked and are right, and what was found."""

    segments: int
    failures: tuple[Failed, ...]


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """What a worker needs to verify packs."""

    archive_url: str
    storage_options: Mapping[str, str]
    level: str

    def open(self) -> Verifier:
        """Open the archive."""
        return Verifier(open_source(self.archive_url, self.storage_options), decode=self.level == "decode")


class Verifier:
    """Verifies packs. Called from several threads it reads as many, and decodes one segment at a time.

    Parameters
    ----------
    archive : SourceStore
    decode : bool
        Decode every record, beside comparing its digest.
    """

    def __init__(self, archive: SourceStore, *, decode: bool) -> None:
        self._archive = archive
        self._decode = decode
        self._turn = Lock()
        self._decoder = Decoder(archive)

    def __call__(self, item: PackItem) -> Verified:
        """Check a pack; faults are returned, not raised, and each row is looked at."""
        failures: list[Failed] = []
        hasher = blake3()
        end_bytes = 0
        for row, record in self._records(item.rows):
            place = Place.of(row)
            try:
                if isinstance(record, ArchiveError):
                    raise record
                self._check(row, record)
                if item.whole and place.offset >= end_bytes:  # equal segments share a record, hashed once
                    self._hash(hasher, place, end_bytes, place.offset)
                    hasher.update(record)
                    end_bytes = place.end
            except ArchiveError as error:
                failures.append(Failed.of(row.where, error))
        verified = len(item.rows) - len(failures)
        if item.whole and not failures:
            failures += self._frame(item.rows, hasher, end_bytes)
        return Verified(verified, tuple(failures))

    def _records(self, rows: Sequence[Row]) -> Iterator[tuple[Row, memoryview | ArchiveError]]:
        """Yield each row with its record; where a read fails, the rest is read one by one to name each loss."""
        done = 0
        try:
            for row, record in read_records(self._archive, rows):
                done += 1
                yield row, record
        except (DamageError, StoreError):
            for row in rows[done:]:
                try:
                    yield from read_records(self._archive, [row])
                except (DamageError, StoreError) as error:
                    yield row, error

    def _check(self, row: Row, record: memoryview) -> None:
        found = digest_of(record)
        if found != row.stored_digest:
            expected = (row.stored_digest or b"").hex()
            raise DigestError(f"a record {expected}", found.hex(), row.where, "restore the pack from another copy")
        if self._decode:
            with self._turn:
                self._decoder.decode(row, record)

    def _frame(self, rows: Sequence[Row], hasher: blake3, end_bytes: int) -> list[Failed]:
        """Check what a pack holds beside the records of `rows`: the index, and the digest of it all.

        The index is of the run that stored the pack. Other files, and other snapshots, may share its records.
        """
        place = Place.of(rows[0])
        key = pack_key(place.pack)
        try:
            self._hash(hasher, place, end_bytes, place.pack_bytes)
            if hasher.digest() != place.pack:
                raise DigestError(place.pack.hex(), hasher.hexdigest(), key, "restore the pack from another copy")
            footer = self._range(place, place.pack_bytes - PACK_FOOTER_BYTES, place.pack_bytes)
            index = read_index(self._range(place, *index_range(pack_header(), footer, place.pack_bytes)), key)
            columns = ("pack", "pack_offset", "stored_bytes", "n_bytes")
            known = {tuple(place) for pack, *place in index.values(*columns) if pack is None}
            for row in rows:
                if (row.pack_offset, row.stored_bytes, row.n_bytes) not in known:
                    raise FormatError("this record in the index of the pack", "none", f"{key}: {row.where}")
        except ArchiveError as error:
            return [Failed.of(key, error)]
        return []

    def _hash(self, hasher: blake3, place: Place, start: int, stop: int) -> None:
        """Hash a range of a pack that no row is about: its header, its index, records that others use."""
        for begin in range(start, stop, WINDOW_BYTES):
            hasher.update(self._range(place, begin, min(begin + WINDOW_BYTES, stop)))

    def _range(self, place: Place, start: int, stop: int) -> memoryview:
        info = ObjectInfo(pack_key(place.pack), place.pack_bytes, "")
        return self._archive.get_ranges(info, [(start, stop)])[0]


def pack_items(rows: Rows, part: Part | None, *, whole: bool) -> list[PackItem]:
    """Return the packs of `rows`, each with its rows that `part` leaves; `whole`: the rows are all of a manifest."""
    chosen = (rows if part is None else part.of(rows)).in_packs()
    return [PackItem(group, whole and part is None) for _, group in chosen.by("pack")]


def damaged_packs(job: VerifyJob, rows: Rows, executor: Executor) -> list[Finding]:
    """Read all packs of `rows`, those of a manifest; return those with a fault, each with its first.

    Raises
    ------
    StoreError
        One could not be read, which says nothing of it.
    """
    found = []
    for outcome in executor.run(job, pack_items(rows, None, whole=True)):
        if outcome.error is not None:
            raise outcome.error
        key = pack_key(Place.of(outcome.item.rows[0]).pack)
        failures = outcome.result.failures if outcome.result is not None else ()
        for failure in failures:
            if failure.reason in UNSEEN:
                raise StoreError("to read every pack", failure.message, key, "run again")
        found += [Finding(key, failure.reason, failure.message) for failure in failures[:1]]
    return sorted(found, key=lambda finding: finding.key)


def parse_part(text: str | None, sample: str | None) -> Part | None:
    """Return the slice that ``--part N/T`` or ``--sample P%`` means, None for everything.

    Raises
    ------
    UsageError
        Neither form, or both.
    """
    if text is not None and sample is not None:
        raise UsageError("--part or --sample", "both", "verify")
    if text is not None:
        number, separator, total = text.partition("/")
        if not (separator and number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)):
            raise UsageError("N/T with 1 <= N <= T", text, "--part")
        return Part(int(number), int(total))
    if sample is not None:
        percent = sample.removesuffix("%")
        if not (percent.isdecimal() and 1 <= int(percent) <= 100):
            raise UsageError("a whole number of percent from 1 to 100", sample, "--sample")
        return Part(1, max(1, round(100 / int(percent))))
    return None
