"""What need not be stored again: files that did not change, and segments that others are equal to.

All of it is decided before any task runs, from the plan and from the newest snapshot that it saw, its base; workers
never ask what exists, so that nothing races and any number of workers gives the same bytes:

- A file of the base's generation, under the base's recipe, is not read: its rows are those of the base.
- A segment that may be equal to one of the base takes that row along. Its task reads and hashes it; an equal digest
  shares the record, any other is stored.
- A segment that may be equal to an earlier one of the plan moves into the task of that one, where equal digests
  share a record, as they do in any task.

What may be equal is a question of fingerprints (`pipeline.sampling`); what is equal, of digests alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby

from operators.errors import DamageError, NotFoundError
from pipeline.archive import load_manifest, manifest_key, missing_packs, pack_sizes
from pipeline.commit import Base
from pipeline.packs import pack_key
from pipeline.plan import TASK_SEGMENTS, Finding, Part, Plan, Task
from pipeline.rows import Row
from pipeline.segments import Segment
from pipeline.store import ObjectInfo, SourceStore

MOVED_BYTES = 1 << 20
"""Neighbouring segments move to another task from this size on: below, a request costs more than a record."""
GATHERED_TASKS = 4
"""A task grows to at most as many of its size by what moves into it; the next equal segment starts anew."""
CANDIDATES = 4
"""Rows of the base with one fingerprint that a segment is compared with."""


# -- the base -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a run may take from its base.

    Attributes
    ----------
    rows : mapping of str to sequence of Row
        By file, of all files whose records are there.
    infos : mapping of str to ObjectInfo
        The generation of each of them.
    others, gone : sequence of Row
        Of the other files, those whose records are there, and those whose are not.
    packs : set of bytes
        Those of all its rows.
    lost : tuple of Finding
        Objects of the base that are gone or damaged.
    """

    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    infos: Mapping[str, ObjectInfo] = field(default_factory=dict)
    others: Sequence[Row] = ()
    gone: Sequence[Row] = ()
    packs: frozenset[bytes] = frozenset()
    lost: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, store: SourceStore, base: Base, recipe: str, damaged: Sequence[Finding] = ()) -> Earlier:
        """Look at `base`; one of another recipe has nothing to give, for a recipe is what decides bytes.

        `damaged` are packs that are there and of no use.
        """
        snapshot = base.snapshot
        if base.fault is not None:
            return cls(lost=(Finding(base.fault.where, base.fault.kind, str(base.fault)),))
        if snapshot is None or snapshot.recipe != recipe:
            return cls()
        try:
            rows = load_manifest(store, snapshot)
            sizes = pack_sizes(rows)
            missing = missing_packs(store, sizes)
        except (DamageError, NotFoundError) as error:
            return cls(lost=(Finding(manifest_key(snapshot.manifest), error.kind, str(error)),))
        lost = {finding.key: finding for finding in (*damaged, *missing)}
        by_file = {key: list(group) for key, group in groupby(rows, lambda row: row.file)}
        gone = [row for row in rows if pack_key(row.pack or b"") in lost] if lost else []
        broken = {row.file for row in gone}
        whole = {key: group for key, group in by_file.items() if key not in broken}
        others = [row for row in rows if row.file in broken and pack_key(row.pack or b"") not in lost]
        infos = {entry.key: entry.info for entry in snapshot.files if entry.key in whole}
        return cls(whole, infos, others, gone, frozenset(sizes), tuple(lost.values()))

    def all_rows(self) -> Iterator[Row]:
        """Yield the rows whose records are there."""
        yield from chain.from_iterable(self.rows.values())
        yield from self.others

    def unchanged(self, files: Iterable[ObjectInfo]) -> dict[str, Sequence[Row]]:
        """Return the rows of those `files` that are of the base's generation.

        Key, size and the store's own change token are the base's; where a store has no token, nothing is unchanged.
        """
        return {info.key: self.rows[info.key] for info in files if info.etag and self.infos.get(info.key) == info}

    def holds(self, rows: Iterable[Row]) -> bool:
        """Whether the base is of these segments, and of no others."""
        known = {(row.file, row.offset_bytes, row.digest) for some in self.rows.values() for row in some}
        return known == {(row.file, row.offset_bytes, row.digest) for row in rows}

    def with_candidates(self, tasks: Iterable[Task]) -> list[Task]:
        """Return `tasks`, each with the rows of the base that its segments may be equal to.

        Where a pack is gone its task takes what it took before, and no more, so that it stores that pack again.
        """
        by_fingerprint: dict[bytes, dict[bytes, Row]] = {}
        by_place: dict[tuple[str, int, int], Row] = {}
        for row in self.all_rows():
            assert row.digest is not None
            by_place[row.file, row.offset_bytes, row.n_bytes] = row
            if row.fingerprint is not None:
                alike = by_fingerprint.setdefault(row.fingerprint, {})
                if len(alike) < CANDIDATES:
                    alike.setdefault(row.digest, row)

        gone = {(row.file, row.offset_bytes, row.n_bytes) for row in self.gone}

        def candidates(task: Task) -> tuple[Row, ...]:
            found: dict[bytes, Row] = {}
            again = gone and any((row.file, row.offset_bytes, row.n_bytes) in gone for row in task.rows())
            for row in task.rows():
                same = by_place.get((row.file, row.offset_bytes, row.n_bytes))
                alike = by_fingerprint.get(row.fingerprint, {}) if row.fingerprint is not None and not again else {}
                for known in (*alike.values(), *((same,) if same is not None else ())):
                    found.setdefault(known.digest or b"", known)
            return tuple(found.values())

        return [replace(task, candidates=candidates(task)) for task in tasks] if by_place else list(tasks)


