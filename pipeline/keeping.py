"""The commands that keep an archive small and whole: prune, gc, rebuild. Nothing goes without ``--yes``."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from configs.loader import Run
from operators.errors import ArchiveNotFoundError, DamageError, NotFoundError, NothingMatchedError, UsageError
from pipeline.archive import checkpoints, each_snapshot, load_snapshot, manifest_bytes, open_archive
from pipeline.garbage import HOUR, Collected, collect, mark
from pipeline.locations import open_store
from pipeline.rebuild import (
    Found,
    commit_found,
    find_lost,
    found_in_packs,
    found_of_snapshot,
    lost_runs,
    rebuild_manifest,
)
from pipeline.report import Report, printable
from pipeline.retention import Kept, Policy, decide_kept, expire, read_kept, revive
from pipeline.salvage import Packs
from pipeline.snapshots import clock_text, package_version, time_text
from pipeline.store import Store
from pipeline.summary import DONE, FAILED_ITEMS, Failed


def prune(arguments: argparse.Namespace, run: Run, report: Report) -> int:
    """Drop the commits that no rule keeps, or those that are named; bring one back with ``--undo``."""
    store = open_store(arguments.archive, run.storage_options)
    open_archive(store)
    if arguments.undo is not None:
        checkpoint, seq = _name(arguments.undo)
        revive(store, checkpoint, seq)
        report.give({"command": "prune", "revived": f"{checkpoint}/{seq}"}, [f"{checkpoint}/{seq} is back"])
        return DONE
    policy = Policy(
        arguments.keep_last,
        arguments.keep_daily,
        arguments.keep_weekly,
        arguments.keep_monthly,
        frozenset(arguments.keep_tag),
    )
    if policy.is_empty() is not bool(arguments.snapshot):
        found = "neither" if policy.is_empty() else "both"
        raise UsageError("rules (--keep-last and the like), or --snapshot CHECKPOINT/SEQ", found, "prune")
    known = _chosen(store, arguments.name)
    snapshots = _named(known, arguments.snapshot) if arguments.snapshot else _ruled(known, policy)
    dropped = [one for one in snapshots if not one.reasons]
    if arguments.yes:
        for one in reversed(dropped):  # the oldest first
            expire(store, one.checkpoint, one.seq, released=bool(arguments.snapshot))
    fate = "dropped" if arguments.yes else "would go (--yes drops them)"
    report.give(
        {
            "command": "prune",
            "dry_run": not arguments.yes,
            "kept": len(snapshots) - len(dropped),
            "dropped": len(dropped),
            "snapshots": [
                {"snapshot": one.name, "time": one.time, "tags": sorted(one.tags), "kept_by": list(one.reasons)}
                for one in snapshots
            ],
        },
        [
            *(
                f"{'keep' if one.reasons else 'drop'}  {one.name}  {one.time}  {', '.join(one.reasons)}"
                for one in snapshots
            ),
            f"{len(dropped)} of {len(snapshots)} snapshots {fate}",
        ],
    )
    return DONE


def _chosen(store: Store, names: list[str]) -> dict[str, list[Kept]]:
    known = checkpoints(store)
    if unknown := [name for name in names if name not in known]:
        raise ArchiveNotFoundError("a checkpoint", unknown[0], store.url, f"known: {', '.join(known)[:400]}")
    return {name: read_kept(store, name) for name in (names or known)}


def _ruled(known: dict[str, list[Kept]], policy: Policy) -> list[Kept]:
    return [one for name in sorted(known) for one in decide_kept(known[name], policy)]


def _named(known: dict[str, list[Kept]], names: list[str]) -> list[Kept]:
    found = {one.name: one for kept in known.values() for one in kept}
    wanted = ["/".join(map(str, _name(name))) for name in names]
    if unknown := [name for name in wanted if name not in found]:
        raise NothingMatchedError("a snapshot CHECKPOINT/SEQ", unknown[0], "--snapshot", "see `brevis list`")
    return [found[name] for name in dict.fromkeys(wanted)]


def _name(text: str) -> tuple[str, int]:
    checkpoint, _, seq = text.rpartition("/")
    if not checkpoint or not seq.isdecimal():
        raise UsageError("CHECKPOINT/SEQ", text, "prune", "see `brevis list`")
    return checkpoint, int(seq)


def rebuild(arguments: argparse.Namespace, run: Run, report: Report) -> int:
    """Write lost manifests again, and tell of runs without a commit; or show, and commit, what is left of something."""
    store = open_store(arguments.archive, run.storage_options)
    open_archive(store)
    packs = Packs(store)
    chosen = [arguments.run is not None, arguments.snapshot is not None, arguments.packs]
    if sum(chosen) > 1 or (arguments.name is not None and not any(chosen)):
        raise UsageError("one of --run, --snapshot and --packs", f"{sum(chosen)}", "rebuild")
    if not any(chosen):
        return _rebuild_manifests(store, packs, report)
    if arguments.run is not None:
        found = find_lost(store, arguments.run)
    elif arguments.snapshot is not None:
        found = found_of_snapshot(store, load_snapshot(store, *_name(arguments.snapshot)), packs)
    else:
        found = found_in_packs(store, packs)
    content = {"command": "rebuild", **_told(found)}
    lines = [f"{printable(failure.key)}: {failure.detail}" for failure in found.failures]
    lines.append(f"{len(found.files)} files are whole, {len(found.failures)} are not; --name CHECKPOINT commits them")
    if arguments.name is not None:
        now = time_text(datetime.now(UTC))
        snapshot = commit_found(store, found, arguments.name, package_version(), now)
        content |= {"snapshot": snapshot.name, "manifest": snapshot.manifest}
        lines[-1] = f"{snapshot.name} holds {len(found.files)} files, {len(found.failures)} are lost"
    report.give(content, lines)
    return FAILED_ITEMS if found.failures else DONE


def _rebuild_manifests(store: Store, packs: Packs, report: Report) -> int:
    rebuilt, failures = [], []
    for checkpoint, numbers in checkpoints(store).items():
        for seq, snapshot in each_snapshot(store, checkpoint, numbers):
            if isinstance(snapshot, DamageError):
                failures.append(Failed.of(f"{checkpoint}/{seq}", snapshot))
                continue
            try:
                with contextlib.suppress(DamageError, NotFoundError):
                    manifest_bytes(store, snapshot)
                    continue
                rebuild_manifest(store, snapshot, packs)
                rebuilt.append(snapshot.name)
            except (DamageError, NotFoundError) as error:
                failures.append(Failed.of(f"{checkpoint}/{seq}", error))
    runs = [find_lost(store, name) for name in lost_runs(store)]
    report.give(
        {
            "command": "rebuild",
            "manifests": rebuilt,
            "failures": [asdict(failure) for failure in failures],
            "runs": [_told(lost) for lost in runs],
        },
        [
            *(f"{name}: its manifest was written again" for name in rebuilt),
            *(f"{printable(failure.key)}: {failure.message}" for failure in failures),
            *(f"run {lost.run}: {len(lost.files)} files are whole, {len(lost.failures)} are not" for lost in runs),
            f"{len(rebuilt)} manifests rebuilt, {len(failures)} lost, {len(runs)} runs without a commit",
        ],
    )
    return FAILED_ITEMS if failures else DONE


def _told(found: Found) -> dict[str, Any]:
    return {
        "run": found.run,
        "files": [{"key": info.key, "n_bytes": info.n_bytes} for info in found.files],
        "lost": [asdict(finding) for finding in found.failures],
    }


def gc(arguments: argparse.Namespace, run: Run, report: Report) -> int:
    """Remove what nothing needs: condemned by one pass, gone with another that comes a day later."""
    store = open_store(arguments.archive, run.storage_options)
    open_archive(store)
    floor_seconds, dry_run = arguments.min_age * HOUR, not arguments.yes
    removed: list[str] = []
    result = Collected(mark(store, floor_seconds)) if dry_run else collect(store, floor_seconds, removed.append)
    report.give(_content(result, removed, dry_run=dry_run), _lines(result, removed, dry_run=dry_run))
    return DONE


def _content(result: Collected, removed: list[str], *, dry_run: bool) -> dict[str, Any]:
    marked = result.marked
    return {
        "command": "gc",
        "dry_run": dry_run,
        "live": {"objects": marked.live, "bytes": marked.live_bytes},
        "young": {"objects": marked.young, "bytes": marked.young_bytes},
        "garbage": {
            "objects": len(marked.garbage),
            "bytes": sum(marked.garbage.values()),
            "keys": [{"key": key, "n_bytes": n_bytes} for key, n_bytes in marked.garbage.items()],
        },
        "unfinished": [{"key": item.key, "n_bytes": item.n_bytes, "upload": item.upload} for item in marked.left],
        "removed": {"objects": result.removed, "bytes": result.removed_bytes, "keys": removed},
        "condemned": result.condemned,
        "ready": clock_text(result.ready) if result.ready else "",
    }


def _lines(result: Collected, removed: list[str], *, dry_run: bool) -> list[str]:
    marked = result.marked
    garbage_bytes = sum(marked.garbage.values())
    lines = [f"removed  {printable(key)}" for key in removed]
    lines += [f"{n_bytes:>16,}  {printable(key)}" for key, n_bytes in marked.garbage.items()]
    lines += [f"{item.n_bytes:>16,}  {printable(item.key)}  never finished" for item in marked.left if dry_run]
    lines.append(f"{marked.live} objects, {marked.live_bytes:,} bytes are needed")
    lines.append(f"{marked.young} objects, {marked.young_bytes:,} bytes are not, but too young")
    if result.removed:
        lines.append(f"{result.removed} objects, {result.removed_bytes:,} bytes were removed")
    if marked.garbage:
        ready = f"may go from {clock_text(result.ready)} on: run gc again then"
        fate = ready if result.ready else "--yes condemns them"
        lines.append(f"{len(marked.garbage)} objects, {garbage_bytes:,} bytes are garbage; {fate}")
    return lines
