"""The commands, each from parsed arguments to an exit code.

Heavy imports wait until a command needs them: ``restore``, ``verify`` and ``cat`` never import the search.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.loader import RAY_BYTES, Run, load_run
from operators.errors import (
    DamageError,
    NothingMatchedError,
    UsageError,
)
from pipeline.archive import (
    checkpoints,
    each_snapshot,
    find_snapshot,
    latest_time,
    load_manifest,
    open_archive,
    refuse_own_folders,
)
from pipeline.executors import Executor, local_executor
from pipeline.locations import folder_url, open_source, open_store
from pipeline.reading import ArchivedFile, FoundTensor, Tensors, archived_files, check_file, range_bytes
from pipeline.report import Report, output, printable
from pipeline.restore import RestoreJob, restore_files, write_tensor
from pipeline.retention import checked_tags, tags_of
from pipeline.rows import Row, Rows
from pipeline.snapshots import Snapshot
from pipeline.store import SourceStore
from pipeline.summary import DONE, FAILED_ALL, FAILED_ITEMS, Failed, Summary, stored_bytes_of

if TYPE_CHECKING:
    from configs.recipe import Config
    from pipeline.driver import Order
    from pipeline.progress import Progress


# -- what the commands share --------------------------------------------------------------------


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the settings of the command line as ``--set`` would give them."""
    overrides = list(arguments.overrides)
    if arguments.workers is not None:
        overrides.append(f"run.workers={arguments.workers}")
    if arguments.memory is not None:
        overrides.append(f"run.memory_bytes={arguments.memory}")
    if getattr(arguments, "on_changing", None) is not None:  # of `archive` alone
        overrides.append(f"run.on_changing={arguments.on_changing}")
    overrides += [f"run.storage_options.{option}" for option in arguments.storage_option]
    return overrides


def _run_settings(arguments: argparse.Namespace) -> Run:
    return load_run(arguments.config, _overrides(arguments))


def _executor(arguments: argparse.Namespace, run: Run) -> Executor:
    if arguments.ray is None:
        return local_executor(run.workers, run.retries, run.tasks_at_once())
    from pipeline.on_ray import RayExecutor  # only `--ray` needs Ray

    sys.stdout = sys.stderr  # Ray tells there of nodes that it has lost; `Report` keeps what was standard output
    return RayExecutor(arguments.ray, run.workers, run.retries, run.tasks_at_once(RAY_BYTES), run.memory_bytes)


def _open(arguments: argparse.Namespace, run: Run) -> tuple[SourceStore, Snapshot, Rows]:
    """Open an archive and load the snapshot that the user means, with its rows."""
    store = open_source(arguments.archive, run.storage_options)
    snapshot = find_snapshot(store, arguments.snapshot, arguments.as_of)
    return store, snapshot, load_manifest(store, snapshot)


def _exit_code(summary: Summary) -> int:
    return FAILED_ITEMS if summary.failures else DONE


# -- commands -----------------------------------------------------------------------------------


def archive(arguments: argparse.Namespace, report: Report) -> int:
    """Plan, calibrate, compress, verify and commit."""
    from configs.recipe import load
    from pipeline.driver import ArchiveRun, Order

    config = load(arguments.config, _overrides(arguments))
    prior = read_small_file(arguments.prior) if arguments.prior else None
    checkpoint = arguments.name or default_checkpoint(arguments.source)
    order = Order(
        arguments.source,
        arguments.archive,
        checkpoint,
        tuple(arguments.include),
        tuple(arguments.exclude),
        prior,
        arguments.strict_format,
        arguments.single_writer,
        checked_tags(arguments.tag),
        arguments.checksum,
        arguments.repair,
        None if arguments.as_of is None else latest_time(arguments.as_of),
    )
    if arguments.checkpoint_glob is not None:
        return _archive_many(arguments, report, order, config)
    run = ArchiveRun(order, config)
    if arguments.dry_run:
        _list_files(report, "archive", [(info.key, info.n_bytes) for info in run.inventory()])
        return DONE
    with report.progress("archive", config.run.progress_seconds) as progress:
        summary = run.run(_executor(arguments, config.run), progress)
    report.summary(summary)
    return _exit_code(summary)


def _list_files(report: Report, command: str, files: Sequence[tuple[str, int]]) -> None:
    """Tell which files a command would take; it has written nothing."""
    total = sum(n_bytes for _, n_bytes in files)
    lines = [f"{n_bytes:>16,}  {key}" for key, n_bytes in files] + [f"{total:>16,}  bytes in {len(files)} files"]
    listed = [{"key": key, "n_bytes": n_bytes} for key, n_bytes in files]
    report.give({"command": command, "dry_run": True, "source_bytes": total, "files": listed}, lines)


