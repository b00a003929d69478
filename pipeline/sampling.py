"""The planning pass: a little of the tensors of every file, read once, before any task runs.

It serves whoever has to choose before the work begins: what teaches codebooks takes the words of a
`Sample`, what looks for duplicates takes a fingerprint for each segment. Where is read follows from the cuts of a file
alone, never from its bytes nor from other files: equal files are sampled at equal places, and every driver of a
run reads the same words.

A request is worth `REQUEST_WORTH_BYTES` of source. A file is walked in order, and a segment is sampled where the
bytes so far pay for a request, or where its sample lies in reach of the one before it: a large tensor at each of its
segments, small ones in stretches of neighbours. A sample lies at the same place in all segments of one size, spread
over sizes, so that equal segments have equal samples wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from blake3 import blake3

from operators.words import Words
from pipeline.encoder import segment_words
from pipeline.executors import each_attempt, may_retry
from pipeline.plan import Part, Plan
from pipeline.segments import Segment
from pipeline.store import Range, SourceStore

SAMPLE_BYTES = 16 << 10
"""Bytes of a segment that are sampled; a smaller segment is taken whole."""
REQUEST_WORTH_BYTES = 16 << 20
"""Source bytes that pay for one request of the pass: a quarter of those that a run may make, one for each 4 MiB."""
STRETCH_BYTES = 1 << 20
DENSE_STRETCH_BYTES = 8 << 20
"""Least and most bytes from the first to the last of the neighbours that are sampled by one request."""
DENSE_BYTES = 32 << 20
"""Bytes that are read of a file of small tensors, however few it has."""
SMALL_FILE_BYTES = 1 << 20
SMALL_FILES = 64
"""Files below `SMALL_FILE_BYTES` are sampled if there are no more: each costs a request that its bytes do not pay."""
BATCH_BYTES = 32 << 20
"""Bytes that are asked for and held at once, for each of `READERS`."""
READERS = 4
RETRIES = 2
FINGERPRINT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """A contiguous run of words of one segment.

    Attributes
    ----------
    part : Part
        The whole file.
    index : int
        Of the segment in it.
    segment : Segment
        The whole segment: its dtype, tensor and size.
    words : Words
        Of the segment's dtype, little-endian; memory of its own, read-only.
    """

    part: Part
    index: int
    segment: Segment
    words: Words


def sample_plan(source: SourceStore, plan: Plan) -> Iterator[Sample]:
    """Sample the files that `plan` stores; see `sample_files`."""
    return sample_files(source, files_of(plan))


def sample_files(source: SourceStore, files: Sequence[Part]) -> Iterator[Sample]:
    """Yield samples of `files`, in their order and that of their segments, each read as it was planned.

    Parameters
    ----------
    source : SourceStore
    files : sequence of Part
        Whole files. One that cannot be read is passed over: its task will fail it alone.

    Raises
    ------
    StoreError
        The source fails, and might not a second time.
    """

    def read(batch: _Batch) -> list[Sample]:
        ranges = [stretch.range for stretch in batch.stretches]
        buffers = source.get_ranges(batch.part.info, ranges)
        return [
            sample
            for stretch, buffer in zip(batch.stretches, buffers, strict=True)
            for sample in _samples(batch.part, stretch, buffer)
        ]

    small = sum(part.n_bytes < SMALL_FILE_BYTES for part in files)
    taken = (part for part in files if part.n_bytes >= SMALL_FILE_BYTES or small <= SMALL_FILES)
    for outcome in each_attempt(read, _batches(taken), READERS, RETRIES):
        if outcome.result is not None:
            yield from outcome.result
        elif outcome.error is not None and may_retry(outcome.error):
            raise outcome.error


def files_of(plan: Plan) -> list[Part]:
    """Return the planned files whole, whatever tasks share them, in the order of their keys."""
    segments: dict[str, list[Segment]] = {}
    parts: dict[str, Part] = {}
    for task in plan.tasks:
        for part in task.parts:
            parts.setdefault(part.info.key, part)
            segments.setdefault(part.info.key, []).extend(part.segments)
    return [
        replace(parts[info.key], segments=tuple(sorted(segments[info.key], key=lambda segment: segment.offset_bytes)))
        for info in plan.files
        if info.key in parts
    ]


def region_of(n_bytes: int) -> Range:
    """Return the part of a segment of `n_bytes` that is its sample."""
    if n_bytes <= SAMPLE_BYTES:
        return 0, n_bytes
    start = _jitter(n_bytes)
    return start, start + SAMPLE_BYTES


@lru_cache(1 << 12)
def _jitter(n_bytes: int) -> int:
    """Return a place for a sample that no stride of a tensor can follow, at a word of any width."""
    seed = blake3(n_bytes.to_bytes(8, "little")).digest(8)
    return int.from_bytes(seed, "little") % (n_bytes - SAMPLE_BYTES + 1) // 8 * 8


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring segments ``[first, stop)`` whose samples are read by one request, and its bytes in the file."""

    first: int
    stop: int
    range: Range


