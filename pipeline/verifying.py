"""The command ``verify``: which snapshots and parts are looked at, by whom, and what is told and left behind."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from configs.loader import Run
from operators.errors import (
    ArchiveNotFoundError,
    DamageError,
    NothingMatchedError,
    StoreError,
    UsageError,
)
from pipeline.archive import (
    checkpoints,
    each_snapshot,
    find_snapshot,
    load_manifest,
    missing_packs,
    open_archive,
    pack_sizes,
)
from pipeline.comparing import SourceItem, SourceJob, compare_listing, source_items
from pipeline.executors import Executor
from pipeline.lint import lint_archived
from pipeline.locations import open_source, open_store
from pipeline.packs import pack_key
from pipeline.plan import Finding, is_selected
from pipeline.reading import archived_files, check_files
from pipeline.report import Report
from pipeline.rows import Rows
from pipeline.scrubbing import Looked, chosen_part, put_receipt
from pipeline.snapshots import FileEntry, Snapshot, package_version
from pipeline.store import SourceStore
from pipeline.summary import DONE, FAILED_ITEMS, MISMATCH, Failed, Summary, stored_bytes_of
from pipeline.verify import UNSEEN, Part, VerifyJob, pack_items


def verify(arguments: argparse.Namespace, run: Run, report: Report, executor: Callable[[], Executor]) -> int:
    """Check an archive; go on after a fault and list each."""
    started, began = time.monotonic(), datetime.now(UTC)
    store = open_source(arguments.archive, run.storage_options)
    part = chosen_part(store, arguments.part, arguments.sample, arguments.level)
    if (arguments.level == "source") is not bool(arguments.source):
        raise UsageError("--level source with --source, or neither", "one of them", "verify")
    if arguments.receipt and _filtered(arguments):
        raise UsageError("a receipt of whole snapshots", "filters", "verify", "leave out --receipt")
    summary = Summary("verify")
    looked: list[tuple[str, str]] = []
    faults: dict[bytes, Finding | None] = {}
    seen: set[tuple[bytes | None, int | None, bytes | None]] = set()
    for snapshot in _snapshots(store, arguments.snapshot, summary, every=arguments.all):
        summary.snapshot = snapshot.name
        looked.append((snapshot.name, snapshot.manifest))
        try:
            rows = load_manifest(store, snapshot)
            check_files(snapshot, rows)
        except (DamageError, StoreError) as error:
            summary.failures.append(Failed.of(snapshot.name, error))
            continue
        keys = {entry.key for entry in _entries(snapshot, arguments)}
        rows = rows.of_files(keys)
        for finding in _missing(store, pack_sizes(rows), faults):
            names = sorted({file for file, pack in rows.values("file", "pack") if pack_key(pack) == finding.key})
            message = f"{finding.detail}; it holds parts of {', '.join(names)[:400]}"
            summary.failures.append(Failed(finding.key, finding.reason, message, "restore the pack from another copy"))
        summary.files += len(keys)
        summary.tensors += int(rows.integers("n_tensors").sum())
        summary.segments += len(rows)
        summary.source_bytes += int(rows.integers("n_bytes").sum())
        summary.stored_bytes += stored_bytes_of(snapshot)
        if arguments.level == "decode" and part is None and snapshot.files and not _filtered(arguments):
            summary.warnings += lint_archived(store, archived_files(snapshot, rows))
        if arguments.level == "source":
            source = SourceJob(arguments.source, dict(run.storage_options))
            items = _source_items(arguments, run, snapshot, rows, part, summary)
            _work(source, items, run, report, executor, summary)
        elif arguments.level != "manifest":
            if arguments.all:  # what snapshots share is looked at once
                rows = rows.where(record not in seen for record in rows.values("pack", "pack_offset", "digest"))
                seen.update(rows.values("pack", "pack_offset", "digest"))
            job = VerifyJob(arguments.archive, dict(run.storage_options), arguments.level)
            _work(job, pack_items(rows, part, whole=not _filtered(arguments)), run, report, executor, summary)
    if arguments.receipt:
        done = Looked(arguments.level, part, looked, _stamp(began), _stamp(datetime.now(UTC)), package_version())
        try:
            put_receipt(open_store(arguments.archive, run.storage_options), done, summary)
        except StoreError as error:  # what was found is told all the same
            summary.failures.append(Failed.of(done.key, error))
    summary.seconds = time.monotonic() - started
    if summary.files == 0 and not summary.failures and _filtered(arguments):
        raise NothingMatchedError("at least one file", "none", arguments.archive, "see `brevis info`")
    report.summary(summary)
    if not summary.failures:
        return DONE
    # What could not be looked at is no mismatch; what is missing or differs is.
    return FAILED_ITEMS if all(failure.reason in UNSEEN for failure in summary.failures) else MISMATCH


def _stamp(moment: datetime) -> str:
    return moment.strftime("%Y%m%dT%H%M%SZ")


def _missing(store: SourceStore, sizes: dict[bytes, int], faults: dict[bytes, Finding | None]) -> list[Finding]:
    """Return the packs that are not there with their size; `faults` remembers what was asked before."""
    new = {pack: n_bytes for pack, n_bytes in sizes.items() if pack not in faults}
    found = {finding.key: finding for finding in missing_packs(store, new)}
    faults.update((pack, found.get(pack_key(pack))) for pack in new)
    return [finding for pack in sizes if (finding := faults[pack]) is not None]


def _snapshots(store: SourceStore, name: str | None, summary: Summary, *, every: bool = False) -> Iterator[Snapshot]:
    """Yield the snapshot that a user names, or the newest of every checkpoint, or all of them."""
    if name is not None:
        yield find_snapshot(store, name)
        return
    open_archive(store)
    known = checkpoints(store)
    if not known:
        raise ArchiveNotFoundError("a snapshot", "none", store.url, "nothing was committed yet")
    for checkpoint, numbers in known.items():
        for number, snapshot in each_snapshot(store, checkpoint, numbers if every else numbers[-1:]):
            if isinstance(snapshot, DamageError):
                summary.failures.append(Failed.of(f"{checkpoint}/{number}", snapshot))
            else:
                yield snapshot


def _filtered(arguments: argparse.Namespace) -> bool:
    return bool(arguments.include or arguments.exclude)


def _entries(snapshot: Snapshot, arguments: argparse.Namespace) -> list[FileEntry]:
    return [one for one in snapshot.files if is_selected(one.key, arguments.include, arguments.exclude)]


def _source_items(
    arguments: argparse.Namespace,
    run: Run,
    snapshot: Snapshot,
    rows: Rows,
    part: Part | None,
    summary: Summary,
) -> list[SourceItem]:
    """Return what is to be compared with the source, and tell which files only one of both has."""
    entries = _entries(snapshot, arguments)
    if not _filtered(arguments):
        lost, new = compare_listing(open_source(arguments.source, run.storage_options), entries)
        summary.failures += lost
        summary.warnings += new
        gone = {failure.key for failure in lost}
        rows = rows.where(file not in gone for (file,) in rows.values("file"))
    return source_items(entries, rows if part is None else part.of(rows))


def _work(
    job: Any, items: Sequence[Any], run: Run, report: Report, executor: Callable[[], Executor], summary: Summary
) -> None:
    """Let workers look at `items`, and gather what they found."""
    with report.progress("verify", run.progress_seconds, sum(item.n_bytes for item in items)) as progress:
        for outcome in executor().run(job, items):
            progress.add(outcome.item.n_bytes)
            if outcome.result is None:
                assert outcome.error is not None
                summary.failures += [Failed.of(row.where, outcome.error) for row in outcome.item.rows]
            else:
                summary.verified += outcome.result.segments
                summary.failures += outcome.result.failures
    summary.failures.sort(key=lambda failure: failure.key)
