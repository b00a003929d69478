"""The driver of ``archive``: inventory, plan, calibration, tasks, commit.

It holds rows, never tensor bytes beyond the calibration's sample; workers read and write the stores.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version

import zstandard
from blake3 import blake3

from configs.recipe import Config, recipe_digest
from operators.errors import (
    ArchiveError,
    ChangedError,
    DamageError,
    NothingMatchedError,
    StoreError,
    UsageError,
)
from operators.record import WRITER_REVISION
from pipeline.archive import FOLDERS, create_archive, load_manifest, refuse_own_folders
from pipeline.calibration import Pupil, learn_prior
from pipeline.commit import (
    Base,
    Draft,
    adopt_prior,
    commit,
    find_base,
    find_prior,
    find_receipts,
    go_on,
    is_unchanged,
)
from pipeline.duplicates import Earlier, new_pack_bytes, shared_bytes
from pipeline.executors import Executor
from pipeline.lint import lint
from pipeline.locations import folder_url, open_source, open_store, source_folder
from pipeline.meters import count
from pipeline.plan import Finding, select
from pipeline.planning import Planned, plan_run
from pipeline.progress import Progress
from pipeline.retention import add_tags
from pipeline.rows import Rows
from pipeline.snapshots import Snapshot, package_version, time_text
from pipeline.store import TAG_COUNT, Headers, ObjectInfo, SourceStore, Store
from pipeline.store_base import changed
from pipeline.summary import Failed, Summary, stored_bytes_of
from pipeline.tasks import ArchiveJob
from pipeline.verify import VerifyJob, damaged_packs
from synth.prior import Prior

ALARM = "decode_mismatch"
"""The reason of a warning that a record did not decode to what it was made of: a fault of the machine or of ours."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a user asks of ``archive``.

    Attributes
    ----------
    source_url, archive_url : str
    checkpoint : str
        Its name in the archive.
    include, exclude : tuple of str
    prior : bytes or None
        A prior that replaces the learning.
    strict_format, single_writer : bool
    tags : tuple of str
        Given to the snapshot, also where there is nothing to do.
    checksum : bool
        Read and compare every file, also those that the store says are unchanged.
    repair : bool
        Read the packs of the newest snapshot, and store again what is in damaged ones.
    as_of : str or None
        Take the source as it was at the end of this second; see `open_source`.
    """

    source_url: str
    archive_url: str
    checkpoint: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    prior: bytes | None = None
    strict_format: bool = False
    single_writer: bool = False
    tags: tuple[str, ...] = ()
    checksum: bool = False
    repair: bool = False
    as_of: str | None = None


class ArchiveRun:
    """One ``archive`` command.

    Parameters
    ----------
    order : Order
    config : Config
    """

    def __init__(self, order: Order, config: Config) -> None:
        self.order = order
        self.config = config
        options = config.run.storage_options
        self.source: SourceStore = open_source(order.source_url, options, versions=True, as_of=order.as_of)
        self.archive: Store = open_store(order.archive_url, options, single_writer=order.single_writer)
        self.base_prior = self._base_prior()

    def _base_prior(self) -> Prior:
        if self.order.prior is not None:
            try:
                return Prior.load(self.order.prior)
            except ArchiveError as error:
                raise UsageError("a prior that a run has stored", str(error), "--prior") from error
        return Prior.uniform() if self.config.recipe.synth.prior == "uniform" else Prior.shipped()

    def inventory(self) -> list[ObjectInfo]:
        """List the source, filtered, without the archive itself where it lies inside.

        Raises
        ------
        NothingMatchedError
            Nothing is left.
        """
        inside = inside_source(self.order.source_url, self.order.archive_url)
        listed = [info for info in self.source.list() if inside is None or not info.key.startswith(inside)]
        listed = _without_links_into(self.order.archive_url, self.order.source_url, listed)
        files = select(listed, self.order.include, self.order.exclude)
        if not files:
            found = f"none of {len(listed)}" if listed else "an empty source"
            raise NothingMatchedError("at least one object", found, self.order.source_url, "check SRC and the filters")
        return files

    def run(self, executor: Executor, progress: Progress) -> Summary:
        """Archive, or find that there is nothing to do.

        Raises
        ------
        ArchiveError
            The run failed as a whole; what was stored stays for the next attempt.
        """
        started = time.monotonic()
        summary = Summary("archive")
        files = self.inventory()
        create_archive(self.archive, single_writer=self.order.single_writer)
        recipe = self._recipe_digest()
        base = find_base(self.archive, self.order.checkpoint)
        earlier = Earlier.of(self.archive, base, recipe, self._damaged(base, recipe, executor))
        unchanged = base.snapshot if is_unchanged(base, files, recipe) and not earlier.lost else None
        if unchanged is not None and not self.order.checksum:
            return self._up_to_date(summary, unchanged, files, started)
        draft = Draft(self.order.checkpoint, base.seq, recipe, tuple(files), (), package_version())
        attempt = self._attempt(draft, base, earlier, executor, progress, summary)
        if again := attempt.again if self.config.run.on_changing == "retry" else []:
            draft = replace(draft, inventory=attempt.newest, apart=(attempt.draft.run,))
            del attempt  # two would take twice the memory
            attempt = self._attempt(draft, base, earlier, executor, progress, summary)
            summary.warnings += [Finding(key, "read_again", "it changed during the run") for key in again]
        files = list(draft.inventory)
        unchanged = base.snapshot if is_unchanged(base, files, recipe) and not earlier.lost else None
        draft, rows, unchanged_rows = attempt.draft, attempt.rows, attempt.unchanged
        warnings, failed = attempt.warnings, attempt.failures
        del attempt  # a commit needs its memory
        summary.failures = list({failure.key: failure for failure in failed}.values())
        findings = tuple(
            Finding(failure.key, failure.reason, failure.message)
            for failure in sorted(summary.failures, key=lambda failure: failure.key)
        )
        if unchanged is not None and _headers_of(unchanged) == draft.headers and not findings and earlier.holds(rows):
            return self._up_to_date(summary, unchanged, files, started)
        draft = replace(draft, failures=findings)
        if not draft.files:
            first = summary.failures[0]
            found = f"none: {first.message.removesuffix(f'; {first.next_step}')}"
            raise StoreError("at least one file that can be archived", found, self.order.source_url, first.next_step)
        summary.unchanged_bytes = int(unchanged_rows.integers("n_bytes").sum())
        summary.deduplicated_bytes = shared_bytes(rows, earlier)
        rows = Rows.joined((rows, unchanged_rows))
        now = time_text(datetime.now(UTC))
        snapshot = commit(self.archive, draft, rows, self.source.list, now)
        summary.failures += self._strict([*warnings, *_alarms(summary)])
        return self._finished(summary, snapshot, started)

    def _attempt(
        self,
        draft: Draft,
        base: Base,
        earlier: Earlier,
        executor: Executor,
        progress: Progress,
        summary: Summary,
    ) -> _Attempt:
        """Plan a run and do its tasks, but those that the run which `draft` goes on from has done."""
        files, before = draft.inventory, draft.apart
        task_bytes = self.config.recipe.task_bytes
        pupil, checksum = Pupil(), self.order.checksum
        planned = plan_run(self.source, self.archive, draft, earlier, task_bytes, checksum=checksum, watch=pupil.watch)
        draft, plan, failed = planned.draft, planned.plan, planned.failures
        summary.warnings = [*earlier.lost, *planned.warnings, *lint(draft.files, self._read), *_alarms(summary)]
        summary.warnings += _unread_tags(draft.headers)
        self._refuse_changing(failed)
        for run in before:
            go_on(self.archive, run, draft.run, plan.tasks)
        done = find_receipts(self.archive, draft.run, plan.tasks)
        summary.resumed_tasks = len(done)
        receipts = dict(done)
        progress.expect(plan.n_bytes)
        progress.add(sum(task.n_bytes for task in plan.tasks if task.ordinal in done))
        pending = earlier.with_candidates(task for task in plan.tasks if task.ordinal not in done)
        for outcome in executor.run(self._job(planned, base, pupil), pending) if pending else ():
            task, receipt = outcome.item, outcome.result
            summary.retries += outcome.attempts - 1
            progress.add(task.n_bytes)
            progress.note(f"task {task.ordinal + 1} of {len(plan.tasks)}: {outcome.error or 'stored'}")
            if receipt is None:
                assert outcome.error is not None
                failed += [Failed.of(part.info.key, outcome.error) for part in task.parts]
                continue
            receipts[task.ordinal] = rows = Rows.of(receipt.rows)
            count("brevis_stored_bytes", new_pack_bytes(rows, earlier))
            unread = [Failed.of(key, error) for key, error in receipt.failures]
            self._refuse_changing(unread)
            failed += unread
            summary.verified += len(rows)
            summary.warnings += [Finding(where, ALARM, "stored as plain bytes") for where in receipt.alarms]
        rows = Rows.joined(receipts[ordinal] for ordinal in sorted(receipts))
        unchanged, warnings = planned.unchanged, planned.warnings
        del plan, planned, pending, receipts, done  # a listing needs their memory
        now = {info.key: info for info in self.source.list()}
        found = self._changed(files, now, summary)
        self._refuse_changing(found)
        newest = tuple(now.get(info.key, info) for info in files)
        lost = {info.key for info in files if info.key not in now} - {failure.key for failure in failed}
        return _Attempt(draft, rows, unchanged, warnings, [*failed, *found], newest, not lost)

    def _refuse_changing(self, failed: Iterable[Failed]) -> None:
        """Stop the run at the first file that changed, where the user wants that."""
        if self.config.run.on_changing == "fail" and (keys := _changing(failed)):
            raise ChangedError("a source at rest", "another generation", keys[0], "run again when it is at rest")

    def _damaged(self, base: Base, recipe: str, executor: Executor) -> list[Finding]:
        """Return the packs of the base that have not their digest, where the user wants them read."""
        snapshot = base.snapshot
        if not self.order.repair or snapshot is None or snapshot.recipe != recipe:
            return []  # under another recipe all is stored again
        try:
            rows = load_manifest(self.archive, snapshot)
        except DamageError:
            return []  # which `Earlier` tells
        job = VerifyJob(self.order.archive_url, dict(self.config.run.storage_options), "bytes")
        return damaged_packs(job, rows, executor)

    def _up_to_date(self, summary: Summary, snapshot: Snapshot, files: Sequence[ObjectInfo], started: float) -> Summary:
        summary.unchanged = True
        known = [Finding(entry.key, entry.reason) for entry in snapshot.files if entry.reason is not None]
        summary.warnings = [*known, *lint(files, self._read), *_unread_tags(_headers_of(snapshot))]
        summary.failures = self._strict(known)
        return self._finished(summary, snapshot, started)

    def _strict(self, faults: Iterable[Finding]) -> list[Failed]:
        """Return faults of formats and alarms as failures, where the user wants that; the files are archived anyway."""
        if not self.order.strict_format:
            return []
        next_step = "leave out --strict-format to accept it"
        return [Failed(found.key, found.reason, found.detail or found.reason, next_step) for found in faults]

    def _recipe_digest(self) -> str:
        """Return the digest of everything that decides bytes: settings, prior, and the libraries that write some."""
        zstd = ".".join(map(str, zstandard.ZSTD_VERSION))
        libraries = f"{zstd}, zstandard {zstandard.__version__}, pyarrow {version('pyarrow')}"
        prior = blake3(self.base_prior.dump()).hexdigest()
        return recipe_digest(self.config.recipe, prior, WRITER_REVISION, libraries)

    def _job(self, planned: Planned, base: Base, pupil: Pupil) -> ArchiveJob:
        run, options = planned.draft.run, self.config.recipe.synth
        prior = self.base_prior
        known = find_prior(self.archive, run)
        if known is None and planned.is_small_change and base.snapshot is not None:
            known = self._inherited(base.snapshot.run)
        if known is None and options.prior == "learned" and self.order.prior is None:
            prior = learn_prior(self.source, planned.plan, options, prior, pupil)
        return ArchiveJob(
            self.order.source_url,
            self.order.archive_url,
            dict(self.config.run.storage_options),
            run,
            options,
            adopt_prior(self.archive, run, known or prior.dump()),
            self.config.run.scratch_dir,
            self.order.single_writer,
            self.order.as_of,
        )

    def _inherited(self, run: str) -> bytes | None:
        """Return the prior of an earlier run, unless it is gone or damaged."""
        prior = find_prior(self.archive, run)
        try:
            return prior and Prior.load(prior).dump()
        except DamageError:
            return None

    def _changed(self, files: Iterable[ObjectInfo], now: Mapping[str, ObjectInfo], summary: Summary) -> list[Failed]:
        """Name the files that are no longer what was planned, so that the others can be committed.

        One that is gone was read whole before, or it has failed already: what is archived may be its last copy.
        """
        failed = []
        for info in files:
            if info.key not in now:
                summary.warnings.append(Finding(info.key, "vanished", "it went away during the run"))
            elif now[info.key] != info:
                failed.append(Failed.of(info.key, changed(info.key)))
        return failed

    def _read(self, info: ObjectInfo, offset_bytes: int, n_bytes: int) -> bytes:
        return bytes(self.source.get_ranges(info, [(offset_bytes, offset_bytes + n_bytes)])[0])

    def _finished(self, summary: Summary, snapshot: Snapshot, started: float) -> Summary:
        add_tags(self.archive, snapshot.checkpoint, snapshot.seq, self.order.tags)
        totals = snapshot.totals
        summary.source_bytes = totals.source_bytes
        summary.stored_bytes = stored_bytes_of(snapshot)
        summary.files, summary.tensors, summary.segments = totals.files, totals.tensors, totals.segments
        summary.snapshot, summary.run = snapshot.name, snapshot.run
        summary.content = snapshot.content
        summary.seconds = time.monotonic() - started
        return summary


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What came of the tasks of a run.

    Attributes
    ----------
    draft : Draft
    rows, unchanged : Rows
        Of the files that were read, and of those that were not.
    warnings : list of Finding
        Faults of formats.
    failures : list of Failed
    newest : tuple of ObjectInfo
        The inventory with each object as it was listed after the tasks, or as before where it is gone.
    is_all_there : bool
        Whether no file is gone but those that failed.
    """

    draft: Draft
    rows: Rows
    unchanged: Rows
    warnings: list[Finding]
    failures: list[Failed]
    newest: tuple[ObjectInfo, ...]
    is_all_there: bool

    @property
    def again(self) -> list[str]:
        """Keys of files that changed and can be read again without the loss of one that was read and is gone."""
        return _changing(self.failures) if self.is_all_there else []


