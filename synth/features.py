"""What a sample shows at a glance: the counts that costs need and the few features that priors see."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from operators.base import Stream
from operators.kernels.costing import (
    LOG_SCALE_BITS,
    cut_sums,
    distinct_words,
    huffman_bits,
    neighbour_bits,
    outline,
    tally,
)
from operators.words import Words, mask_of
from synth.logs import LOGS, SMOOTH_LOGS, log_q20

NARROW_BITS = 16
"""Words up to this width are counted in a table of all words; literals of wider ones are not entropy-coded."""

GUARD = 6
"""Words of a sample per live symbol, at least, where an alphabet is to be entropy-coded: else its table is unknown."""
MAX_DISTINCT = 4096
"""Wide words are counted up to so many different ones."""
MAX_CUT_WORDS = 2048
"""Words on which cuts are ranked."""

Features: TypeAlias = tuple[int, int, int, int, int, int, int, int]
"""Buckets of entropy, equality with the previous word, distinct words, trailing and leading dead bits, length, and
of nearness to the previous word and to the one a row before."""
LOOKED_AT = 512
"""Words by which nearness is judged."""
_LN2_Q20 = 726817
"""ln 2 in units of 2**-20."""
FLAT = 4
"""Bucket of an entropy that is the width but for noise."""


@dataclass(slots=True)
class Summary:
    """Counts over the words of a sample.

    Attributes
    ----------
    n_words : int
        Words of the sample.
    live, once, twice : int
        Distinct words, and those that occur once and twice.
    entropy_q20, smooth_q20 : int
        Empirical entropy of all words of the sample together, and Grassberger's estimate of the true one.
        Units of 2**-20 bit; 0 for wide words.
    equal : int
        Words equal to the one before.
    varying : int
        Or of all differences to the first word.
    largest : int
    table_bits : tuple of int
        Of a table of the live words: gaps, code lengths, frequencies.
    rare_q24 : int
        What words rarer than one in 2**14 would need to become that frequent, as part of all.
    huffman_bits : int
        Of all words of the sample together, by a code made for them; -1 where words are wide, or no code can
        be shorter than they are.
    by_chance : int
        Words that would equal the one before in random order; 0 for wide words.
    """

    n_words: int
    live: int
    once: int
    twice: int
    entropy_q20: int
    smooth_q20: int
    equal: int
    varying: int
    largest: int
    table_bits: tuple[int, int, int]
    rare_q24: int
    huffman_bits: int
    by_chance: int

    @property
    def repeats(self) -> bool:
        """Whether words equal the one before clearly more often than in random order."""
        return 8 * self.equal > 9 * self.by_chance + self.n_words // 32

    @property
    def chao(self) -> int:
        """Chao's lower bound of the distinct words of the whole, from those seen once and twice."""
        return self.live + self.once * (self.once - 1) // (2 * (self.twice + 1))

    def unseen(self, n_words: int) -> int:
        """Return about how many distinct words a stream of `n_words` has beyond those of this sample of it.

        At least what `chao` says; and as many as were seen once for each e-fold of the sample, as in the long
        tails of floating-point words, where each octave has as many words as the last and half the mass.
        """
        growth_q20 = (log_q20(n_words) - log_q20(self.n_words)) * _LN2_Q20 >> 20
        return max(self.chao - self.live, self.once * growth_q20 >> 20)


def summarise(words: Words, shift: int, width_bits: int, *, whole: bool = True) -> Summary:
    """Count the bit field of `width_bits` at `shift` of all words.

    Parameters
    ----------
    words : Words
    shift : int
        0 where the field is wider than `NARROW_BITS`: such a field is counted after it has been cut out.
    width_bits : int
    whole : bool
        Whether `words` are all there are. A part has to show each field `GUARD` times, as a mean, before the
        cost of a code is worked out.
    """
    n = words.size
    log_total = log_q20(n)
    if width_bits <= NARROW_BITS:
        counts, (live_counts, places) = _scratch()
        sums = np.empty(13, np.int64)
        max_live = n if whole else n // GUARD
        tables = counts[0], live_counts, places
        tally(words, shift, mask_of(width_bits), *tables, max_live, log_total, LOGS, SMOOTH_LOGS, sums)
        live, once, twice, plain, smooth, largest, gaps, lengths, frequencies, rare, equal, varying, by_chance = (
            sums.tolist()
        )
        plain, smooth = max(0, n * log_total - plain), max(0, n * log_total - smooth)
        huffman = n if live == 2 else 0 if live < 2 else -1
        if 2 < live <= max_live and plain * 1024 < (n * largest.bit_length() << LOG_SCALE_BITS) * 1023:
            ascending = np.sort(live_counts[:live])
            huffman = int(huffman_bits(ascending, live_counts[:live]))
        table_bits = gaps, lengths, frequencies
        return Summary(
            n, live, once, twice, plain, smooth, equal, varying, largest, table_bits, rare, huffman, by_chance
        )
    assert shift == 0
    three = np.empty(3, np.uint64)
    outline(words, three)
    equal, varying, largest = three.tolist()
    counted = count_distinct(words, MAX_DISTINCT)
    # Too many to count: as if no word occurred twice.
    live, once, twice = n, n, 0
    if counted is not None:
        hits = counted[1]
        live, once, twice = hits.size, int((hits == 1).sum()), int((hits == 2).sum())
    return Summary(n, live, once, twice, 0, 0, equal, varying, largest, (0, 0, 0), 0, -1, 0)


