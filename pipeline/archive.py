"""The archive: keys, runs, the commit, and the way back in. `ARCHIVE.md` is the norm.

Write-once objects go first, receipts second, the manifest third, the snapshot last. A crash at any point
leaves the archive as it was or as it was to become; whatever else was written is named by its content or
create-only, and the next run takes it up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar
from urllib.parse import unquote

from blake3 import blake3

from operators.errors import (
    ArchiveNotFoundError,
    ChangedError,
    ConflictError,
    DamageError,
    DeniedError,
    DigestError,
    ExistsError,
    FormatError,
    LimitError,
    NotFoundError,
    StoreError,
    UnsupportedError,
    UsageError,
)
from pipeline.packs import pack_key
from pipeline.plan import Finding, Plan, Task, adopt, task_id
from pipeline.rows import Row, content_digest, from_parquet, row_order, to_parquet
from pipeline.segments import layout_of
from pipeline.snapshots import (
    LAYOUT_VERSION,
    FileEntry,
    Snapshot,
    Totals,
    digest_of_json,
    from_json,
    inventory_digest,
)
from pipeline.store import ObjectInfo, SourceStore, Store, key_order

FORMAT_KEY = "FORMAT"
FORMAT_BYTES_MAX = 1 << 10
SNAPSHOT_BYTES_MAX = 64 << 20
ROWS_BYTES_MAX = 1 << 30
PRIOR_BYTES_MAX = 64 << 20
CHECKPOINT_BYTES_MAX = 200
"""Longest escaped name of a checkpoint: a part of a path, with room for temporary names."""
PUT_ATTEMPTS = 3
"""How often a create-only put is sent while its outcome is unknown and nothing is there."""
REQUESTS = 16
"""Small requests in flight."""

_FORMAT = re.compile(rb"brevis archive, layout (0|[1-9][0-9]{0,8})\n")
_SEQ = re.compile(r"([0-9]{8})\.json")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


# -- keys ---------------------------------------------------------------------------------------


def escape(checkpoint: str) -> str:
    """Return the name of a checkpoint as one part of a key: percent-escapes for all but ``A-Z a-z 0-9 . _ -``.

    Raises
    ------
    UsageError
        The name is empty or too long.
    """
    text = "".join(
        symbol if symbol.isascii() and (symbol.isalnum() or symbol in "._-") else _percent(symbol)
        for symbol in checkpoint
    )
    if text.startswith("."):
        text = "%2E" + text[1:]
    if not text or len(text) > CHECKPOINT_BYTES_MAX:
        raise UsageError(f"a name of 1 to {CHECKPOINT_BYTES_MAX} escaped bytes", checkpoint[:80], "--name")
    return text


def _percent(symbol: str) -> str:
    return "".join(f"%{byte:02X}" for byte in symbol.encode("utf-8", "surrogateescape"))


def manifest_key(digest: str) -> str:
    """Return the key of a manifest."""
    return f"manifests/{digest}.parquet"


def snapshot_key(checkpoint: str, seq: int) -> str:
    """Return the key of a snapshot."""
    return f"snapshots/{escape(checkpoint)}/{seq:08d}.json"


def plan_key(run: str) -> str:
    """Return the key of the plan of a run."""
    return f"runs/{run}/plan"


def prior_key(run: str) -> str:
    """Return the key of the prior of a run."""
    return f"runs/{run}/prior"


def receipt_key(run: str, task: int) -> str:
    """Return the key of a receipt."""
    return f"runs/{run}/receipts/{task_id(task)}"


def run_id(checkpoint: str, inventory: Iterable[ObjectInfo], recipe: str, base: int) -> str:
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
    """
    return digest_of_json([checkpoint, inventory_digest(inventory), recipe, base])


# -- the archive itself -------------------------------------------------------------------------


def create_archive(store: Store, *, single_writer: bool = False) -> None:
    """Make the store an archive unless it is one.

    Parameters
    ----------
    store : Store
    single_writer : bool
        The caller promises to be the only writer; the store need not refuse a second one.

    Raises
    ------
    UnsupportedError
        A newer writer made it.
    UsageError
        The store lets anybody overwrite: no commit would be safe.
    """
    try:
        open_archive(store)
    except ArchiveNotFoundError:
        if not single_writer and not store.supports_create_only():
            raise UsageError(
                "a store with create-only writes", "one that overwrites", store.url, "use --single-writer or another"
            ) from None
        _refuse_other_format(_create(store, FORMAT_KEY, b"brevis archive, layout %d\n" % LAYOUT_VERSION))


