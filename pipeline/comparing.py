"""Comparing a snapshot with its source, under the generations that it names: verification that reads no pack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from operators.errors import ArchiveError, DigestError, NotFoundError
from operators.run import digest_of
from pipeline.locations import open_source
from pipeline.plan import Finding
from pipeline.rows import Row, Rows
from pipeline.snapshots import FileEntry
from pipeline.store import ObjectInfo, SourceStore
from pipeline.summary import Failed
from pipeline.verify import Verified

READ_BYTES = 64 << 20
"""Neighbouring segments are read together up to this many bytes."""


@dataclass(frozen=True, slots=True)
class SourceItem:
    """Neighbouring segments of one file, read at once."""

    info: ObjectInfo
    rows: Sequence[Row]

    @property
    def n_bytes(self) -> int:
        """Source bytes of the rows."""
        return sum(row.n_bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class SourceJob:
    """What a worker needs to compare segments with their source."""

    source_url: str
    storage_options: Mapping[str, str]

    def open(self) -> SourceComparer:
        """Open the source."""
        return SourceComparer(open_source(self.source_url, self.storage_options))


class SourceComparer:
    """Reads segments of the source, and compares their digests."""

    def __init__(self, source: SourceStore) -> None:
        self._source = source

    def __call__(self, item: SourceItem) -> Verified:
        """Compare; faults are returned, not raised."""
        try:
            ranges = [(row.offset_bytes, row.end_bytes) for row in item.rows]
            segments = self._source.get_ranges(item.info, ranges)
        except ArchiveError as error:
            return Verified(0, (Failed.of(item.info.key, error),))
        failures = []
        for row, data in zip(item.rows, segments, strict=True):
            found = digest_of(data)
            if found != row.digest:
                step = "keep this source: it is not what was archived"
                wrong = DigestError((row.digest or b"").hex(), found.hex(), row.where, step)
                failures.append(Failed.of(row.where, wrong))
        return Verified(len(item.rows) - len(failures), tuple(failures))


def source_items(entries: Iterable[FileEntry], rows: Rows) -> list[SourceItem]:
    """Return the segments of `entries` as they are to be read; `rows` in the order of a manifest, any left out."""
    infos = {entry.key: entry.current for entry in entries}
    files = rows.of_files(infos).by("file")
    return [SourceItem(infos[key], window) for (key,), group in files for window in _windows(group)]


def _windows(rows: Rows) -> Iterator[Rows]:
    first, start_bytes = 0, rows.at(0, "offset_bytes")[0]
    for index, (offset_bytes, n_bytes) in enumerate(rows.values("offset_bytes", "n_bytes")):
        if index > first and offset_bytes + n_bytes - start_bytes > READ_BYTES:
            yield rows[first:index]
            first, start_bytes = index, offset_bytes
    yield rows[first:]


def compare_listing(source: SourceStore, entries: Iterable[FileEntry]) -> tuple[list[Failed], list[Finding]]:
    """Return the archived files that the source lacks, and those of the source that are not archived."""
    now = {info.key for info in source.list()}
    known = {entry.key for entry in entries}
    lost = [
        Failed.of(key, NotFoundError("the archived file", "none", key, "the archive may hold its last copy"))
        for key in sorted(known - now)
    ]
    return lost, [Finding(key, "not_archived", "archive it before the source goes") for key in sorted(now - known)]