def _headers_of(snapshot: Snapshot) -> dict[str, Headers]:
    return {entry.key: entry.headers for entry in snapshot.files if entry.headers}


def _unread_tags(headers: Mapping[str, Headers]) -> list[Finding]:
    """Name the objects whose tags were there and could not be read."""
    counts = {key: dict(told)[TAG_COUNT] for key, told in headers.items() if TAG_COUNT in dict(told)}
    return [Finding(key, "tags_unread", f"{n} tags; it takes s3:GetObjectTagging") for key, n in sorted(counts.items())]


def _alarms(summary: Summary) -> list[Finding]:
    return [found for found in summary.warnings if found.reason == ALARM]


def _changing(failed: Iterable[Failed]) -> list[str]:
    return sorted({failure.key for failure in failed if failure.reason == ChangedError.kind})


def inside_source(source_url: str, archive_url: str) -> str | None:
    """Return the prefix of the archive below the source, or None where it lies elsewhere.

    Raises
    ------
    UsageError
        They are the same place, or the source is a part of the archive.
    """
    source, archive = folder_url(source_folder(source_url)), folder_url(archive_url)
    if source == archive and not source_url.endswith("*"):
        raise UsageError("an archive apart from its source", "the same place", archive_url, "name another ARCHIVE")
    refuse_own_folders(archive_url, source_url)
    return archive.removeprefix(source) if archive.startswith(source) else None


def _without_links_into(archive_url: str, source_url: str, listed: list[ObjectInfo]) -> list[ObjectInfo]:
    """Leave out what links in a local source lead to in a local archive, which would archive itself."""
    source, archive = folder_url(source_folder(source_url)), folder_url(archive_url)
    if not (source.startswith("file:") and archive.startswith("file:")):
        return listed

    def is_own(folder: str) -> bool:
        place = folder_url(f"{source}{folder}")
        if not place.startswith(archive):
            return False
        # A source may lie in the folder of the archive, apart from what the archive holds there.
        return not source.startswith(archive) or place.removeprefix(archive).partition("/")[0] in FOLDERS

    own = {folder for folder in {info.key.rpartition("/")[0] for info in listed} if is_own(folder)}
    return [info for info in listed if info.key.rpartition("/")[0] not in own]
