"""Runs and the commit. `ARCHIVE.md` is the norm.

Write-once objects go first, receipts second, the manifest third, the snapshot last. A crash at any point
leaves the archive as it was or as it was to become; whatever else was written is named by its content or
create-only, and the next run takes it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from operators.errors import (
    ConflictError,
    DamageError,
    DigestError,
    FormatError,
    LimitError,
    NotFoundError,
)
from pipeline.archive import (
    ROWS_BYTES_MAX,
    SNAPSHOT_BYTES_MAX,
    check_tiles,
    each,
    headers_key,
    load_snapshot,
    manifest_key,
    missing_packs,
    pack_sizes,
    plan_key,
    prior_key,
    put_once,
    receipt_key,
    snapshot_key,
    snapshot_numbers,
)
from pipeline.canonical import digest_of_json
from pipeline.condemned import spare
from pipeline.keys import key_order
from pipeline.packs import pack_key
from pipeline.parquet import content_digest, from_parquet, to_parquet
from pipeline.plan import Finding, Plan, Task, adopt
from pipeline.rows import SEGMENT_COLUMNS, Row, Rows
from pipeline.segments import Segment, layout_of
from pipeline.snapshots import (
    FileEntry,
    Snapshot,
    Totals,
    file_digest,
    from_json,
    headers_from_json,
    headers_to_json,
    inventory_digest,
)
from pipeline.store import Headers, ObjectInfo, SourceStore, Store
from pipeline.store_base import changed

PRIOR_BYTES_MAX = 64 << 20
UNCHANGED = "unchanged"
"""Name of the receipt of what a run did not read."""


# -- runs ---------------------------------------------------------------------------------------


def run_id(checkpoint: str, inventory: Iterable[ObjectInfo], recipe: str, base: int, apart: Sequence[str] = ()) -> str:
    """Return the id of a run: what is to be archived, how, and on top of what.

    Parameters
    ----------
    checkpoint : str
    inventory : iterable of ObjectInfo
        Keys relative to the source, in their order.
    recipe : str
        Digest of everything that decides bytes.
    base : int
        Number of the newest snapshot that the plan saw, 0 for none.
    apart : sequence of str
        As in `Draft`.
    """
    return digest_of_json([checkpoint, inventory_digest(inventory), recipe, base, list(apart)])


@dataclass(frozen=True, slots=True)
class Base:
    """The newest snapshot of a checkpoint.

    Attributes
    ----------
    seq : int
        Its number, 0 for none.
    snapshot : Snapshot or None
        None also where it cannot be read, which `fault` tells.
    fault : DamageError or None
    """

    seq: int
    snapshot: Snapshot | None
    fault: DamageError | None = None


def find_base(store: SourceStore, checkpoint: str) -> Base:
    """Return the newest snapshot of `checkpoint`; a damaged one is no base to stop at, but to go on from."""
    seq = max(snapshot_numbers(store, checkpoint), default=0)
    if seq == 0:
        return Base(0, None)
    try:
        return Base(seq, load_snapshot(store, checkpoint, seq))
    except DamageError as error:
        return Base(seq, None, error)


def is_unchanged(base: Base, inventory: Iterable[ObjectInfo], recipe: str) -> bool:
    """Whether `base` holds all of this inventory under this recipe: nothing is left to do."""
    snapshot = base.snapshot
    return (
        snapshot is not None
        and not snapshot.failures
        and (snapshot.inventory, snapshot.recipe) == (inventory_digest(inventory), recipe)
    )


def adopt_plan(store: Store, run: str, plan: Plan, inventory: Sequence[ObjectInfo]) -> Plan:
    """Store the plan of a run, or return the one that another driver of it has stored.

    Parameters
    ----------
    store : Store
    run : str
    plan : Plan
        Ours. An object that it lacks because it could not be read is a failure of this driver alone.
    inventory : sequence of ObjectInfo
        All objects of the run.
    """
    data = to_parquet(plan.rows())
    stored = put_once(store, plan_key(run), data, ROWS_BYTES_MAX)
    return plan if stored == data else adopt(inventory, _evidence(stored, plan_key(run)))


def find_plan(store: SourceStore, run: str, inventory: Sequence[ObjectInfo]) -> Plan | None:
    """Return the plan that an earlier attempt of the run has stored, or None; `inventory` as in `adopt_plan`."""
    try:
        return adopt(inventory, _evidence(store.get(plan_key(run), max_bytes=ROWS_BYTES_MAX), plan_key(run)))
    except NotFoundError:
        return None


def adopt_headers(store: Store, run: str, headers: Mapping[str, Headers]) -> Mapping[str, Headers]:
    """Store the headers of the files of a run before its plan, or return those that another driver of it has stored."""
    if not headers:
        return headers
    key = headers_key(run)
    return headers_from_json(put_once(store, key, headers_to_json(headers), ROWS_BYTES_MAX), key)


def find_headers(store: SourceStore, run: str) -> Mapping[str, Headers]:
    """Return the headers that a run has stored, by key of the file; none where it found none."""
    key = headers_key(run)
    try:
        return headers_from_json(store.get(key, max_bytes=ROWS_BYTES_MAX), key)
    except NotFoundError:
        return {}


def adopt_rows(store: Store, run: str, rows: Sequence[Row]) -> None:
    """Store the rows that a run takes from its base, as a receipt like any other: what it needs can be told from it."""
    if rows:
        put_once(store, receipt_key(run, UNCHANGED), to_parquet(rows), ROWS_BYTES_MAX)


def adopt_prior(store: Store, run: str, prior: bytes) -> bytes:
    """Store the prior of a run, or return the one that another driver of it has stored."""
    return put_once(store, prior_key(run), prior, PRIOR_BYTES_MAX)


def find_prior(store: SourceStore, run: str) -> bytes | None:
    """Return the prior that a run has stored, or None."""
    try:
        return store.get(prior_key(run), max_bytes=PRIOR_BYTES_MAX)
    except NotFoundError:
        return None


def find_receipt(store: SourceStore, run: str, task: Task) -> Rows | None:
    """Return the rows of a task that is done, its packs there, or None.

    Raises
    ------
    DamageError
        The receipt is damaged or belongs to another task.
    """
    key = receipt_key(run, task.id)
    try:
        data = store.get(key, max_bytes=ROWS_BYTES_MAX)
    except NotFoundError:
        return None
    rows = _receipt(data, task, key)
    # A gc that came between the pack and its receipt may have removed what the receipt refers to.
    return None if missing_packs(store, pack_sizes(rows)) else rows


def adopt_receipt(store: Store, run: str, task: Task, rows: Sequence[Row]) -> Rows:
    """Store the rows of a finished task, whose pack is stored; return those of whoever was first."""
    key = receipt_key(run, task.id)
    return _receipt(put_once(store, key, to_parquet(rows), ROWS_BYTES_MAX), task, key)


def find_receipts(store: SourceStore, run: str, tasks: Sequence[Task]) -> dict[int, Rows]:
    """Return the rows of all tasks that are done, by ordinal; one listing tells which."""
    prefix = receipt_key(run, "")
    done = {info.key.removeprefix(prefix) for info in store.list(prefix)}
    wanted = [task for task in tasks if task.id in done] if done else []
    found = each(lambda task: find_receipt(store, run, task), wanted)
    return {task.ordinal: rows for task, rows in zip(wanted, found, strict=True) if rows is not None}


def go_on(store: Store, earlier: str, run: str, tasks: Sequence[Task]) -> None:
    """Give `run` what an earlier run has stored that serves it too: the prior, and receipts of the tasks of both."""
    prior = find_prior(store, earlier)
    if prior is not None:
        adopt_prior(store, run, prior)
    ours = {task.ordinal: task for task in tasks}
    for ordinal, rows in find_receipts(store, earlier, tasks).items():
        adopt_receipt(store, run, ours[ordinal], rows)


def _evidence(data: bytes, key: str) -> Rows:
    """Return the rows of an object that only saves work: where it is damaged, it may be removed."""
    try:
        return from_parquet(data, key)
    except DamageError as error:
        raise type(error)(error.expected, error.found, error.where, "remove it and run again") from error


def _receipt(data: bytes, task: Task, key: str) -> Rows:
    rows = _evidence(data, key)
    planned = ((part.info.key, segment) for part in task.parts for segment in part.segments)
    for file, *segment in rows.values("file", *SEGMENT_COLUMNS):
        if (file, Segment(*segment)) not in planned:  # both are in the same order
            raise FormatError("segments of this task", f"{file}@{segment[0]}", key, "remove it and run again")
    return rows.with_task(task.ordinal)  # another plan may have had it in another place


# -- the commit ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Draft:
    """What is known of a snapshot before its rows.

    Attributes
    ----------
    checkpoint : str
    base : int
        Number of the newest snapshot that the plan saw.
    recipe : str
    inventory : tuple of ObjectInfo
        All objects that were to be archived.
    failures : tuple of Finding
        Those that could not be.
    writer : str
        Version of the package.
    apart : tuple of str
        What sets this attempt apart from others of the same base: the run that it goes on from, objects that are gone
        or cannot be read, options.
    headers : mapping of str to Headers
        By key, of the objects of which the source keeps some.
    """

    checkpoint: str
    base: int
    recipe: str
    inventory: tuple[ObjectInfo, ...]
    failures: tuple[Finding, ...]
    writer: str
    apart: tuple[str, ...] = ()
    headers: Mapping[str, Headers] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """Id of the run."""
        return run_id(self.checkpoint, self.inventory, self.recipe, self.base, self.apart)

    @property
    def files(self) -> list[ObjectInfo]:
        """The objects that are archived."""
        failed = {finding.key for finding in self.failures}
        return [info for info in self.inventory if info.key not in failed]


def commit(
    store: Store, draft: Draft, rows: Iterable[Row], list_again: Callable[[], Iterable[ObjectInfo]], time: str
) -> Snapshot:
    """Commit a run: the manifest, proof that all is there and the source unchanged, then the snapshot.

    Parameters
    ----------
    store : Store
        The archive.
    draft : Draft
    rows : iterable of Row
        Of all receipts, in any order; those of failed files are left out.
    list_again : callable
        Lists the source once more, with the same filters.
    time : str
        When, in UTC.

    Returns
    -------
    Snapshot
        The one that is stored: ours, or that of another driver of the same run.

    Raises
    ------
    ChangedError
        An archived object is another generation now; nothing is committed. Objects that came or went since
        the inventory do not matter: each archived one was read whole, at its planned generation.
    ConflictError
        Another run committed first, or a collection of garbage removes what this one needs.
    FormatError, NotFoundError
        The rows do not tile the files, or a pack is gone; nothing is committed.
    StoreError
        The store failed. Where it cannot be known whether the snapshot is stored, the message says so.
    """
    files = draft.files
    kept = {info.key for info in files}
    ordered = Rows.of(rows).of_files(kept).ordered()
    check_tiles({info.key: info.n_bytes for info in files}, ordered, "receipts")
    sizes = pack_sizes(ordered)
    manifest = to_manifest(ordered)
    snapshot = Snapshot(
        checkpoint=draft.checkpoint,
        seq=draft.base + 1,
        base=draft.base,
        run=draft.run,
        recipe=draft.recipe,
        inventory=inventory_digest(draft.inventory),
        writer=draft.writer,
        features=(),
        manifest=blake3(manifest).hexdigest(),
        manifest_bytes=len(manifest),
        content=content_digest(ordered),
        files=tuple(file_entries(files, ordered, draft.headers)),
        failures=draft.failures,
        totals=Totals(
            files=len(files),
            tensors=int(ordered.integers("n_tensors").sum()),
            segments=len(ordered),
            source_bytes=sum(info.n_bytes for info in files),
            packs=len(sizes),
            stored_bytes=sum(sizes.values()),
        ),
        time=time,
    )
    spare(store, {manifest_key(snapshot.manifest), *map(pack_key, sizes)})
    _put_manifest(store, snapshot, manifest)
    if gone := missing_packs(store, sizes):
        raise NotFoundError("the packs of this run", gone[0].detail, gone[0].key, "remove its receipts and run again")
    _refuse_changed(files, list_again())
    return _publish(store, snapshot)


def to_manifest(rows: Iterable[Row]) -> bytes:
    """Return ordered rows as a manifest has them: without the place in the plan, which no pack tells."""
    return to_parquet(Rows.of(rows).with_task(0))


def file_entries(
    files: Iterable[ObjectInfo], rows: Iterable[Row], headers: Mapping[str, Headers] | None = None
) -> list[FileEntry]:
    """Return the entries of a snapshot for `files`, both in the order of keys; `headers` are by key."""
    by_file = {key: group for (key,), group in Rows.of(rows).by("file")}
    entries = []
    for info in sorted(files, key=key_order):
        found = by_file.get(info.key, Rows())
        if found:
            kind, reason = found.at(0, "format", "reason")
        else:
            empty = layout_of(lambda *_: b"", info.key, 0)
            kind, reason = empty.format, empty.reason
        told = (headers or {}).get(info.key, ())
        generation = info.key, info.n_bytes, info.etag, info.version
        entries.append(FileEntry(*generation, kind, reason, file_digest(_digests(found, info.key)), told))
    return entries


def _digests(rows: Rows, where: str) -> Iterator[tuple[int, bytes]]:
    for n_bytes, digest in rows.values("n_bytes", "digest"):
        if digest is None:
            raise FormatError("rows with digests", "one without", where)
        yield n_bytes, digest


def _put_manifest(store: Store, snapshot: Snapshot, data: bytes) -> None:
    key = manifest_key(snapshot.manifest)
    if len(data) > ROWS_BYTES_MAX:
        raise LimitError(f"a manifest of at most {ROWS_BYTES_MAX} bytes", f"{len(data)}", key, "archive in parts")
    store.put(key, data)
    if store.get(key, max_bytes=len(data)) != data:
        raise DigestError("the manifest that was put", "other bytes", key, "check the store and run again")


def _refuse_changed(files: Iterable[ObjectInfo], listing: Iterable[ObjectInfo]) -> None:
    now = {info.key: info for info in listing}
    for info in files:
        if now.get(info.key, info) != info:
            raise changed(info.key)


def _publish(store: Store, snapshot: Snapshot) -> Snapshot:
    key, data = snapshot_key(snapshot.checkpoint, snapshot.seq), snapshot.to_json()
    if len(data) > SNAPSHOT_BYTES_MAX:
        raise LimitError(f"a snapshot of at most {SNAPSHOT_BYTES_MAX} bytes", f"{len(data)}", key, "archive in parts")
    stored = put_once(store, key, data, SNAPSHOT_BYTES_MAX)
    if stored == data:
        return snapshot
    winner = from_json(stored, key)
    if winner.run != snapshot.run:
        raise ConflictError("the next number of this checkpoint", "another run's snapshot", key, "run again")
    return winner