def open_archive(store: SourceStore) -> None:
    """Check that the store holds an archive that this reader knows.

    Raises
    ------
    ArchiveNotFoundError
        There is none.
    UnsupportedError
        A newer writer made it.
    FormatError
        Something else is in its place.
    """
    try:
        data = store.get(FORMAT_KEY, max_bytes=FORMAT_BYTES_MAX)
    except NotFoundError as error:
        raise ArchiveNotFoundError("an archive", "no FORMAT object", store.url, "check the location") from error
    _refuse_other_format(data)


def _refuse_other_format(data: bytes) -> None:
    match = _FORMAT.fullmatch(data)
    if match is None:
        raise FormatError("the FORMAT of an archive", repr(data[:80]), FORMAT_KEY)
    if int(match[1]) > LAYOUT_VERSION:
        raise UnsupportedError(f"layout {LAYOUT_VERSION} or lower", match[1].decode(), FORMAT_KEY, "upgrade the reader")


def checkpoints(store: SourceStore) -> dict[str, list[int]]:
    """Return every checkpoint of the archive with the numbers of its snapshots, both in ascending order."""
    found: dict[str, list[int]] = {}
    for info in store.list("snapshots/"):
        _, folder, name = info.key.split("/", 2)
        match = _SEQ.fullmatch(name)
        if match:
            found.setdefault(unquote(folder, errors="surrogateescape"), []).append(int(match[1]))
    return {checkpoint: sorted(found[checkpoint]) for checkpoint in sorted(found)}


def load_snapshot(store: SourceStore, checkpoint: str, seq: int) -> Snapshot:
    """Return a snapshot.

    Raises
    ------
    ArchiveNotFoundError
        There is none of that name.
    DamageError, UnsupportedError
        It cannot be read.
    """
    key = snapshot_key(checkpoint, seq)
    try:
        snapshot = from_json(store.get(key, max_bytes=SNAPSHOT_BYTES_MAX), key)
    except NotFoundError as error:
        raise ArchiveNotFoundError("a snapshot", "none", key, "see `brevis list`") from error
    if (snapshot.checkpoint, snapshot.seq) != (checkpoint, seq):
        raise FormatError(f"the snapshot {checkpoint}/{seq}", snapshot.name, key, "it was copied from elsewhere")
    return snapshot


def find_snapshot(store: SourceStore, name: str | None = None) -> Snapshot:
    """Return the snapshot that a user names as ``CHECKPOINT`` (its newest) or ``CHECKPOINT/SEQ``.

    Raises
    ------
    ArchiveNotFoundError
        No archive, checkpoint or snapshot of that name.
    UsageError
        No name was given, and the archive holds several checkpoints.
    """
    open_archive(store)
    known = checkpoints(store)
    if name is None:
        if len(known) > 1:
            raise UsageError("one of several checkpoints", "no name", "--snapshot", f"known: {', '.join(known)[:400]}")
        name = next(iter(known), "")
    if name in known:
        return load_snapshot(store, name, known[name][-1])
    checkpoint, _, seq = name.rpartition("/")
    if checkpoint in known and seq.isdecimal() and int(seq) in known[checkpoint]:
        return load_snapshot(store, checkpoint, int(seq))
    hint = f"known: {', '.join(known)[:400]}" if known else "nothing was committed yet"
    raise ArchiveNotFoundError("a checkpoint or CHECKPOINT/SEQ", name or "none", store.url, hint)


def load_manifest(store: SourceStore, snapshot: Snapshot) -> list[Row]:
    """Return the rows of a snapshot, checked against it and tiling its files.

    Raises
    ------
    DamageError
        Size, digest or content are not those that the snapshot names.
    NotFoundError
        The manifest is gone.
    """
    key = manifest_key(snapshot.manifest)
    if snapshot.manifest_bytes > ROWS_BYTES_MAX:
        raise LimitError(f"a manifest of at most {ROWS_BYTES_MAX} bytes", f"{snapshot.manifest_bytes}", key)
    data = store.get(key, max_bytes=snapshot.manifest_bytes)
    if len(data) != snapshot.manifest_bytes or blake3(data).hexdigest() != snapshot.manifest:
        raise DigestError("the manifest that the snapshot names", "other bytes", key, "take another copy")
    rows = from_parquet(data, key)
    check_tiles({entry.key: entry.n_bytes for entry in snapshot.files}, rows, key)
    return rows