def _archive_many(arguments: argparse.Namespace, report: Report, order: Order, config: Config) -> int:
    """Archive each checkpoint below the source that the pattern names and nobody writes any more."""
    from pipeline.nightly import FAILED, INCOMPLETE, UNCHANGED, UNFINISHED, ArchiveNight

    if arguments.name is not None:
        raise UsageError(
            "one of --name and --checkpoint-glob", "both", "archive", "checkpoints are named by their keys"
        )
    if order.as_of is not None:
        raise UsageError("one of --as-of and --checkpoint-glob", "both", "archive", "archive them one by one")
    night = ArchiveNight(order, arguments.checkpoint_glob, config)
    found = night.find()
    if arguments.dry_run:
        listed = [{"checkpoint": one.name, "objects": len(one.keys), "unfinished": why} for one, why in found]
        lines = [
            f"{len(one.keys):>8} objects  {printable(one.name)}" + (f"  {why}" if why else "") for one, why in found
        ]
        report.give({"command": "archive", "dry_run": True, "checkpoints": listed}, lines)
        return DONE

    def shown(name: str) -> Progress:
        report.say(f"archive {printable(name)}")
        return report.progress("archive", config.run.progress_seconds)

    summary = night.run(found, _executor(arguments, config.run), shown)
    for entry in summary.entries:
        if entry.outcome != UNCHANGED:
            report.say(
                f"{printable(entry.checkpoint)}: {entry.outcome}" + (f": {entry.reason}" if entry.reason else "")
            )
    report.give(summary.as_json(), [summary.text()])
    failed = summary.count(FAILED)
    if failed and failed == sum(entry.outcome != UNFINISHED for entry in summary.entries):
        return FAILED_ALL
    return FAILED_ITEMS if failed or summary.count(INCOMPLETE) else DONE


def restore(arguments: argparse.Namespace, report: Report) -> int:
    """Bring files, or one tensor, back."""
    run = _run_settings(arguments)
    started = time.monotonic()
    if folder_url(arguments.target) == folder_url(arguments.archive):
        raise UsageError("a target apart from the archive", "the same place", arguments.target, "name another TARGET")
    refuse_own_folders(arguments.archive, arguments.target)
    store, snapshot, rows = _open(arguments, run)
    items = archived_files(snapshot, rows, arguments.include, arguments.exclude)
    found = None if arguments.tensor is None else Tensors(store, items).find(arguments.tensor)
    if arguments.dry_run:
        listed = [(item.entry.key, item.n_bytes) for item in items]
        _list_files(report, "restore", listed if found is None else [(found.tensor.name, found.n_bytes)])
        return DONE
    summary = Summary("restore", snapshot=snapshot.name, run=snapshot.run, content=snapshot.content)
    if found is not None:
        _restore_tensor(arguments, run, store, found, summary)
    else:
        _restore_files(arguments, report, run, items, summary)
    summary.seconds = time.monotonic() - started
    report.summary(summary)
    return _exit_code(summary)


def _restore_files(
    arguments: argparse.Namespace, report: Report, run: Run, items: list[ArchivedFile], summary: Summary
) -> None:
    job = RestoreJob(arguments.archive, arguments.target, dict(run.storage_options), arguments.overwrite)
    refused = job.open_target().refused_keys([item.entry.key for item in items])
    for key, path_error in refused.items():
        summary.failures.append(Failed.of(key, path_error))
    items = [item for item in items if item.entry.key not in refused]
    restored: list[Rows] = []
    with report.progress("restore", run.progress_seconds, sum(item.n_bytes for item in items)) as progress:
        for outcome in restore_files(job, items, _executor(arguments, run), run.retries, progress.add):
            progress.note(f"{outcome.item.entry.key}: {outcome.error or 'restored'}")
            if outcome.error is not None:
                if not arguments.keep_going:
                    raise outcome.error
                summary.failures.append(Failed.of(outcome.item.entry.key, outcome.error))
                continue
            rows = Rows.of(outcome.item.rows)
            summary.files += 1
            summary.tensors += int(rows.integers("n_tensors").sum())
            summary.segments += len(rows)
            summary.verified += len(rows)
            summary.source_bytes += outcome.item.n_bytes
            restored.append(rows)
    summary.stored_bytes = record_bytes(Rows.joined(restored))


def _restore_tensor(
    arguments: argparse.Namespace, run: Run, store: SourceStore, found: FoundTensor, summary: Summary
) -> None:
    folder, _, name = arguments.target.rpartition("/")
    if not name.endswith(".safetensors") or folder.endswith(":/"):  # what begins a URL is a bucket, and no file
        folder, name = arguments.target, f"{file_name(found.tensor.name)}.safetensors"
    target = open_store(folder or "/", run.storage_options)
    summary.source_bytes = write_tensor(store, target, name, found, overwrite=arguments.overwrite)
    summary.files = summary.tensors = 1
    summary.segments = summary.verified = len(found.rows)
    summary.stored_bytes = record_bytes(found.rows)


def verify(arguments: argparse.Namespace, report: Report) -> int:
    """Check an archive; go on after a fault and list each."""
    from pipeline import verifying

    run = _run_settings(arguments)
    return verifying.verify(arguments, run, report, lambda: _executor(arguments, run))