def cut_entropies(words: Words, width_bits: int) -> list[tuple[int, int]]:
    """Return, for each cut 1 to ``width_bits - 1``, the entropies of the low and the high half of the words.

    Units of 2**-20 bit per `MAX_CUT_WORDS` or fewer words, spread over all; -1 for a half of more than
    `NARROW_BITS`.
    """
    words = np.ascontiguousarray(words[:: -(-words.size // MAX_CUT_WORDS)])
    counted = count_distinct(words, words.size)
    assert counted is not None
    sums = np.zeros((width_bits, 2), np.int64)
    counts, _ = _scratch()
    cut_sums(*counted, width_bits, LOGS, counts[0], counts[1], sums)
    whole = words.size * log_q20(words.size)
    return [(-1 if low < 0 else whole - low, -1 if high < 0 else whole - high) for low, high in sums[1:].tolist()]


_THREAD = threading.local()


def _scratch() -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return two tables of zeros and two of anything, for `NARROW_BITS`: this thread's own, made once."""
    if not hasattr(_THREAD, "scratch"):
        size = 1 << NARROW_BITS
        _THREAD.scratch = np.zeros((2, size), np.int32), np.empty((2, size + 1), np.int64)
    scratch: tuple[NDArray[np.int32], NDArray[np.int64]] = _THREAD.scratch
    return scratch


def count_distinct(words: Words, limit: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]] | None:
    """Return the distinct words in some order and how often each occurs, or None where there are more than `limit`."""
    size = 1 << (2 * min(limit, words.size)).bit_length()
    slots, hits = np.empty(size, np.uint64), np.zeros(size, np.int64)
    n_distinct = int(distinct_words(words, limit, slots, hits))
    return None if n_distinct < 0 else (slots[:n_distinct], hits[:n_distinct])


def nearness(words: Words, shift: int, width_bits: int, row_lag: int, row_block: int) -> tuple[int, int]:
    """Return buckets of how much nearer a word is to the one before, and to that a row before, than to a far one.

    0 is no nearer (a scan would lose), 1 by up to 1.5 bits, 2 by more. See `neighbour_bits` for the rows.
    """
    sums = np.empty(5, np.int64)
    stride = max(1, words.size // LOOKED_AT) | 1
    neighbour_bits(words, shift, width_bits, stride, row_lag, row_block, sums)
    near, far, n_near, row, n_row = sums.tolist()
    return _nearer(far, n_near, near, n_near), _nearer(far, n_near, row, n_row)


def _nearer(far: int, n_far: int, near: int, n_near: int) -> int:
    if n_near < 16:
        return 0
    eighths = 8 * far // n_far - 8 * near // n_near
    return 0 if eighths < 3 else 1 if eighths < 12 else 2


def features(summary: Summary, stream: Stream, near: tuple[int, int]) -> Features:
    """Return the buckets by which a prior knows a stream."""
    n, width = max(1, summary.n_words), stream.width_bits
    if width <= NARROW_BITS:
        full = n * width << 20
        entropy = FLAT if summary.smooth_q20 * 10000 >= full * 9985 else min(3, summary.smooth_q20 * 4 // full)
    else:
        entropy = 3 if 2 * summary.live > n else 1 if summary.live > 256 else 0
    # Chance alone makes one pair in 2**width equal.
    by_chance = 2 * n // (1 << min(width, 12)) + n // 512
    equal = 0 if summary.equal < by_chance else 1 if 10 * summary.equal < n else 2 if 10 * summary.equal < 6 * n else 3
    distinct = 0 if summary.live <= 1 else 1 if summary.live <= 16 else 2 if summary.live <= 256 else 3
    trailing = (summary.varying & -summary.varying).bit_length() - 1 if summary.varying else 0
    leading = width - summary.varying.bit_length()
    length = (stream.n_words + 1).bit_length() - 1
    return (entropy, equal, distinct, min(3, trailing // 4), min(2, leading // 4), min(7, length // 3), *near)
