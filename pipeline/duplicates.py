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
from itertools import groupby

import numpy as np

from operators.errors import DamageError
from pipeline.archive import load_manifest, manifest_key, missing_packs, pack_sizes
from pipeline.commit import Base
from pipeline.packs import pack_key
from pipeline.plan import TASK_SEGMENTS, Finding, Part, Plan, Task
from pipeline.rows import Row, Rows, held_fingerprints, held_segments, values_of
from pipeline.segments import Segment
from pipeline.store import Headers, ObjectInfo, SourceStore

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
    rows : mapping of str to Rows
        By file, of all files whose records are there.
    infos : mapping of str to ObjectInfo
        The generation of each of them.
    headers : mapping of str to Headers
        Of those of them that have some.
    others, gone : Rows
        Of the other files, those whose records are there, and those whose are not.
    packs : set of bytes
        Those of all its rows.
    lost : tuple of Finding
        Objects of the base that are gone or damaged.
    """

    rows: Mapping[str, Rows] = field(default_factory=dict)
    infos: Mapping[str, ObjectInfo] = field(default_factory=dict)
    headers: Mapping[str, Headers] = field(default_factory=dict)
    others: Rows = field(default_factory=Rows)
    gone: Rows = field(default_factory=Rows)
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
        except DamageError as error:
            return cls(lost=(Finding(manifest_key(snapshot.manifest), error.kind, str(error)),))
        lost = {finding.key: finding for finding in (*damaged, *missing)}
        by_file = {key: group for (key,), group in rows.by("file")}
        are_gone = [pack_key(pack) in lost for pack, _ in rows.values("pack", "file")] if lost else [False] * len(rows)
        gone = rows.where(are_gone)
        broken = {file for file, _ in gone.values("file", "task")}
        whole = {key: group for key, group in by_file.items() if key not in broken}
        others = rows.where(not is_gone for is_gone in are_gone).of_files(broken)
        infos = {entry.key: entry.info for entry in snapshot.files if entry.key in whole}
        headers = {entry.key: entry.headers for entry in snapshot.files if entry.key in whole and entry.headers}
        return cls(whole, infos, headers, others, gone, frozenset(sizes), tuple(lost.values()))

    def all_rows(self) -> Rows:
        """Return the rows whose records are there."""
        return Rows.joined((*self.rows.values(), self.others))

    def unchanged(self, files: Iterable[ObjectInfo]) -> dict[str, Rows]:
        """Return the rows of those `files` that are of the base's generation.

        Key, size and the store's own change token are the base's; where a store has no token, nothing is unchanged.
        """
        return {info.key: self.rows[info.key] for info in files if info.etag and self.infos.get(info.key) == info}

    def holds(self, rows: Rows) -> bool:
        """Whether the base is of these segments, and of no others."""
        columns = ("file", "offset_bytes", "digest")
        known = Rows.joined(self.rows.values()).ordered()
        pairs = zip(known.values(*columns), rows.ordered().values(*columns), strict=False)
        return len(known) == len(rows) and all(mine == its for mine, its in pairs)

    def with_candidates(self, tasks: Iterable[Task]) -> list[Task]:
        """Return `tasks`, each with the rows of the base that its segments may be equal to.

        Where a pack is gone its task takes what it took before, and no more, so that it stores that pack again.
        """
        known = self.all_rows()
        wanted = list(tasks)
        if not known:
            return wanted
        columns = ("file", "offset_bytes", "n_bytes")
        index, gone = _Index(known), set(self.gone.values(*columns))

        def candidates(task: Task) -> Rows:
            found: dict[bytes, int] = {}
            again = any((row.file, row.offset_bytes, row.n_bytes) in gone for row in task.rows()) if gone else False
            for row in task.rows():
                alike = index.alike(row.fingerprint) if row.fingerprint is not None and not again else ()
                for place in (*alike, *index.at(row.file, row.offset_bytes, row.n_bytes)):
                    found.setdefault(index.digests[place], place)
            return known.take(np.array(list(found.values()), np.int64))

        return [replace(task, candidates=candidates(task)) for task in wanted]


class _Index:
    """Finds rows by their place and by their fingerprint, in arrays: there may be millions.

    Parameters
    ----------
    rows : Rows
        Of each file in the order of offsets.
    """

    def __init__(self, rows: Rows) -> None:
        self.digests: list[bytes] = [digest for (digest,) in rows.values("digest")]
        self._offsets, self._sizes = rows.integers("offset_bytes"), rows.integers("n_bytes")
        self._files: dict[str, tuple[int, int]] = {}
        first = 0
        for (file,), group in rows.by("file"):
            self._files[file] = first, first + len(group)
            first += len(group)
        found = [fingerprint for (fingerprint,) in rows.values("fingerprint")]
        sampled = np.flatnonzero([fingerprint is not None for fingerprint in found])
        keys = np.frombuffer(b"".join(filter(None, found)), np.uint64)
        order = np.argsort(keys, kind="stable")
        few = self._few(keys[order].tolist(), sampled[order].tolist())
        self._keys, self._alike = keys[order][few], sampled[order][few]

    def _few(self, keys: list[int], places: list[int]) -> list[int]:
        """Return where in `keys`, which are sorted, the first `CANDIDATES` other segments of each fingerprint are."""
        few: list[int] = []
        last, seen = None, set[bytes]()
        for at, (key, place) in enumerate(zip(keys, places, strict=True)):
            if key != last:
                last, seen = key, set()
            if len(seen) < CANDIDATES and self.digests[place] not in seen:
                seen.add(self.digests[place])
                few.append(at)
        return few

    def at(self, file: str, offset_bytes: int, n_bytes: int) -> list[int]:
        """Return the row of this place, if there is one."""
        first, stop = self._files.get(file, (0, 0))
        place = first + int(np.searchsorted(self._offsets[first:stop], offset_bytes))
        is_there = place < stop and (self._offsets[place], self._sizes[place]) == (offset_bytes, n_bytes)
        return [place] if is_there else []

    def alike(self, fingerprint: bytes) -> list[int]:
        """Return rows with this fingerprint."""
        [key] = np.frombuffer(fingerprint, np.uint64)
        first, stop = (int(np.searchsorted(self._keys, key, side)) for side in ("left", "right"))
        return list(map(int, self._alike[first:stop]))


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
    repeated = _repeated(plan)
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
                if fingerprint in repeated:
                    owners.setdefault(fingerprint, ordinal)
    parts = [tuple(_merged(one.parts)) for one in held if one.parts]
    return replace(plan, tasks=tuple(Task(ordinal, some) for ordinal, some in enumerate(parts)))


def _repeated(plan: Plan) -> frozenset[bytes]:
    """Return the fingerprints that more than one segment has: of few, where there may be millions."""
    found = b"".join(fingerprint for task in plan.tasks for part in task.parts for fingerprint in part.fingerprints)
    distinct, counts = np.unique(np.frombuffer(found, np.uint64), return_counts=True)
    return frozenset(fingerprint.tobytes() for fingerprint in distinct[counts > 1])


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
        if len(same) == 1:
            yield same[0]
            continue
        segments: list[Segment] = []
        fingerprints: list[bytes] = []
        for run in sorted(same, key=lambda run: run.segments[0].offset_bytes):
            segments += run.segments
            fingerprints += run.fingerprints
        yield replace(
            same[0], segments=held_segments(tuple(segments)), fingerprints=held_fingerprints(tuple(fingerprints))
        )


# -- what was saved -----------------------------------------------------------------------------


def new_pack_bytes(rows: Iterable[Row], earlier: Earlier) -> int:
    """Return the size of the packs of `rows` that the base does not have."""
    return sum(n_bytes for pack, n_bytes in set(values_of(rows, "pack", "pack_bytes")) if pack not in earlier.packs)


def shared_bytes(rows: Iterable[Row], earlier: Earlier) -> int:
    """Return the source bytes of those `rows` whose record the base has, or one of them before."""
    known = earlier.all_rows()
    both = Rows.joined((known, rows))
    is_shared = ~both.have_new_records()
    is_shared[: len(known)] = False
    return int(both.integers("n_bytes")[is_shared].sum())
