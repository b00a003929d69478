"""Which of several fixed codebooks suits words: counts of samples, and what they take in each book."""

# mypy: disable-error-code="no-any-return, return-value"
from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.rans import log2_of

GROUP_RUNS: Final = 4
"""Runs of a sample whose mean stands for a place in the words."""
UNEVEN_PART: Final = 21
"""Places differ where their means hold one part in so many of the variance of all words: from there on books of their
own save more than about 1 %."""
LANES: Final = 4
"""Counts beside each other, since equal words in a row would wait for each other."""
DISTINCT_Q8: Final = 185
"""The entropy of a sample is too low by (m - 1) / (2 ln 2) bits, about 0.72 for each word that occurs."""
WHOLE_BITS_Q8: Final = 10
"""What codes of whole bits lose for each word, about: 0.04 bits."""
TRIED_SHIFTS: Final = 4
"""None, and three about the one that brings the means together."""


# -- samples --------------------------------------------------------------------------------------------


@inlined
def _top(word: Any, left: Any, right: Any, down: Any, mask: Any) -> Any:
    """Return the highest bits, as many as `mask` has, of a word that is rotated left."""
    return np.int64((((np.uint64(word) << left) | (np.uint64(word) >> right)) >> down) & mask)


@inlined
def _count_run(run: Any, rotate: Any, lanes: Any) -> Any:
    """Count the highest bits of the words of a run; return their sum."""
    width, mask = 8 * run.itemsize, np.uint64(lanes.shape[1] - 1)
    left, right, down = np.uint64(rotate), np.uint64(width - rotate), np.uint64(width)
    while mask >> (np.uint64(width) - down):
        down -= np.uint64(1)
    moment = np.int64(0)
    for j in range(run.size // LANES):
        for lane in range(LANES):
            top = _top(run[LANES * j + lane], left, right, down, mask)
            lanes[lane, top] += np.uint16(1)
            moment += top
    for i in range(run.size // LANES * LANES, run.size):
        top = _top(run[i], left, right, down, mask)
        lanes[0, top] += np.uint16(1)
        moment += top
    return moment


@inlined
def _count(words: Any, rotate: Any, n_runs: Any, run_words: Any, counts: Any) -> Any:
    """Count as `choose_books` does."""
    part_words = -(-words.size // counts.shape[0])
    size = counts.shape[1]
    lanes, starts = np.empty((LANES, size), np.uint16), np.empty(n_runs, np.int64)
    # Of all words: their number, sum and sum of squares; and the squared sums of groups by their sizes.
    total, moment, square, between = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    touched = np.uint64(0)
    for p in range(counts.shape[0]):
        begin = min(p * part_words, words.size)
        part = words[begin : min(begin + part_words, words.size)]
        runs, piece, length = n_runs, part.size // n_runs, run_words
        if piece <= run_words:
            runs, piece, length = min(1, part.size), part.size, part.size
        for k in range(runs):
            jitter = (np.uint64(k + 1) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
            starts[k] = k * piece + np.int64(jitter % np.uint64(piece - length + 1))
            touched |= np.uint64(part[starts[k]])  # memory is slow, but brings many places at a time
        lanes[:] = 0
        group, group_words = np.int64(0), np.int64(0)
        for k in range(runs):
            group += _count_run(part[starts[k] : starts[k] + length], rotate, lanes)
            group_words += length
            if (k + 1) % GROUP_RUNS == 0 or k + 1 == runs:
                between += group * group // group_words
                group = group_words = np.int64(0)
        for w in range(size):
            count = np.int64(lanes[0, w]) + np.int64(lanes[1, w]) + np.int64(lanes[2, w]) + np.int64(lanes[3, w])
            counts[p, w] = count
            total += count
            moment += count * w
            square += count * w * w
    moment_square = moment * moment // max(total, np.int64(1))
    # Where nothing but zeros was touched, nothing differs.
    return (between - moment_square) * UNEVEN_PART > square - moment_square and touched != np.uint64(0)


# -- what they take -------------------------------------------------------------------------------------


@inlined
def _live(counts: Any) -> Any:
    """Return the first word that occurs, the one after the last, how many there are and their mean."""
    total, moment = np.int64(0), np.int64(0)
    low, high = np.int64(counts.size), np.int64(0)
    for w in range(counts.size):
        if counts[w]:
            total += counts[w]
            moment += counts[w] * w
            low, high = min(low, np.int64(w)), np.int64(w + 1)
    return min(low, high), high, total, moment // max(total, np.int64(1))


@inlined
def _measure(live: Any, low: Any, mean: Any, costs: Any, means: Any, step: Any, bits: Any, shifts: Any) -> Any:
    """Find bits and shifts of words, from `low` on, in every book; return the first of the best books."""
    size = costs.shape[1] // 2
    best = 0
    for k in range(costs.shape[0]):
        bits[k] = -1
        for s in range(TRIED_SHIFTS if step else 1):
            shift = (((mean - means[k]) // max(step, 1) + s - 1) * step if s else np.int64(0)) & (size - 1)
            row = costs[k, size - shift + low : size - shift + low + live.size]
            taken = np.int64(0)
            for i in range(live.size):
                taken += np.int64(live[i]) * np.int64(row[i])
            if bits[k] < 0 or taken < bits[k]:
                bits[k], shifts[k] = taken, shift
        if bits[k] < bits[best]:
            best = k
    return best


@kernel("bits", "shifts")
def code_lengths(
    counts: NDArray[np.int64],
    costs: NDArray[np.uint8],
    means: NDArray[np.int64],
    step: int,
    bits: NDArray[np.int64],
    shifts: NDArray[np.int64],
) -> None:
    """Find the bits that the words of every sample take in every book, shifted as suits them best.

    Parameters
    ----------
    counts : int64 array, shape (n_samples, mask + 1)
    costs : uint8 array, shape (n_books, 2 * (mask + 1))
        Bits of each word in each book, twice in a row.
    means : int64 array, shape (n_books,)
        The mean word of each book.
    step : int
        Three shifts by multiples of it are tried, about the one that brings the means together, beside none; 0 tries
        none.
    bits, shifts : int64 arrays, shape (n_samples, n_books)
        Set to the bits, and to the shift, which is to be subtracted from words. Of equal ones the first.
    """
    for i in range(counts.shape[0]):
        low, high, _, mean = _live(counts[i])
        _measure(counts[i, low:high], low, mean, costs, means, step, bits[i], shifts[i])


@inlined
def _choose(counts: Any, costs: Any, means: Any, runs: Any, step: Any, found: Any) -> None:
    """Choose as `choose_books` does."""
    size = counts.shape[1]
    bits, shifts = np.empty(costs.shape[0], np.int64), np.empty(costs.shape[0], np.int64)
    narrow = np.empty(size, np.int32)
    for i in range(counts.shape[0]):
        low, high, total, mean = _live(counts[i])
        live = narrow[: high - low]
        for w in range(low, high):
            live[w - low] = counts[i, w]
        best = _measure(live, low, mean, costs, means, step, bits, shifts)
        distinct, escapes, spent = np.int64(0), np.int64(0), np.int64(0)
        for w in range(low, high):
            count = counts[i, w]
            if count:
                distinct += 1
                spent += count * log2_of(count)
                if ((w - shifts[best] - runs[best, 0]) & (size - 1)) >= runs[best, 1]:
                    escapes += count
        entropy_q16 = total * log2_of(max(total, np.int64(1))) - spent
        own_q8 = (entropy_q16 >> 8) + DISTINCT_Q8 * max(distinct - 1, np.int64(0)) + WHOLE_BITS_Q8 * total
        found[i, 0], found[i, 1], found[i, 2], found[i, 3] = best, shifts[best], total, bits[best]
        found[i, 4], found[i, 5] = escapes, (bits[best] << 8) - max(own_q8, total << 8)


@kernel("counts", "found")
def choose_books(
    words: NDArray[Any],
    rotate: int,
    n_runs: int,
    run_words: int,
    counts: NDArray[np.int64],
    costs: NDArray[np.uint8],
    means: NDArray[np.int64],
    runs: NDArray[np.int64],
    step: int,
    found: NDArray[np.int64],
) -> bool:
    """Count the highest bits of rotated words, of equal parts of all words each for itself, and find books for them.

    Runs lie all over a part. A stride would meet columns: the place of run k is a hash of k inside the k-th piece. One
    call does both, since before every message a second one would be felt.

    Parameters
    ----------
    words : Words, shape (n,)
    rotate : int
        Bits that words are rotated left by.
    n_runs, run_words : int
        Runs of each part, and their words; the words of a part that has not so many are all counted, at most 2**17.
        Without runs `counts` are there already.
    counts : int64 array, shape (n_parts, mask + 1)
        Set. Every part has ``ceil(n / n_parts)`` words, the last one what is left.
    costs, means, step
        As for `code_lengths`; the counts of a part add up to less than 2**31.
    runs : int64 array, shape (n_books, 2)
        The first word with a code in each book, and how many there are.
    found : int64 array, shape (n_parts, 6)
        Set to the book and the shift; the words of the sample, their bits, how many of them have no code, and what
        they take beyond a code of their own, about, in 1/256 bit. Of equal books the first. Without rows nothing is
        looked for.

    Returns
    -------
    bool
        Whether words have other means in other places, by what was counted.
    """
    is_uneven = _count(words, rotate, n_runs, run_words, counts) if n_runs else False
    if found.shape[0]:
        _choose(counts, costs, means, runs, step, found)
    return is_uneven