def listing(arguments: argparse.Namespace, report: Report) -> int:
    """List the snapshots of an archive."""
    store = open_source(arguments.archive, _run_settings(arguments).storage_options)
    open_archive(store)
    latest = None if arguments.as_of is None else latest_time(arguments.as_of)
    found: list[dict[str, Any]] = []
    lines = []
    for checkpoint, numbers in checkpoints(store).items():
        tags = tags_of(store, checkpoint)
        for number, snapshot in each_snapshot(store, checkpoint, numbers):
            if isinstance(snapshot, DamageError):
                found.append({"snapshot": f"{checkpoint}/{number}", "damaged": str(snapshot)})
                lines.append(f"{checkpoint}/{number}  damaged: {snapshot}")
                continue
            if latest is not None and snapshot.time > latest:
                continue
            totals = snapshot.totals
            stored = stored_bytes_of(snapshot)
            found.append(
                {
                    "snapshot": snapshot.name,
                    "time": snapshot.time,
                    "files": totals.files,
                    "tensors": totals.tensors,
                    "source_bytes": totals.source_bytes,
                    "stored_bytes": stored,
                    "failures": len(snapshot.failures),
                    "tags": tags.get(number, []),
                }
            )
            lines.append(
                f"{snapshot.name}  {snapshot.time}  {totals.files} files  {totals.source_bytes:,} bytes in {stored:,}"
                f"  {' '.join(map(printable, tags.get(number, [])))}".rstrip()
            )
    report.give({"snapshots": found}, lines)
    return DONE


def prune(arguments: argparse.Namespace, report: Report) -> int:
    """Drop commits that no rule keeps."""
    from pipeline import keeping

    return keeping.prune(arguments, _run_settings(arguments), report)


def gc(arguments: argparse.Namespace, report: Report) -> int:
    """Remove what no commit needs."""
    from pipeline import keeping

    return keeping.gc(arguments, _run_settings(arguments), report)


def release_source(arguments: argparse.Namespace, report: Report) -> int:
    """Free the bytes of a source that is archived, on evidence."""
    from pipeline import releasing

    return releasing.release_source(arguments, _run_settings(arguments), report)


def rebuild(arguments: argparse.Namespace, report: Report) -> int:
    """Write lost manifests again, or commit a run that has lost its snapshot."""
    from pipeline import keeping

    return keeping.rebuild(arguments, _run_settings(arguments), report)


def info(arguments: argparse.Namespace, report: Report) -> int:
    """List the files and tensors of a snapshot."""
    from pipeline import showing

    store, snapshot, rows = _open(arguments, _run_settings(arguments))
    showing.show(store, snapshot, rows, arguments.include, arguments.exclude, report)
    return DONE


def explain(arguments: argparse.Namespace, report: Report) -> int:
    """Tell the program of a tensor and why it won."""
    from configs.recipe import load
    from pipeline.explaining import explain_tensor

    config = load(arguments.config, _overrides(arguments))
    store, snapshot, rows = _open(arguments, config.run)
    content, lines = explain_tensor(
        store, snapshot, archived_files(snapshot, rows), arguments.tensor, config.recipe.synth
    )
    report.give(content, lines)
    return DONE


def cat(arguments: argparse.Namespace, _report: Report) -> int:
    """Write the bytes of a file, or a range of them, to standard output."""
    store, snapshot, rows = _open(arguments, _run_settings(arguments))
    items = [item for item in archived_files(snapshot, rows) if item.entry.key == arguments.file]
    if not items:
        raise NothingMatchedError("a file of this name", "none", arguments.file, "see `brevis info`")
    item = items[0]
    check_file(item)
    begin, end = (0, item.n_bytes) if arguments.range is None else _range(arguments.range, item.n_bytes)
    for data in range_bytes(store, item, begin, end):
        with output():
            sys.stdout.buffer.write(data)
    with output():
        sys.stdout.buffer.flush()
    return DONE


def _range(text: str, n_bytes: int) -> tuple[int, int]:
    """Return the bounds of ``START:STOP`` in a file of `n_bytes`; either may be left out."""
    match = re.fullmatch(r"(\d*):(\d*)", text)
    begin, end = (int(match[1] or 0), int(match[2] or n_bytes)) if match else (1, 0)
    if not begin <= end <= n_bytes:
        raise UsageError(f"START:STOP within {n_bytes} bytes", text, "--range")
    return begin, end


def record_bytes(rows: Iterable[Row]) -> int:
    """Return the bytes of the records of `rows`; equal segments share one."""
    found = Rows.of(rows)
    return int(found.integers("stored_bytes")[found.have_new_records()].sum())


def default_checkpoint(source: str) -> str:
    """Return the last part of a source URL, the name of its checkpoint unless another is given."""
    path = source.removesuffix("*").rstrip("/")
    name = path.rsplit("/", 1)[-1] if "://" in path else Path(path).absolute().name
    if not name:
        raise UsageError("a source with a name, or --name", source, "archive")
    return name


def read_small_file(path: str) -> bytes:
    """Return the bytes of a file that the user names. Raises UsageError where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError("a readable file", error.strerror or str(error), path) from error


def file_name(tensor: str) -> str:
    """Return a name for the file of one tensor: what a path cannot hold becomes an underscore."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", tensor)[:120].lstrip(".") or "tensor"
