"""What can be made again of an archive that has lost its small objects: manifests, and commits.

A manifest is the rows of its run's receipts in order, or those that packs tell (`pipeline.salvage`), so that it comes
out with the digest that the snapshot names. A commit alone knew the generations of its files, the empty ones, and what
had failed; files without one are committed again as the next snapshot of a checkpoint, with what their rows tell.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from blake3 import blake3

from operators.errors import ArchiveNotFoundError, DamageError, DigestError, NotFoundError
from pipeline.archive import (
    ROWS_BYTES_MAX,
    check_tiles,
    checkpoints,
    each,
    each_snapshot,
    manifest_bytes,
    manifest_key,
    missing_packs,
    pack_sizes,
    plan_key,
    receipt_key,
)
from pipeline.canonical import digest_of_json
from pipeline.commit import Draft, commit, find_base, find_headers, to_manifest
from pipeline.keys import key_order
from pipeline.packs import pack_key
from pipeline.parquet import from_parquet
from pipeline.plan import Finding
from pipeline.rows import Row, Rows
from pipeline.salvage import Packs
from pipeline.snapshots import Snapshot
from pipeline.store import Headers, ObjectInfo, SourceStore, Store

_RUN = re.compile(r"runs/([0-9a-f]{64})/receipts/.")


@dataclass(frozen=True, slots=True)
class Found:
    """What is left of a run, of a snapshot, or of all that packs hold.

    Attributes
    ----------
    run : str
    files : tuple of ObjectInfo
        The files that are whole; their generation in the source is not known.
    rows : tuple of Row
        In the order of a manifest.
    failures : tuple of Finding
        Files that are not whole: receipts or packs are gone, or were never written.
    """

    run: str
    files: tuple[ObjectInfo, ...]
    rows: tuple[Row, ...]
    failures: tuple[Finding, ...]

    @classmethod
    def of(
        cls, store: SourceStore, run: str, rows: Sequence[Row], failures: Iterable[Finding], empty: Iterable[str] = ()
    ) -> Found:
        """Take what is known of a run; files of `rows` whose packs are gone have failed."""
        lost = {finding.key: finding for finding in failures}
        missing = {finding.key for finding in missing_packs(store, pack_sizes(rows))}
        for row in rows:
            if pack_key(row.pack or b"") in missing:
                lost.setdefault(row.file, Finding(row.file, "lost_pack", f"{pack_key(row.pack or b'')} is gone"))
        sizes = _sizes(rows) | dict.fromkeys(empty, 0)
        files = tuple(ObjectInfo(key, n_bytes, "") for key, n_bytes in sizes.items() if key not in lost)
        return cls(run, files, tuple(rows), tuple(sorted(lost.values(), key=lambda finding: finding.key)))


def rebuild_manifest(store: Store, snapshot: Snapshot, packs: Packs) -> None:
    """Write the manifest of a snapshot again, from the receipts of its run, or else from packs.

    Raises
    ------
    NotFoundError
        Receipts are gone, and packs do not hold all files, which are named.
    DigestError
        The rows make another manifest: files were stored more than once, or another library wrote it.
    """
    key = manifest_key(snapshot.manifest)
    wanted = {entry.key for entry in snapshot.files}
    found: Sequence[Row] = ()
    with contextlib.suppress(DamageError):
        found = _receipts(store, snapshot.run).of_files(wanted)
    data = to_manifest(found)
    if blake3(data).hexdigest() != snapshot.manifest:
        found, lost = packs.of_snapshot(snapshot, found)
        step = f"restore it from another copy; or --snapshot {snapshot.name} --name CHECKPOINT commits what is whole"
        if lost:
            names = f"{len(lost)} that are not: {', '.join(finding.key for finding in lost)[:400]}"
            raise NotFoundError("files whole in receipts or packs", names, key, step)
        data = to_manifest(found)
        if blake3(data).hexdigest() != snapshot.manifest:
            raise DigestError("rows of the manifest that the snapshot names", "others", key, step)
    store.put(key, data)
    manifest_bytes(store, snapshot)  # reads it back


def found_of_snapshot(store: SourceStore, snapshot: Snapshot, packs: Packs) -> Found:
    """Return what receipts and packs hold of the files of a snapshot, each with the digest that it names."""
    rows: Sequence[Row] = ()
    with contextlib.suppress(DamageError):
        rows = _receipts(store, snapshot.run)
    rows, lost = packs.of_snapshot(snapshot, rows)
    empty = [entry.key for entry in snapshot.files if not entry.n_bytes]
    return Found.of(store, snapshot.run, rows, [*snapshot.failures, *lost], empty)


def found_in_packs(store: SourceStore, packs: Packs) -> Found:
    """Return the files that packs hold whole, and once."""
    rows, lost = packs.whole_files()
    names = sorted({pack_key(row.pack or b"") for row in rows})
    return Found.of(store, digest_of_json(["packs", names]), rows, lost)


def lost_runs(store: SourceStore) -> list[str]:
    """Return the runs with receipts that no readable snapshot names."""
    named = set()
    for checkpoint, numbers in checkpoints(store).items():
        for _, snapshot in each_snapshot(store, checkpoint, numbers):
            if not isinstance(snapshot, DamageError):  # else its run is lost, until it is restored
                named.add(snapshot.run)
    found = {match[1] for info in store.list("runs/") if (match := _RUN.match(info.key))}
    return sorted(found - named)


def find_lost(store: SourceStore, run: str) -> Found:
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
    planned = _sizes(_plan(store, run))
    failures = []
    for (key,), mine in rows.by("file"):
        try:
            check_tiles({key: planned.get(key, mine[-1].end_bytes)}, mine, "receipts")
        except DamageError as error:
            failures.append(Finding(key, "lost_receipt", str(error)))
    known = {row.file for row in rows}
    failures += [Finding(key, "lost_receipt", "none of its segments") for key in planned if key not in known]
    return Found.of(store, run, rows, failures)


def commit_found(store: Store, found: Found, checkpoint: str, writer: str, time: str) -> Snapshot:
    """Commit what is whole as the next snapshot of a checkpoint.

    Raises
    ------
    ArchiveError
        As `commit` does; NotFoundError where no file is whole.
    """
    if not found.files:
        raise NotFoundError("a file that is whole", "none", f"runs/{found.run}", "restore packs from another copy")
    base = find_base(store, checkpoint).seq
    infos = [*found.files, *(ObjectInfo(finding.key, 0, "") for finding in found.failures)]
    inventory = tuple(sorted(infos, key=key_order))
    # No recipe that a run has: the next one must not take this snapshot, whose generations are unknown, for its own.
    recipe = digest_of_json("rebuilt")
    draft = _FoundDraft(
        checkpoint, base, recipe, inventory, found.failures, writer, headers=_headers(store, found), known_run=found.run
    )
    return commit(store, draft, found.rows, lambda: found.files, time)


@dataclass(frozen=True, slots=True)
class _FoundDraft(Draft):
    """A draft of a run whose inventory is not the one that named it."""

    known_run: str = ""

    @property
    def run(self) -> str:
        return self.known_run


def _receipts(store: SourceStore, run: str) -> Rows:
    """Return the rows of all receipts of a run, each segment once, in the order of a manifest."""
    keys = [info.key for info in store.list(receipt_key(run, ""))]
    found = Rows.joined(each(lambda key: from_parquet(store.get(key, max_bytes=ROWS_BYTES_MAX), key), keys)).ordered()
    places = [(None, None), *found.values("file", "offset_bytes")]
    return found.where(mine != before for before, mine in pairwise(places))


def _plan(store: SourceStore, run: str) -> Rows:
    try:
        return from_parquet(store.get(plan_key(run), max_bytes=ROWS_BYTES_MAX), plan_key(run))
    except (NotFoundError, DamageError):
        return Rows()  # it only tells which files were to come


def _headers(store: SourceStore, found: Found) -> Mapping[str, Headers]:
    try:
        return find_headers(store, found.run)
    except DamageError:
        return {}  # the bytes are worth more


def _sizes(rows: Iterable[Row]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.file] = max(sizes.get(row.file, 0), row.end_bytes)
    return sizes