def check_tiles(files: Mapping[str, int], rows: Sequence[Row], where: str) -> None:
    """Check that ordered `rows` tile `files` exactly: no gap, no overlap, no file too much or too few.

    Raises
    ------
    FormatError
        They do not; the first file is named.
    """
    filled: dict[str, int] = {}
    for row in rows:
        end = filled.get(row.file, 0)
        if row.offset_bytes != end:
            raise FormatError(f"a segment at {end}", f"one at {row.offset_bytes}", f"{where}: {row.file}")
        filled[row.file] = row.segment.end_bytes
    for key in sorted(filled.keys() | files.keys()):
        if filled.get(key, 0) != files.get(key, -1):
            expected = f"{files[key]} bytes" if key in files else "no segment"
            raise FormatError(expected, f"{filled.get(key, 0)} bytes in segments", f"{where}: {key}")


def pack_sizes(rows: Iterable[Row]) -> dict[bytes, int]:
    """Return every pack that `rows` refer to with its size, in the order of first use.

    Raises
    ------
    FormatError
        A row has no record, or two rows disagree.
    """
    sizes: dict[bytes, int] = {}
    for row in rows:
        if row.pack is None or row.pack_bytes is None or row.pack_offset is None or row.stored_bytes is None:
            raise FormatError("a row with a record", "none", row.where)
        if sizes.setdefault(row.pack, row.pack_bytes) != row.pack_bytes:
            raise FormatError(f"a pack of {sizes[row.pack]} bytes", f"{row.pack_bytes}", row.where)
    return sizes


def missing_packs(store: SourceStore, sizes: Mapping[bytes, int]) -> list[Finding]:
    """Return the packs that are not there with their size."""

    def fault(item: tuple[bytes, int]) -> Finding | None:
        key = pack_key(item[0])
        try:
            n_bytes = store.head(key).n_bytes
        except NotFoundError:
            return Finding(key, "not_found", f"expected {item[1]} bytes")
        return None if n_bytes == item[1] else Finding(key, "wrong_size", f"expected {item[1]} bytes, found {n_bytes}")

    return [found for found in _each(fault, sizes.items()) if found]


# -- runs ---------------------------------------------------------------------------------------


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
    prefix = f"snapshots/{escape(checkpoint)}/"
    names = (_SEQ.fullmatch(info.key.removeprefix(prefix)) for info in store.list(prefix))
    seq = max((int(match[1]) for match in names if match), default=0)
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
    stored = _create(store, plan_key(run), data, ROWS_BYTES_MAX)
    return plan if stored == data else adopt(inventory, from_parquet(stored, plan_key(run)))


def adopt_prior(store: Store, run: str, prior: bytes) -> bytes:
    """Store the prior of a run, or return the one that another driver of it has stored."""
    return _create(store, prior_key(run), prior, PRIOR_BYTES_MAX)


def find_receipt(store: SourceStore, run: str, task: Task) -> list[Row] | None:
    """Return the rows of a task that is done, or None.

    Raises
    ------
    DamageError
        The receipt is damaged or belongs to another task.
    """
    key = receipt_key(run, task.ordinal)
    try:
        data = store.get(key, max_bytes=ROWS_BYTES_MAX)
    except NotFoundError:
        return None
    return _receipt(data, task, key)


def adopt_receipt(store: Store, run: str, task: Task, rows: Sequence[Row]) -> list[Row]:
    """Store the rows of a finished task, whose pack is stored; return those of whoever was first."""
    key = receipt_key(run, task.ordinal)
    return _receipt(_create(store, key, to_parquet(rows), ROWS_BYTES_MAX), task, key)


def find_receipts(store: SourceStore, run: str, tasks: Sequence[Task]) -> dict[int, list[Row]]:
    """Return the rows of all tasks that are done, by ordinal; one listing tells which."""
    prefix = receipt_key(run, 0).removesuffix(task_id(0))
    done = {info.key.removeprefix(prefix) for info in store.list(prefix)}
    wanted = [task for task in tasks if task.id in done]
    found = _each(lambda task: find_receipt(store, run, task), wanted)
    return {task.ordinal: rows for task, rows in zip(wanted, found, strict=True) if rows is not None}


