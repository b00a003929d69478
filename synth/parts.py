"""Steps that part the words of a stream by what they are, or by where they stand: rows, zeros, turns of a block.

What is left of a stream after its zeros or odd rows are taken out is known by the place of the stream, and at its
depth: it looks like what other tensors are as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import Operator, Stream
from operators.kernels.rows import count_places, trailing_zeros
from operators.ops.deal import Deal
from operators.ops.partition import Partition
from operators.words import Words
from synth.cost import node_q8
from synth.hole import Hole
from synth.logs import LOGS, SMOOTH_LOGS, log_q20
from synth.sample import Sample, gathered, spread, take_sample
from synth.steps import Expansion, Step

MIN_ROW_WORDS = 8
"""Rows of fewer words are not told apart: their mask would cost too much."""
ROW_GAIN = 1024
"""Rows have to end in zeros that are one part in so many of all bits."""
PERIODS = (2, 3, 4, 8, 17, 18, 20, 22, 24, 34, 36, 66, 84, 110, 144, 176, 210)
"""Turns that are looked for: pairs and points, blocks of MXFP4 and of GGUF."""
SHORT_PERIOD = 8
"""The longest turn of words that are no bytes."""
TURN_SAMPLE_WORDS = 1 << 15
TURN_WINDOW_WORDS = 1 << 10
"""Words by which turns are found, and adjacent ones among them."""
TURN_GAIN = 100
"""Turns have to save one part in so many of the entropy."""
GROUP_BITS = 64
"""What another child of a turn costs at least."""
JOIN_BITS = 64
"""Neighbouring places join where they would save less apart: counts of few words are noise."""
MOST_COUNTED = 1 << 16
"""Words by which neighbouring places are compared."""
PART_WORDS = 1 << 18
"""Words about as many of which are copied of the rows of a kind: leaves in the context of rows are judged by them."""
FEW = 4
"""Of rows that are fewer than one in so many, the sample is as much smaller: what is misjudged there weighs less."""
CLASSES = 16
"""Classes of bytes by which a period is found."""


@dataclass(frozen=True, slots=True)
class Zeros(Step):
    """A mask of the zero words."""

    label = "zeros"
    without = 1

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        n_zeros = words.size - int(np.count_nonzero(words))
        return Partition(1, n_zeros, stream.width_bits) if 0 < n_zeros < words.size else None

    def expand(self, hole: Hole) -> Expansion | None:
        sample, stream = hole.sample, hole.stream
        is_zero = sample.words == 0
        kept = sample.words[~is_zero]
        if not 0 < kept.size < sample.words.size:
            return None
        n_kept = kept.size * stream.n_words // sample.words.size
        # Of words that are left of a sample none are neighbours.
        rest = Sample(kept, Stream(stream.width_bits, n_kept), 0, None if sample.exact else (1, 1, kept.size, 1))
        op = Partition(1, stream.n_words - n_kept, stream.width_bits)
        return node_q8(op), [
            Hole(hole.setting, sample.with_words(is_zero.view(np.uint8), 1), self._tag(0), hole.depth + 1),
            Hole(hole.setting, rest, hole.tag, hole.depth, is_float=hole.is_float, layout=hole.layout),
            _zeros(hole, op, self._tag(2)),
        ]

    def columns_below(self, slot: int, columns: int, stream: Stream, below: Stream) -> int:
        return columns if slot == 0 else 0


@dataclass(frozen=True, slots=True)
class Rows(Step):
    """A mask of the rows that end in zeros: all bits of a word, or the low ones that a narrower float lacked."""

    all_bits: bool
    without = 1

    @property
    def label(self) -> str:
        return "rows.zero" if self.all_bits else "rows.upcast"

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        return self._chosen(_row_zeros(words, stream, columns), stream, columns) if _has_rows(words, columns) else None

    def detect(self, hole: Hole) -> Operator | None:
        words = hole.whole()  # both kinds of rows are found in one pass
        if words is None or not _has_rows(words, hole.columns):
            return None
        return self._chosen(_zeros_of(hole, words), hole.stream, hole.columns)

    def _chosen(self, zeros: Words, stream: Stream, columns: int) -> Operator | None:
        counts = np.bincount(zeros, minlength=stream.width_bits + 1)
        if not self.all_bits and not counts[1:-1].any():
            return None
        at_least = np.cumsum(counts[::-1])[::-1]
        saved = at_least * np.arange(at_least.size) * (at_least < zeros.size)
        low_bits = stream.width_bits if self.all_bits else int(np.argmax(saved[:-1] * (counts[:-1] > 0)))
        if int(saved[low_bits]) * ROW_GAIN < zeros.size * stream.width_bits:
            return None
        return Partition(columns, int(at_least[low_bits]), low_bits)

    def expand(self, hole: Hole) -> Expansion | None:
        words, op = hole.whole(), hole.detect(self)
        if words is None or not isinstance(op, Partition):
            return None
        setting = hole.setting
        key = ("mask", op, setting.sample_words, setting.exact_words)
        mask = setting.memo.once(words, key, lambda: _mask(hole, words, op))
        rest = _rows(hole, words, op, is_marked=False)
        marked = _zeros(hole, op, self._tag(2)) if self.all_bits else _rows(hole, words, op, is_marked=True)
        return node_q8(op), [Hole(setting, mask, self._tag(0), hole.depth + 1), rest, marked]

    def columns_below(self, slot: int, columns: int, stream: Stream, below: Stream) -> int:
        return columns if slot else 0


@dataclass(frozen=True, slots=True)
class Turns(Step):
    """Words in turn from several streams.

    Attributes
    ----------
    widths : tuple of int
        Words of each in a turn; none where they are still to be found.
    """

    fixed = True
    part = 128
    widths: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        return f"deal.{sum(self.widths)}"

    def operator(self, words: Words, stream: Stream, columns: int) -> Operator | None:
        widths = self.widths or _turns(words)
        return Deal(widths) if widths and sum(widths) <= stream.n_words else None

    def expand(self, hole: Hole) -> Expansion | None:
        words = hole.whole()
        op = Deal(self.widths)
        if words is None or words.size < op.period:
            return None
        setting = hole.setting
        exact = words.size <= max(setting.exact_words, setting.sample_words)
        picked, run = words, words.size
        if not exact:
            # Whole turns, so that each child has as many words of every window.
            run = max(1, TURN_WINDOW_WORDS // op.period) * op.period
            starts = spread(max(1, setting.sample_words // run), words.size - run) // op.period * op.period
            picked = gathered(words, starts, run)
        targets = op.targets(picked, Stream(hole.stream.width_bits, picked.size))
        assert targets is not None
        children = []
        for slot, (target, below) in enumerate(zip(targets, op.children(hole.stream), strict=True)):
            layout = None if exact else (1, 1, picked.size // run, target.size * run // picked.size)
            columns = self.columns_below(slot, hole.columns, hole.stream, below)
            sample = Sample(target, below, columns if columns > 1 else 0, layout)
            is_float, floats = hole.is_float, hole.layout
            children.append(Hole(setting, sample, self._tag(slot), hole.depth + 1, is_float=is_float, layout=floats))
        return node_q8(op), children

    def columns_below(self, slot: int, columns: int, stream: Stream, below: Stream) -> int:
        period = sum(self.widths)
        return 0 if columns % period else columns // period * self.widths[slot]


def _zeros(hole: Hole, op: Partition, tag: str) -> Hole:
    """Return the hole of words that are known to be zero: a literal of them is as small as anything."""
    stream = Stream(hole.stream.width_bits, op.row_words * op.n_marked)
    one = Sample(np.zeros(1, hole.sample.words.dtype), stream, 0, None if stream.n_words == 1 else (1, 1, 1, 1))
    return Hole(hole.setting, one, tag, hole.depth + 1, closed=True)


def _has_rows(words: Words, columns: int) -> bool:
    return columns >= MIN_ROW_WORDS and words.size >= 2 * columns and not words.size % columns


def _row_zeros(words: Words, stream: Stream, columns: int) -> Words:
    """Return how many low bits are zero in all words of each row, 0 where fewer than 4."""
    zeros = np.empty(words.size // columns, np.uint8)
    trailing_zeros(words, columns, stream.width_bits, zeros)
    return zeros


def _zeros_of(hole: Hole, words: Words) -> Words:
    """Return `_row_zeros` of all words of a hole, looked for once."""
    key = ("row zeros", hole.columns)
    return hole.setting.memo.once(words, key, lambda: _row_zeros(words, hole.stream, hole.columns))


def _mask(hole: Hole, words: Words, op: Partition) -> Sample:
    """Return which rows are marked."""
    setting, is_marked = hole.setting, _zeros_of(hole, words) >= op.low_bits
    return take_sample(is_marked.view(np.uint8), 1, 0, setting.sample_words, setting.exact_words)


def _rows(hole: Hole, words: Words, op: Partition, *, is_marked: bool) -> Hole:
    """Return the hole of some rows."""
    setting, memo, columns = hole.setting, hole.setting.memo, hole.columns
    n_marked = op.n_marked * op.row_words
    n_kept = n_marked if is_marked else hole.stream.n_words - n_marked
    sizes = setting.sample_words // (FEW if n_kept * FEW < hole.stream.n_words else 1), setting.exact_words

    def sampled() -> tuple[NDArray[np.int64], Sample]:
        kept = np.flatnonzero((_zeros_of(hole, words) >= op.low_bits) == is_marked)
        return kept, take_sample(words, hole.stream.width_bits, columns, *sizes, kept=kept)

    kept, sample = memo.once(words, ("rows", op, is_marked, *sizes), sampled)
    step = -(-sample.stream.n_words // PART_WORDS)

    def some() -> Words:
        key = ("some rows", op, is_marked, step)
        return memo.once(words, key, lambda: words.reshape(-1, columns)[kept[::step]].reshape(-1))

    return Hole(
        setting,
        sample,
        hole.tag,
        hole.depth,
        region=some if not sample.exact and step == 1 else None,
        is_float=hole.is_float,
        layout=hole.layout,
        origin=(some, 0),
    )


# -- how turns are found ------------------------------------------------------------------------------------


def _turns(words: Words) -> tuple[int, ...]:
    """Return the widths of the turns in which words differ, or none.

    Of each word one byte is looked at, the highest that varies. The period is the one whose places tell most about
    the byte; then neighbouring places join that are alike.
    """
    if words.size < 2:
        return ()
    starts, data = _sampled(words, TURN_SAMPLE_WORDS)
    whole = np.bincount(data, minlength=256)
    alone_q20 = int(_entropies(whole[None], LOGS)[0])
    # Classes of about equal size: few, so that few words show how they depend on the place.
    classes = ((np.cumsum(whole) - whole) * CLASSES // data.size).astype(np.uint8)[data]
    pooled_q20 = int(_entropies(np.bincount(classes, minlength=CLASSES)[None], LOGS)[0])
    best_q20, best = alone_q20 // (2 * TURN_GAIN), 0
    for period in PERIODS:
        if period > (SHORT_PERIOD if words.itemsize > 1 else words.size // 4):
            break
        counts = _by_place(classes, starts, period, CLASSES)
        parted_q20 = int(_entropies(counts, LOGS).sum()) + (period * CLASSES << 20)
        if pooled_q20 - parted_q20 > best_q20:
            # A multiple of a period tells as much, but for chance.
            best_q20, best = pooled_q20 - parted_q20 + alone_q20 // (10 * TURN_GAIN), period
    if not best:
        return ()
    starts, data = _sampled(words, MOST_COUNTED)
    counts = _by_place(data, starts, best, 256)
    alone_q20 = int(_entropies(counts.sum(axis=0)[None], LOGS)[0])
    widths, cost_q20 = _joined(counts, (data.size << 10) // words.size)
    return widths if len(widths) > 1 and cost_q20 < alone_q20 - alone_q20 // TURN_GAIN else ()


def _sampled(words: Words, n_words: int) -> tuple[NDArray[np.int64], Words]:
    """Return where windows start that are spread over all words, and a byte of each word in them."""
    run = min(TURN_WINDOW_WORDS, words.size)
    starts = spread(min(n_words, words.size) // run, words.size - run)
    picked = gathered(words, starts, run)
    shift = max(0, int(np.bitwise_or.reduce(picked ^ picked[:1])).bit_length() - 8)
    return starts, (picked >> picked.dtype.type(shift)).astype(np.uint8)


def _by_place(data: Words, starts: NDArray[np.int64], period: int, n_classes: int) -> NDArray[np.int64]:
    """Return how often each class occurs at each place of a period."""
    counts = np.empty(period * n_classes, np.int64)
    count_places(data, starts, period, n_classes, counts)
    return counts.reshape(period, n_classes)


def _joined(counts: NDArray[np.int64], part_q10: int) -> tuple[tuple[int, ...], int]:
    """Return the widths of the groups that are left when neighbours join as long as that costs nothing, and the cost.

    Parameters
    ----------
    counts : int64 array, shape (period, 256)
    part_q10 : int
        What part of all words was counted: a table is paid for once.
    """
    groups, widths = list(counts), [1] * len(counts)

    def cost_q20(rows: list[NDArray[np.int64]]) -> list[int]:
        stacked = np.stack(rows)
        live = (stacked > 0).sum(axis=1)
        costs: list[int] = (_entropies(stacked, SMOOTH_LOGS) + (8 * live + GROUP_BITS) * (part_q10 << 10)).tolist()
        return costs

    def gain(i: int) -> int:
        first, second, both = cost_q20([groups[i], groups[i + 1], groups[i] + groups[i + 1]])
        return first + second - both + (JOIN_BITS << 20)

    gains = [gain(i) for i in range(len(groups) - 1)]
    while gains and max(gains) > 0:
        i = gains.index(max(gains))
        groups[i] = groups[i] + groups.pop(i + 1)
        widths[i] += widths.pop(i + 1)
        gains.pop(i)
        for j in (i - 1, i):
            if 0 <= j < len(gains):
                gains[j] = gain(j)
    return tuple(widths), sum(cost_q20(groups))


def _entropies(counts: NDArray[np.int64], logs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the entropies of all words of each row of counts, in 2**-20 bit."""
    most = np.array([total * log_q20(total) for total in counts.sum(axis=1).tolist()], np.int64)
    entropies: NDArray[np.int64] = most - (counts * logs[counts]).sum(axis=1)
    return entropies
