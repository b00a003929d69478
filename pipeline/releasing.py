"""The command ``release-source``: frees the bytes of a source that is archived, and only on evidence.

It is the one command that removes anything below a source, and opens it as a store that can. What it removes is only
what a snapshot has and the source still has as it was archived; before that it must see, now, that

- the snapshot, its manifest and all its packs are there, in the archive and in a replica, if one is named;
- all segments were decoded and compared by `verify --receipt`, after the commit and in the last seven days;
- somebody else, or the same one earlier, has asked for the same at least the time of grace before.

The first ``--yes`` writes down the intent, as `gc` does what it condemns; a later one acts on it. From then on the
snapshot is tagged, and no rule of `prune` drops it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from blake3 import blake3

from configs.loader import Run, canonical_json
from operators.errors import (
    ArchiveNotFoundError,
    ChangedError,
    DamageError,
    EvidenceError,
    NotFoundError,
    UsageError,
)
from pipeline.archive import find_snapshot, load_manifest, load_snapshot, missing_packs, pack_sizes, put_once
from pipeline.executors import each_attempt
from pipeline.locations import open_source, open_store
from pipeline.reading import check_files
from pipeline.report import Report, printable
from pipeline.retention import RELEASED, add_tags
from pipeline.scrubbing import receipts
from pipeline.snapshots import FileEntry, Snapshot, clock_text
from pipeline.store import SourceStore, Store
from pipeline.summary import DONE, FAILED_ITEMS, Failed

DAY = 86_400
FRESH_SECONDS = 7 * DAY
"""A verification that is older tells nothing of the archive of today."""
REQUESTS = 16
"""Objects that are removed side by side."""
INTENT_BYTES_MAX = 1 << 16


@dataclass(slots=True)
class Freeable:
    """What a source still has of a snapshot.

    Attributes
    ----------
    files : list of FileEntry
        As they were archived.
    kept : list of Failed
        Those that are not, any more.
    gone : int
    new : int
        Objects of the source that the snapshot has not.
    """

    files: list[FileEntry] = field(default_factory=list)
    kept: list[Failed] = field(default_factory=list)
    gone: int = 0
    new: int = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of the files."""
        return sum(entry.n_bytes for entry in self.files)


def release_source(arguments: argparse.Namespace, run: Run, report: Report) -> int:
    """Show what may be freed; with ``--yes`` write down the intent, or act on one that is old enough."""
    archive = open_store(arguments.archive, run.storage_options)
    snapshot = find_snapshot(archive, arguments.snapshot)
    require_whole(archive, snapshot, "archive")
    require_verified(archive, snapshot)
    if arguments.replica is not None:
        require_replica(open_source(arguments.replica, run.storage_options), archive, snapshot)
    source = open_store(arguments.source, run.storage_options)
    found = look(source, snapshot)
    intent, data = intent_of(arguments.source, snapshot)
    grace_seconds = arguments.grace * DAY
    written = _written(archive, intent)
    if written is None and not (found.files or found.kept or found.new):
        open_source(arguments.source, run.storage_options).list()  # a store takes a mistyped place for an empty one
    freed, freed_bytes, failures = 0, 0, list(found.kept)
    if arguments.yes and found.files:
        if written is None:
            put_once(archive, intent, data, INTENT_BYTES_MAX)
            written = _written(archive, intent)
        elif archive.now() < written + grace_seconds:
            step = f"run again from {clock_text(written + grace_seconds)} on"
            expected = f"an intent of {arguments.grace} days ago or before"
            raise EvidenceError(expected, f"one of {clock_text(written)}", intent, step)
        else:
            add_tags(archive, snapshot.checkpoint, snapshot.seq, [RELEASED])
            load_snapshot(archive, snapshot.checkpoint, snapshot.seq)  # no `prune` was faster than its tag
            done, failed = free(source, found.files, run.retries)
            freed, freed_bytes = len(done), sum(entry.n_bytes for entry in done)
            failures += failed
    if arguments.yes and written is not None and len(found.files) == freed:
        archive.delete(intent)  # whoever archives the same again gets the whole time of grace
        written = None
    content = {
        "command": "release-source",
        "dry_run": not arguments.yes,
        "snapshot": snapshot.name,
        "content": snapshot.content,
        "files": len(found.files),
        "source_bytes": found.n_bytes,
        "freed": freed,
        "freed_bytes": freed_bytes,
        "gone": found.gone,
        "not_archived": found.new,
        "intent": "" if written is None else intent,
        "ready": "" if written is None else clock_text(written + grace_seconds),
        "failures": [asdict(failure) for failure in failures],
    }
    lines = [f"{entry.n_bytes:>16,}  {printable(entry.key)}" for entry in found.files]
    lines += [f"kept  {printable(failure.key)}: {failure.message}" for failure in failures]
    told = f"{len(found.files)} files, {found.n_bytes:,} bytes are in {snapshot.name} as they are"
    lines.append(f"{told}; {freed} freed, {found.gone} gone before, {len(failures)} kept, {found.new} never archived")
    if written is not None:
        lines.append(f"they may go from {clock_text(written + grace_seconds)} on: run again with --yes then")
    elif not arguments.yes and found.files:
        lines.append("--yes writes down the intent; nothing goes before the time of grace is over")
    report.give(content, lines)
    return FAILED_ITEMS if failures else DONE