def _receipt(data: bytes, task: Task, key: str) -> list[Row]:
    rows = from_parquet(data, key)
    planned = {(row.file, row.segment) for row in task.rows()}
    for row in rows:
        if (row.file, row.segment) not in planned:
            raise FormatError("segments of this task", row.where, key, "remove the receipt and run again")
    return rows


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
    """

    checkpoint: str
    base: int
    recipe: str
    inventory: tuple[ObjectInfo, ...]
    failures: tuple[Finding, ...]
    writer: str

    @property
    def run(self) -> str:
        """Id of the run."""
        return run_id(self.checkpoint, self.inventory, self.recipe, self.base)

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
        Another run committed first.
    FormatError, NotFoundError
        The rows do not tile the files, or a pack is gone; nothing is committed.
    StoreError
        The store failed. Where it cannot be known whether the snapshot is stored, the message says so.
    """
    files = draft.files
    kept = {info.key for info in files}
    ordered = sorted((row for row in rows if row.file in kept), key=row_order)
    check_tiles({info.key: info.n_bytes for info in files}, ordered, "receipts")
    sizes = pack_sizes(ordered)
    manifest = to_parquet(ordered)
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
        files=tuple(file_entries(files, ordered)),
        failures=draft.failures,
        totals=Totals(
            files=len(files),
            tensors=sum(row.n_tensors for row in ordered),
            segments=len(ordered),
            source_bytes=sum(info.n_bytes for info in files),
            packs=len(sizes),
            stored_bytes=sum(sizes.values()),
        ),
        time=time,
    )
    _put_manifest(store, snapshot, manifest)
    if gone := missing_packs(store, sizes):
        raise NotFoundError("the packs of this run", gone[0].detail, gone[0].key, "remove its receipts and run again")
    _refuse_changed(files, list_again())
    return _publish(store, snapshot)


def file_entries(files: Iterable[ObjectInfo], rows: Iterable[Row]) -> list[FileEntry]:
    """Return the entries of a snapshot for `files`, both in the order of keys."""
    by_file = {key: list(group) for key, group in groupby(rows, lambda row: row.file)}
    entries = []
    for info in sorted(files, key=key_order):
        digest = blake3()
        for row in by_file.get(info.key, []):
            if row.digest is None:
                raise FormatError("a row with a digest", "none", row.where)
            digest.update(row.n_bytes.to_bytes(8, "little") + row.digest)
        if info.key in by_file:
            kind, reason = by_file[info.key][0].format, by_file[info.key][0].reason
        else:
            empty = layout_of(lambda *_: b"", info.key, 0)
            kind, reason = empty.format, empty.reason
        entries.append(FileEntry(info.key, info.n_bytes, info.etag, info.version, kind, reason, digest.hexdigest()))
    return entries


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
            raise ChangedError("the planned generation", "another one", info.key, "run again when it is at rest")


def _publish(store: Store, snapshot: Snapshot) -> Snapshot:
    key, data = snapshot_key(snapshot.checkpoint, snapshot.seq), snapshot.to_json()
    if len(data) > SNAPSHOT_BYTES_MAX:
        raise LimitError(f"a snapshot of at most {SNAPSHOT_BYTES_MAX} bytes", f"{len(data)}", key, "archive in parts")
    stored = _create(store, key, data, SNAPSHOT_BYTES_MAX)
    if stored == data:
        return snapshot
    winner = from_json(stored, key)
    if winner.run != snapshot.run:
        raise ConflictError("the next number of this checkpoint", "another run's snapshot", key, "run again")
    return winner


def _create(store: Store, key: str, data: bytes, max_bytes: int = FORMAT_BYTES_MAX) -> bytes:
    """Create an object and return what is stored: `data`, or the bytes of whoever was first.

    A put whose answer is lost may have been stored, and one that is refused may have been refused by its own
    first sending; so whatever is not plain success is settled by reading the object.
    """
    fault: StoreError = ExistsError("an object", "none after a refused put", key, "run again")
    for _ in range(PUT_ATTEMPTS):
        try:
            store.put_new(key, data)
        except DeniedError:
            raise
        except StoreError as error:
            fault = error
        else:
            return data
        try:
            return store.get(key, max_bytes=max_bytes)
        except NotFoundError:
            continue
        except StoreError as error:
            raise StoreError("to know whether the object is stored", str(error), key, "run again") from fault
    raise fault


def _each(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Map `work` over small requests, some at a time, in order."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(work, items))