def stretches_of(part: Part) -> list[Stretch]:
    """Return what is read of a whole file: no more requests than one for each `REQUEST_WORTH_BYTES`, and one."""
    dense = DENSE_BYTES * REQUEST_WORTH_BYTES // part.n_bytes if part.n_bytes else 0
    reach_bytes = max(STRETCH_BYTES, min(DENSE_STRETCH_BYTES, dense))
    stretches: list[Stretch] = []
    paid_bytes = REQUEST_WORTH_BYTES
    for index, segment in enumerate(part.segments):
        start, stop = (segment.offset_bytes + place for place in region_of(segment.n_bytes))
        paid_bytes += segment.n_bytes
        if stretches and stop - stretches[-1].range[0] <= reach_bytes:
            last = stretches[-1]
            stretches[-1] = Stretch(last.first, index + 1, (last.range[0], stop))
        elif paid_bytes >= REQUEST_WORTH_BYTES:
            paid_bytes -= REQUEST_WORTH_BYTES
            stretches.append(Stretch(index, index + 1, (start, stop)))
    return stretches


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is read of one file at once."""

    part: Part
    stretches: tuple[Stretch, ...]


def _batches(files: Iterable[Part]) -> Iterator[_Batch]:
    for part in files:
        batch: list[Stretch] = []
        for stretch in stretches_of(part):
            if batch and sum(stop - start for start, stop in (one.range for one in batch)) >= BATCH_BYTES:
                yield _Batch(part, tuple(batch))
                batch = []
            batch.append(stretch)
        if batch:
            yield _Batch(part, tuple(batch))


def _samples(part: Part, stretch: Stretch, data: memoryview) -> Iterator[Sample]:
    for index, segment in enumerate(part.segments[stretch.first : stretch.stop], stretch.first):
        start, stop = region_of(segment.n_bytes)
        begin = segment.offset_bytes - stretch.range[0]
        # A copy: a view would hold the stretch.
        words = segment_words(segment.dtype, data[begin + start : begin + stop]).copy()
        words.flags.writeable = False
        yield Sample(part, index, segment, words)


class Fingerprints:
    """A fingerprint for each segment of the files that were sampled.

    Segments of one size with equal bytes have one fingerprint where both are sampled; with other bytes they may share
    it, so that it is a reason to compare, never a proof. A segment that was not sampled takes its fingerprint from
    the last one that was and from its place after it: so the segments of two equal files have equal ones too.
    """

    def __init__(self) -> None:
        self._sampled: dict[str, dict[int, bytes]] = {}

    def watch(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Pass `samples` on, taking their fingerprints."""
        for sample in samples:
            size = sample.segment.n_bytes.to_bytes(8, "little")
            digest = blake3(size).update(sample.words.tobytes()).digest(FINGERPRINT_BYTES)
            self._sampled.setdefault(sample.part.info.key, {})[sample.index] = digest
            yield sample

    def of(self, part: Part) -> tuple[bytes, ...]:
        """Return the fingerprints of the segments of a whole file; none of one that was not sampled."""
        sampled = self._sampled.get(part.info.key)
        if sampled is None:
            return ()
        found: list[bytes] = []
        before = b""
        for index, segment in enumerate(part.segments):
            size = segment.n_bytes.to_bytes(8, "little")
            before = sampled.get(index) or blake3(before + size).digest(FINGERPRINT_BYTES)
            found.append(before)
        return tuple(found)
