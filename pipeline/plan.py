"""From a source to tasks: which objects, how they are cut, and who does what. Pure and deterministic.

Tasks depend on the source and on the recipe alone: the same objects give the same tasks in the same order,
whatever runs them. A large file has tasks of its own, so that a change in one file leaves the tasks of the
others as they were; small files share tasks, in the order of their keys. A segment is never split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby, repeat
from operator import attrgetter

from operators.errors import ChangedError
from pipeline.canonical import digest_of_json
from pipeline.keys import key_order
from pipeline.rows import (
    SEGMENT_COLUMNS,
    Row,
    Rows,
    View,
    fingerprints_of,
    held_fingerprints,
    held_segments,
    segments_of,
)
from pipeline.segments import Layout, Segment, layout_of
from pipeline.store import ObjectInfo

TASK_SEGMENTS = 1 << 14
"""Most segments of a task: bounds its receipt, whatever the files hold."""
_SEGMENT = attrgetter(*SEGMENT_COLUMNS)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth telling about one object: a warning, or a failure of that object alone."""

    key: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Segments of one file that one task stores, in order; `info` pins the generation that is read.

    `fingerprints` has one for each segment, or is empty where the file was not sampled. Where they are many, both are
    views of columns.
    """

    info: ObjectInfo
    format: str
    reason: str | None
    segments: Sequence[Segment]
    fingerprints: Sequence[bytes] = ()

    @property
    def n_bytes(self) -> int:
        """Source bytes of the segments."""
        if isinstance(self.segments, View):
            return int(self.segments.integers("n_bytes").sum())
        return sum(segment.n_bytes for segment in self.segments)

    def rows(self, task: int) -> Iterator[Row]:
        """Yield one row per segment, with the columns of the source filled."""
        fingerprints = self.fingerprints or repeat(None)
        return (
            _row(self, segment, task, fingerprint)
            for segment, fingerprint in zip(self.segments, fingerprints, strict=False)
        )

    def slice(self, start: int, stop: int) -> Part:
        """Return the segments ``[start, stop)``."""
        return replace(self, segments=self.segments[start:stop], fingerprints=self.fingerprints[start:stop])


@dataclass(frozen=True, slots=True)
class Task:
    """The unit of work, of retrying and of resuming: everything a worker needs to know, picklable.

    `candidates` are rows of the base that segments of the task may be equal to: an equal digest shares the record.
    """

    ordinal: int
    parts: tuple[Part, ...]
    candidates: Sequence[Row] = ()

    @property
    def id(self) -> str:
        """Name of the receipt: a digest of what is to be stored, whatever the place of the task in its plan."""
        return digest_of_json(
            [[*astuple(part.info), part.format, part.reason, list(map(_SEGMENT, part.segments))] for part in self.parts]
        )[:32]

    @property
    def n_bytes(self) -> int:
        """Source bytes of the task."""
        return sum(part.n_bytes for part in self.parts)

    def rows(self) -> list[Row]:
        """Return one row per segment, with the columns of the source filled."""
        return [row for part in self.parts for row in part.rows(self.ordinal)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is going to do.

    Attributes
    ----------
    files : tuple of ObjectInfo
        The inventory that was planned, in the order of keys. Empty objects have no segment and no task.
    tasks : tuple of Task
    warnings : tuple of Finding
        Faults of formats, in the order of keys.
    failures : tuple of Finding
        Objects of the inventory that an adopted plan leaves out, because its driver could not read them.
    """

    files: tuple[ObjectInfo, ...]
    tasks: tuple[Task, ...]
    warnings: tuple[Finding, ...]
    failures: tuple[Finding, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(info.n_bytes for info in self.files)

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all tasks, in order: the stored plan."""
        for task in self.tasks:
            yield from task.rows()


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Whether `key` or a folder above it matches one of `patterns`.

    The rule of ``--include`` and ``--exclude``: a pattern is compared with the whole key relative to the
    source. ``*`` stands for any text, also across ``/``; ``?`` for one character; ``[ab]`` for one of a set.
    Case counts. A pattern that matches a folder takes all that is below: ``original``, ``original/`` and
    ``original/*`` are the same. A key is taken if any include matches it (or none was given) and no exclude
    does; the order of patterns does not matter.
    """
    wanted = [pattern.rstrip("/") for pattern in patterns]
    if not wanted:
        return False
    names = [key, *(key[:place] for place, symbol in enumerate(key) if symbol == "/" and place)]
    return any(fnmatchcase(name, pattern) for name in names for pattern in wanted)


def is_selected(key: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether the filters leave `key`: all do where none are given; see `matches` for the rule."""
    return (not include or matches(key, include)) and not matches(key, exclude)


def select(listing: Iterable[ObjectInfo], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[ObjectInfo]:
    """Return the objects that the filters leave, in the order of their keys; see `matches` for the rule."""
    return sorted((info for info in listing if is_selected(info.key, include, exclude)), key=key_order)


def make_plan(
    files: Sequence[ObjectInfo],
    layouts: Sequence[Layout],
    task_bytes: int,
    fingerprints: Mapping[str, Sequence[bytes]],
) -> Plan:
    """Return the plan for `files`, whose `layouts` stand in the same order.

    Parameters
    ----------
    files : sequence of ObjectInfo
        In the order of keys, as `select` gives them.
    layouts : sequence of Layout
    task_bytes : int
        Source bytes that a task aims at; a single segment may be more.
    fingerprints : mapping of str to sequence of bytes
        By key, of the segments of the files that were sampled.
    """
    parts = [
        Part(
            info,
            layout.format,
            layout.reason,
            held_segments(layout.segments),
            held_fingerprints(fingerprints.get(info.key, ())),
        )
        for info, layout in zip(files, layouts, strict=True)
        if layout.segments
    ]
    large = [part for part in parts if 2 * part.n_bytes > task_bytes]
    small = [part for part in parts if 2 * part.n_bytes <= task_bytes]
    pieces = [*((piece,) for part in large for piece in _cut(part, task_bytes)), *_batches(small, task_bytes)]
    tasks = [Task(ordinal, piece) for ordinal, piece in enumerate(pieces)]
    return Plan(
        tuple(files),
        tuple(tasks),
        tuple(
            Finding(info.key, layout.reason, layout.detail)
            for info, layout in zip(files, layouts, strict=True)
            if layout.reason is not None
        ),
    )


def adopt(inventory: Sequence[ObjectInfo], rows: Iterable[Row]) -> Plan:
    """Return the plan whose rows another driver of the same run has stored.

    Parameters
    ----------
    inventory : sequence of ObjectInfo
        All objects of the run; those that the rows leave out are `Plan.failures`.
    rows : iterable of Row
        In the order of tasks.

    Raises
    ------
    ChangedError
        The rows name a file that is not in the inventory, or do not fit its size.
    """
    infos = {info.key: info for info in inventory}
    # An empty file has no rows, and nothing to read for its layout.
    reasons = {info.key: layout_of(lambda *_: b"", info.key, 0).reason for info in inventory if info.n_bytes == 0}
    parts: dict[int, list[Part]] = {}
    for (ordinal, key, format_, reason), group in Rows.of(rows).by("task", "file", "format", "reason"):
        info, segments = infos.get(key), segments_of(group)
        if info is None or segments[-1].end_bytes > info.n_bytes:
            raise ChangedError("a plan of this inventory", "another file", key, "start a new run")
        sampled = group.at(0, "fingerprint") != (None,)
        part = Part(info, format_, reason, segments, fingerprints_of(group) if sampled else ())
        parts.setdefault(ordinal, []).append(part)
        reasons[key] = reason
    planned = [info for info in inventory if info.key in reasons]
    return Plan(
        tuple(planned),
        tuple(Task(ordinal, tuple(parts[ordinal])) for ordinal in sorted(parts)),
        tuple(Finding(info.key, reason) for info in planned if (reason := reasons[info.key]) is not None),
        tuple(
            Finding(info.key, "not_planned", "an earlier attempt of this run could not read it")
            for info in inventory
            if info.key not in reasons
        ),
    )


def _cut(part: Part, task_bytes: int) -> Iterator[Part]:
    """Cut a large file into tasks of about the same size, never more than `TASK_SEGMENTS` segments each."""
    total = part.n_bytes
    n_pieces = -(-total // task_bytes)

    def piece(segment: Segment) -> int:  # by the middle of the segment: even, and a function of this file alone
        return (2 * segment.offset_bytes + segment.n_bytes) * n_pieces // (2 * total)

    first = 0
    for _, group in groupby(part.segments, piece):
        stop = first + sum(1 for _ in group)
        for start in range(first, stop, TASK_SEGMENTS):
            yield part.slice(start, min(stop, start + TASK_SEGMENTS))
        first = stop


def _batches(parts: Iterable[Part], task_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Gather small files into tasks, in order."""
    batch: list[Part] = []
    n_bytes = n_segments = 0
    for whole in parts:
        for part in _cut(whole, task_bytes):
            if batch and (n_bytes + part.n_bytes > task_bytes or n_segments + len(part.segments) > TASK_SEGMENTS):
                yield tuple(batch)
                batch, n_bytes, n_segments = [], 0, 0
            batch.append(part)
            n_bytes += part.n_bytes
            n_segments += len(part.segments)
    if batch:
        yield tuple(batch)


def _row(part: Part, segment: Segment, ordinal: int, fingerprint: bytes | None) -> Row:
    return Row(
        part.info.key,
        segment.offset_bytes,
        segment.n_bytes,
        segment.tensor,
        segment.dtype,
        segment.shape,
        segment.row_start,
        segment.n_rows,
        segment.row_words,
        segment.n_tensors,
        part.format,
        part.reason,
        ordinal,
        fingerprint=fingerprint,
    )
