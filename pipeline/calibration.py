"""What is learned of a checkpoint before its tasks run: a prior, and codebooks for its small tensors.

Evidence is learned from some tensors, spread over dtypes, sizes and roles, the first rows of each: chosen by what the
plan says alone, so that every driver of a run reads the same words and learns the same prior. They are read for that:
rows and columns, and the programs of roles, do not show in the 16 KiB that the planning pass reads of a tensor.
Learning from those made archives larger, by 0.05 points (MiniLM F32) to 4.3 (silero F32).

Books are learned from what that pass reads of all small tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from itertools import cycle

from blake3 import blake3

from operators.books import Books
from operators.errors import StoreError
from operators.words import dtype_of
from pipeline.ahead import ahead
from pipeline.encoder import segment_words
from pipeline.executors import may_retry
from pipeline.plan import Part, Plan
from pipeline.rooms import Room
from pipeline.sampling import Sample, sample_plan
from pipeline.segments import Segment
from pipeline.store import SourceStore
from synth.booked import MOST_BYTES, Lessons, is_offered
from synth.calibrate import MAX_TENSORS, TensorSample, calibrate
from synth.options import SearchOptions
from synth.prior import Prior
from synth.roles import SMALL_WORDS, kind_of

REGION_BYTES = 8 << 20
"""Bytes of a tensor that are read, in whole rows."""
KEPT_TENSORS = 64 * MAX_TENSORS
"""Most tensors of a stratum that are held while they are chosen from."""


class Pupil:
    """Learns codebooks from the planning pass, or from another one where that was made in an earlier attempt."""

    def __init__(self) -> None:
        self._lessons = Lessons()
        self._has_begun = False

    def watch(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Pass `samples` on, looking at those of small tensors."""
        self._has_begun = True
        for sample in samples:
            if sample.segment.n_bytes <= MOST_BYTES:
                self._lessons.add(sample.words, sample.segment.dtype)
            yield sample

    def books(self, source: SourceStore, plan: Plan) -> Books:
        """Return the books of the planned tensors. Raises StoreError."""
        if not self._has_begun:
            for _ in self.watch(sample_plan(source, plan)):
                pass
        return self._lessons.learn()


def learn_prior(
    source: SourceStore, plan: Plan, options: SearchOptions, base: Prior, pupil: Pupil | None = None
) -> Prior:
    """Return `base` with what the planned tensors teach; `base` itself where there are none.

    Parameters
    ----------
    source : SourceStore
    plan : Plan
    options : SearchOptions
    base : Prior
    pupil : Pupil, optional
        What has watched the planning pass; by default another pass is made.

    Raises
    ------
    StoreError
        The source cannot be read.
    """
    prior = _with_evidence(source, plan, options, base)
    return replace(prior, books=(pupil or Pupil()).books(source, plan)) if is_offered(options) else prior


def _with_evidence(source: SourceStore, plan: Plan, options: SearchOptions, base: Prior) -> Prior:
    chosen = choose(plan)
    if not chosen:
        return base
    return calibrate(ahead(_regions(source, chosen)), options, base)


def _regions(source: SourceStore, chosen: Iterable[tuple[Part, Segment]]) -> Generator[TensorSample]:
    """Yield what is learned from; each lasts until the one after the next is asked for."""
    rooms = cycle((Room(), Room()))
    for part, segment in chosen:
        region, room = _region(segment), next(rooms)
        room.clear()
        try:
            [data] = source.get_ranges(part.info, [(region.offset_bytes, region.end_bytes)], room)
        except StoreError as error:
            if may_retry(error):
                raise
            continue  # its task will fail it alone
        words = segment_words(region.dtype, data)
        rows = region.n_rows if region.n_rows and words.size % region.n_rows == 0 else 1
        yield TensorSample(words, region.dtype, rows, words.size // rows, segment.tensor)


def choose(plan: Plan) -> list[tuple[Part, Segment]]:
    """Return the first segments of up to `MAX_TENSORS` tensors, taking one of each stratum in turn.

    A stratum is a dtype and a power of four of the size. Tensors of other roles come first in all of them, inside
    it in the order of a digest of the tensor's name, which no habit of naming can bias.
    """
    strata: dict[tuple[str, int], list[tuple[int, bytes, Part, Segment]]] = {}
    seen: Counter[tuple[str, int, str | None]] = Counter()
    for part, segment in _first_segments(plan):
        stratum = (segment.dtype or "", segment.n_bytes.bit_length() // 2)
        rank = blake3(f"{part.info.key}\0{segment.tensor}".encode("utf-8", "surrogateescape")).digest()
        n_words = segment.n_bytes * 8 // dtype_of(segment.dtype).word_bits
        kind = (kind_of(segment.tensor or ""), segment.n_bytes) if n_words > SMALL_WORDS else ("", 0)
        role = (*kind, segment.dtype)
        queue = strata.setdefault(stratum, [])
        queue.append((seen[role], rank, part, segment))
        if len(queue) == KEPT_TENSORS:  # no later one can be chosen, and there may be millions
            queue[:] = sorted(queue, key=lambda item: item[:2])[:MAX_TENSORS]
        seen[role] += 1
    queues = [sorted(strata[stratum], key=lambda item: item[:2]) for stratum in sorted(strata)]
    turns = [(item[0] > 0, depth, place) for place, queue in enumerate(queues) for depth, item in enumerate(queue)]
    return [queues[place][depth][2:] for _, depth, place in sorted(turns)[:MAX_TENSORS]]


def _first_segments(plan: Plan) -> Iterator[tuple[Part, Segment]]:
    for task in plan.tasks:
        for part in task.parts:
            for segment in part.segments:
                if segment.dtype is not None and segment.row_start == 0:
                    yield part, segment


def _region(segment: Segment) -> Segment:
    """Return the first rows of a segment, about `REGION_BYTES` of them."""
    if segment.n_bytes <= REGION_BYTES:
        return segment
    row_bytes = segment.n_bytes // segment.n_rows if segment.n_rows > 1 else dtype_of(segment.dtype).word_bits // 8
    n_rows = max(1, REGION_BYTES // row_bytes)
    n_bytes = n_rows * row_bytes
    return Segment(
        segment.offset_bytes,
        n_bytes,
        segment.tensor,
        segment.dtype,
        segment.shape,
        segment.row_start,
        n_rows if segment.n_rows > 1 else 1,
        segment.row_words,
    )