# -- evidence -----------------------------------------------------------------------------------


def require_whole(store: SourceStore, snapshot: Snapshot, where: str) -> None:
    """Check snapshot, manifest and the sizes of all packs, as `verify --level manifest` does.

    Raises
    ------
    EvidenceError
        Something is missing or damaged.
    """
    try:
        rows = load_manifest(store, snapshot)
        check_files(snapshot, rows)
        faults = missing_packs(store, pack_sizes(rows))
    except DamageError as error:
        raise EvidenceError(f"a whole {where}", str(error), snapshot.name, "see `brevis rebuild`") from error
    if faults:
        found = f"{len(faults)} packs that are not: {faults[0].key}, {faults[0].detail}"
        raise EvidenceError(f"a whole {where}", found, snapshot.name, "see `brevis verify`")


def require_verified(store: SourceStore, snapshot: Snapshot) -> None:
    """Check that receipts show a decoding of all segments since the commit, lately, and no fault since.

    A receipt names the manifest of the snapshot, so that it was written after the commit, by another command. One that
    tells of a fault, whatever its level, makes those before it void.

    Raises
    ------
    EvidenceError
        They do not; the message tells what each lacks.
    """
    now = store.now()
    parts: dict[int, set[int]] = {}
    lacking: list[str] = []
    for receipt in receipts(store):
        fault = receipt.fault_for(snapshot)
        if receipt.is_of(snapshot) and receipt.has_faults:
            parts.clear()
        if fault is None and now - receipt.written > FRESH_SECONDS:
            fault = f"older than {FRESH_SECONDS // DAY} days"
        if fault is None:
            parts.setdefault(receipt.part.total, set()).add(receipt.part.number)
        else:
            lacking.append(f"{receipt.key}: {fault}")
    if any(len(numbers) == total for total, numbers in parts.items()):
        return
    lacking += [f"{len(numbers)} of {total} parts" for total, numbers in sorted(parts.items())]
    expected = "a receipt of a verification that decoded all segments"
    step = "run `brevis verify --receipt` on this snapshot"
    raise EvidenceError(expected, "; ".join(lacking[-4:]) or "none", snapshot.name, step)


def require_replica(replica: SourceStore, archive: SourceStore, snapshot: Snapshot) -> None:
    """Check that another archive has the same snapshot, whole.

    Raises
    ------
    EvidenceError
        It has not.
    UsageError
        It is no other archive.
    """
    if replica.url.rstrip("/") == archive.url.rstrip("/"):
        raise UsageError("another archive", "the same one", "--replica")
    try:
        other = find_snapshot(replica, snapshot.name)
    except (ArchiveNotFoundError, DamageError) as error:
        raise EvidenceError("a replica of this snapshot", str(error), snapshot.name, "copy it there") from error
    if other.content != snapshot.content:
        found = f"a snapshot of content {other.content}"
        raise EvidenceError(f"a replica of content {snapshot.content}", found, snapshot.name, "copy it there")
    require_whole(replica, other, "replica")


# -- the source ---------------------------------------------------------------------------------


def look(source: Store, snapshot: Snapshot) -> Freeable:
    """Tell which files of a snapshot the source has as they were archived.

    Folders without entries stay: they hold no bytes.
    """
    now = {info.key: info for info in source.list()}
    found = Freeable(new=len(now.keys() - {entry.key for entry in snapshot.files}))
    for entry in snapshot.files:
        if entry.key.endswith("/"):
            continue
        if entry.key not in now:
            found.gone += 1
        elif not entry.etag or now[entry.key] != entry.current:
            error = ChangedError("the archived generation", "another one", entry.key, "archive it, or leave it")
            found.kept.append(Failed.of(entry.key, error))
        else:
            found.files.append(entry)
    return found


def free(source: Store, files: Sequence[FileEntry], retries: int) -> tuple[list[FileEntry], list[Failed]]:
    """Remove what is still the archived generation; return what went, and what did not."""
    done: list[FileEntry] = []
    failed: list[Failed] = []
    for outcome in each_attempt(lambda entry: source.delete_generation(entry.info), files, REQUESTS, retries):
        if outcome.error is None or isinstance(outcome.error, NotFoundError):  # a lost answer, or somebody else
            done.append(outcome.item)
        else:
            failed.append(Failed.of(outcome.item.key, outcome.error))
    return done, failed


def intent_of(source_url: str, snapshot: Snapshot) -> tuple[str, bytes]:
    """Return key and bytes of the object that says what is to be freed: the same whenever that is the same."""
    content = {
        "source": source_url,
        "snapshot": snapshot.name,
        "run": snapshot.run,
        "inventory": snapshot.inventory,
        "manifest": snapshot.manifest,
    }
    data = canonical_json(content) + b"\n"
    return f"release/{blake3(data).hexdigest()}.json", data


def _written(archive: SourceStore, intent: str) -> int | None:
    """Return when an intent was written, by the clock of the archive, or None where there is none."""
    return next((item.written for item in archive.dated(intent) if item.key == intent), None)