# -- the plan -----------------------------------------------------------------------------------


def gathered(plan: Plan, task_bytes: int) -> Plan:
    """Return `plan` with segments that may be equal in one task: that of the first of them.

    Parameters
    ----------
    plan : Plan
        Whose files were sampled.
    task_bytes : int
        Source bytes that a task aims at.
    """
    owners: dict[bytes, int] = {}
    held = [_Gathered([], task.n_bytes, sum(len(part.segments) for part in task.parts)) for task in plan.tasks]
    for ordinal, task in enumerate(plan.tasks):
        for run in (run for part in task.parts for run in _runs(part, owners)):
            owner = owners.get(run.fingerprints[0], ordinal) if run.fingerprints else ordinal
            if owner != ordinal and run.n_bytes >= MOVED_BYTES:
                if held[owner].has_room(run, GATHERED_TASKS * task_bytes):
                    held[owner].take(run)
                    continue
                owners.update(dict.fromkeys(run.fingerprints, ordinal))
            held[ordinal].parts.append(run)
            for fingerprint in run.fingerprints:
                owners.setdefault(fingerprint, ordinal)
    parts = [tuple(_merged(one.parts)) for one in held if one.parts]
    return replace(plan, tasks=tuple(Task(ordinal, some) for ordinal, some in enumerate(parts)))


@dataclass(slots=True)
class _Gathered:
    """A task while others move into it."""

    parts: list[Part]
    n_bytes: int
    n_segments: int

    def has_room(self, run: Part, n_bytes: int) -> bool:
        return self.n_bytes + run.n_bytes <= n_bytes and self.n_segments + len(run.segments) <= TASK_SEGMENTS

    def take(self, run: Part) -> None:
        self.parts.append(run)
        self.n_bytes += run.n_bytes
        self.n_segments += len(run.segments)


def _runs(part: Part, owners: Mapping[bytes, int]) -> Iterator[Part]:
    """Cut a part into neighbours whose earlier equals may be in one task, or that have none."""
    if not part.fingerprints:
        yield part
        return
    first = 0
    for _, group in groupby([owners.get(fingerprint) for fingerprint in part.fingerprints]):
        stop = first + sum(1 for _ in group)
        yield part.slice(first, stop)
        first = stop


def _merged(runs: Sequence[Part]) -> Iterator[Part]:
    """Yield the parts of a task: one for each file, in the order of their first runs, its segments in order."""
    by_file: dict[str, list[Part]] = {}
    for run in runs:
        by_file.setdefault(run.info.key, []).append(run)
    for same in by_file.values():
        segments: list[Segment] = []
        fingerprints: list[bytes] = []
        for run in sorted(same, key=lambda run: run.segments[0].offset_bytes):
            segments += run.segments
            fingerprints += run.fingerprints
        yield replace(same[0], segments=tuple(segments), fingerprints=tuple(fingerprints))


# -- what was saved -----------------------------------------------------------------------------


def new_pack_bytes(rows: Iterable[Row], earlier: Earlier) -> int:
    """Return the size of the packs of `rows` that the base does not have."""
    return sum({row.pack: row.pack_bytes or 0 for row in rows if row.pack not in earlier.packs}.values())


def shared_bytes(rows: Iterable[Row], earlier: Earlier) -> int:
    """Return the source bytes of those `rows` whose record the base has, or one of them before."""
    seen = {(row.pack, row.pack_offset) for row in earlier.all_rows()}
    n_bytes = 0
    for row in rows:
        place = (row.pack, row.pack_offset)
        n_bytes += row.n_bytes if place in seen else 0
        seen.add(place)
    return n_bytes
