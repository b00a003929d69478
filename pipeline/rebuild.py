"""What can be made again of an archive that has lost small objects: manifests, and commits.

A manifest is the rows of its run's receipts in order, so that it comes out with the digest that the snapshot names. A
commit alone knew the generations of its files, the empty ones, and what had failed; a run without one is committed
again as the next snapshot of a checkpoint, with what its rows tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from blake3 import blake3

from operators.errors import ArchiveNotFoundError, DamageError, DigestError, NotFoundError
from pipeline.archive import (
    ROWS_BYTES_MAX,
    check_tiles,
    checkpoints,
    each,
    load_snapshot,
    manifest_bytes,
    manifest_key,
    missing_packs,
    pack_sizes,
    plan_key,
    receipt_key,
)
from pipeline.canonical import digest_of_json
from pipeline.commit import Draft, commit, find_base, to_manifest
from pipeline.packs import pack_key
from pipeline.plan import Finding
from pipeline.rows import Row, from_parquet, row_order
from pipeline.snapshots import Snapshot
from pipeline.store import ObjectInfo, SourceStore, Store

_RUN = re.compile(r"runs/([0-9a-f]{64})/receipts/.")


@dataclass(frozen=True, slots=True)
class LostRun:
    """A run that no snapshot names, as far as its objects tell.

    Attributes
    ----------
    run : str
    rows : tuple of Row
        In the order of a manifest.
    failures : tuple of Finding
        Files that are not whole: receipts or packs are gone, or were never written.
    """

    run: str
    rows: tuple[Row, ...]
    failures: tuple[Finding, ...]

    @property
    def files(self) -> list[ObjectInfo]:
        """The files that are whole; their generation in the source is not known."""
        failed = {finding.key for finding in self.failures}
        return [ObjectInfo(key, n_bytes, "") for key, n_bytes in _sizes(self.rows).items() if key not in failed]


def rebuild_manifest(store: Store, snapshot: Snapshot) -> None:
    """Write the manifest of a snapshot again, from the receipts of its run.

    Raises
    ------
    NotFoundError
        Receipts are gone.
    DigestError
        The receipts make another manifest: they are not all of this run, or another library wrote it.
    DamageError
        A receipt is damaged.
    """
    key = manifest_key(snapshot.manifest)
    wanted = {entry.key for entry in snapshot.files}
    found = [row for row in _receipts(store, snapshot.run) if row.file in wanted]
    try:
        check_tiles({entry.key: entry.n_bytes for entry in snapshot.files}, found, key)
    except DamageError as error:
        raise NotFoundError("the receipts of this snapshot", str(error), key, "restore it from another copy") from error
    data = to_manifest(found)
    if blake3(data).hexdigest() != snapshot.manifest:
        raise DigestError("rows of the manifest that the snapshot names", "others", key, "restore it from another copy")
    store.put(key, data)
    manifest_bytes(store, snapshot)  # reads it back


def lost_runs(store: SourceStore) -> list[str]:
    """Return the runs with receipts that no readable snapshot names."""
    named = set()
    for checkpoint, numbers in checkpoints(store).items():
        for seq in numbers:
            try:
                named.add(load_snapshot(store, checkpoint, seq).run)
            except (DamageError, ArchiveNotFoundError):
                continue  # its run is lost, until it is restored
    found = {match[1] for info in store.list("runs/") if (match := _RUN.match(info.key))}
    return sorted(found - named)


def find_lost(store: SourceStore, run: str) -> LostRun:
    """Look at what is left of a run.

    Raises
    ------
    ArchiveNotFoundError
        It has no receipts.
    DamageError
        A receipt is damaged.
    """
    rows = _receipts(store, run)
    if not rows:
        raise ArchiveNotFoundError("a run with receipts", "none", f"runs/{run}", "see `brevis rebuild ARCHIVE`")
    missing = {finding.key for finding in missing_packs(store, pack_sizes(rows))}
    planned = _sizes(_plan(store, run))
    failures = []
    for key, group in groupby(rows, lambda row: row.file):
        mine = list(group)
        try:
            check_tiles({key: planned.get(key, mine[-1].segment.end_bytes)}, mine, "receipts")
        except DamageError as error:
            failures.append(Finding(key, "lost_receipt", str(error)))
            continue
        if any(pack_key(row.pack or b"") in missing for row in mine):
            failures.append(Finding(key, "lost_pack", "a pack of it is gone"))
    known = {row.file for row in rows}
    failures += [Finding(key, "lost_receipt", "none of its segments") for key in planned if key not in known]
    return LostRun(run, tuple(rows), tuple(sorted(failures, key=lambda finding: finding.key)))


def commit_lost(store: Store, lost: LostRun, checkpoint: str, writer: str, time: str) -> Snapshot:
    """Commit what is whole of a run as the next snapshot of a checkpoint.

    Raises
    ------
    ArchiveError
        As `commit` does; NotFoundError where no file is whole.
    """
    if not lost.files:
        raise NotFoundError("a file that is whole", "none", f"runs/{lost.run}", "restore packs from another copy")
    base = find_base(store, checkpoint).seq
    infos = [*lost.files, *(ObjectInfo(finding.key, 0, "") for finding in lost.failures)]
    inventory = tuple(sorted(infos, key=lambda info: info.key.encode("utf-8", "surrogateescape")))
    # No recipe that a run has: the next one must not take this snapshot, whose generations are unknown, for its own.
    recipe = digest_of_json("rebuilt")
    draft = _LostDraft(checkpoint, base, recipe, inventory, lost.failures, writer, known_run=lost.run)
    return commit(store, draft, lost.rows, lambda: lost.files, time)


@dataclass(frozen=True, slots=True)
class _LostDraft(Draft):
    """A draft of a run whose inventory is not the one that named it."""

    known_run: str = ""

    @property
    def run(self) -> str:
        return self.known_run


def _receipts(store: SourceStore, run: str) -> list[Row]:
    """Return the rows of all receipts of a run, each segment once, in the order of a manifest."""
    keys = [info.key for info in store.list(receipt_key(run, ""))]
    found: dict[tuple[str, int], Row] = {}
    for rows in each(lambda key: from_parquet(store.get(key, max_bytes=ROWS_BYTES_MAX), key), keys):
        for row in rows:
            found.setdefault((row.file, row.offset_bytes), row)
    return sorted(found.values(), key=row_order)


def _plan(store: SourceStore, run: str) -> list[Row]:
    try:
        return from_parquet(store.get(plan_key(run), max_bytes=ROWS_BYTES_MAX), plan_key(run))
    except (NotFoundError, DamageError):
        return []  # it only tells which files were to come


def _sizes(rows: Iterable[Row]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.file] = max(sizes.get(row.file, 0), row.segment.end_bytes)
    return sizes
