"""Which of several fixed codebooks suits words: counts of samples, and what they take in each book."""

# mypy: disable-error-code="no-any-return, return-value"
from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.memory import fetch, item_bytes
from operators.kernels.rans import log2_of

GROUP_RUNS: Final = 4
"""Runs of a sample whose mean stands for a place in the words."""
UNEVEN_PART: Final = 21
"""Places differ where their means hold one part in so many of the variance of all words: from there on books of their
own save more than about 1 %."""
LINE_BYTES: Final = 64
TOPS: Final = 256
"""Words of a run whose bits are taken at once."""
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
def _count_run(run: Any, rotate: Any, tops: Any, lanes: Any, n_lane: Any) -> Any:
    """Count the highest bits of the words of a run, of which `tops` holds a part; return their sum."""
    width, mask = 8 * item_bytes(run), np.uint64(n_lane - 1)
    left, right, down = np.uint64(rotate), np.uint64(width - rotate), np.uint64(width)
    while mask >> (np.uint64(width) - down):
        down -= np.uint64(1)
    first, second, third = n_lane, 2 * n_lane, 3 * n_lane
    moment = np.int64(0)
    for start in range(0, run.size, TOPS):
        part = run[start : min(start + TOPS, run.size)]
        for i in range(part.size):
            word = np.uint64(part[i])
            tops[i] = np.uint16(((word << left | word >> right) >> down) & mask)
        for i in range(part.size):
            moment += np.int64(tops[i])
        whole = part.size // LANES * LANES
        for i in range(0, whole, LANES):
            lanes[np.uint64(tops[i])] += np.uint16(1)
            lanes[np.uint64(tops[i + 1] + first)] += np.uint16(1)
            lanes[np.uint64(tops[i + 2] + second)] += np.uint16(1)
            lanes[np.uint64(tops[i + 3] + third)] += np.uint16(1)
        for i in range(whole, part.size):
            lanes[np.uint64(tops[i])] += np.uint16(1)
    return moment


@inlined
def _count(words: Any, rotate: Any, n_runs: Any, run_words: Any, counts: Any) -> Any:
    """Count as `choose_book` does."""
    part_words = -(-words.size // counts.shape[0])
    size = counts.shape[1]
    lanes, tops, starts = np.empty(LANES * size, np.uint16), np.empty(TOPS, np.uint16), np.empty(n_runs, np.int64)
    # Of all words: their number, sum and sum of squares; and the squared sums of groups by their sizes.
    total, moment, square, between = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for p in range(counts.shape[0]):
        begin = min(p * part_words, words.size)
        part = words[begin : min(begin + part_words, words.size)]
        runs, piece, length = n_runs, part.size // n_runs, run_words
        if piece <= run_words:
            runs, piece, length = min(1, part.size), part.size, part.size
        for k in range(runs):
            jitter = (np.uint64(k + 1) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
            starts[k] = k * piece + np.int64(jitter % np.uint64(piece - length + 1))
            fetched = length * item_bytes(words) if runs > 1 else 0  # memory is slow, but brings many lines at a time
            for byte in range(0, fetched, LINE_BYTES):
                fetch(words, (begin + starts[k]) * item_bytes(words) + byte)
            fetch(words, (begin + starts[k] + length) * item_bytes(words) - 1)
        lanes[:] = 0
        group, group_words = np.int64(0), np.int64(0)
        for k in range(runs):
            group += _count_run(part[starts[k] : starts[k] + length], rotate, tops, lanes, size)
            group_words += length
            if (k + 1) % GROUP_RUNS == 0 or k + 1 == runs:
                between += group * group // group_words
                group = group_words = np.int64(0)
        for w in range(size):
            count = np.int64(0)
            for lane in range(LANES):
                count += np.int64(lanes[lane * size + w])
            counts[p, w] = count
            total += count
            moment += count * w
            square += count * w * w
    moment_square = moment * moment // max(total, np.int64(1))
    return (between - moment_square) * UNEVEN_PART > square - moment_square


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
def _measure(live: Any, low: Any, mean: Any, costs: Any, traits: Any, step: Any, bits: Any, shifts: Any) -> Any:
    """Find bits and shifts of words, from `low` on, in every book; return the first of the best books."""
    size = costs.shape[1] // 2
    best = 0
    for k in range(costs.shape[0]):
        bits[k] = -1
        for s in range(TRIED_SHIFTS if step else 1):
            shift = (((mean - traits[k, 0]) // max(step, 1) + s - 1) * step if s else np.int64(0)) & (size - 1)
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
    traits: NDArray[np.int64],
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
    traits : int64 array, shape (n_books, 3)
        The mean word of each book, the first word with a code and how many there are.
    step : int
        Three shifts by multiples of it are tried, about the one that brings the means together, beside none; 0 tries
        none.
    bits, shifts : int64 arrays, shape (n_samples, n_books)
        Set to the bits, and to the shift, which is to be subtracted from words. Of equal ones the first.
    """
    for i in range(counts.shape[0]):
        low, high, _, mean = _live(counts[i])
        _measure(counts[i, low:high], low, mean, costs, traits, step, bits[i], shifts[i])


@inlined
def _choose(counts: Any, costs: Any, traits: Any, step: Any) -> Any:
    """Choose as `choose_book` does."""
    size = counts.size
    bits, shifts = np.empty(costs.shape[0], np.int64), np.empty(costs.shape[0], np.int64)
    low, high, total, mean = _live(counts)
    live = np.empty(high - low, np.int32)
    for w in range(low, high):
        live[w - low] = counts[w]
    best = _measure(live, low, mean, costs, traits, step, bits, shifts)
    distinct, escapes, spent = np.int64(0), np.int64(0), np.int64(0)
    for w in range(low, high):
        count = counts[w]
        if count:
            distinct += 1
            spent += count * log2_of(count)
            if ((w - shifts[best] - traits[best, 1]) & (size - 1)) >= traits[best, 2]:
                escapes += count
    entropy_q16 = total * log2_of(max(total, np.int64(1))) - spent
    own_q8 = (entropy_q16 >> 8) + DISTINCT_Q8 * max(distinct - 1, np.int64(0)) + WHOLE_BITS_Q8 * total
    excess_q8 = (bits[best] << 8) - max(own_q8, total << 8)
    return int(best), int(shifts[best]), int(total), int(bits[best]), int(escapes), int(excess_q8)


@kernel("counts")
def choose_book(
    words: NDArray[Any],
    rotate: int,
    n_runs: int,
    run_words: int,
    counts: NDArray[np.int64],
    costs: NDArray[np.uint8],
    traits: NDArray[np.int64],
    step: int,
) -> tuple[bool, int, int, int, int, int, int]:
    """Count the highest bits of rotated words, of equal parts of all words each for itself, and find a book for one.

    Runs lie all over a part. A stride would meet columns: the place of run k is a hash of k inside the k-th piece. One
    call does both, and returns numbers, since before every message a second call or an array more would be felt.

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
    costs, traits, step
        As for `code_lengths`; the counts of a part add up to less than 2**31. Without books nothing is looked for.

    Returns
    -------
    is_uneven : bool
        Whether words have other means in other places, by what was counted.
    place, shift, sample_words, bits, escapes, excess_q8 : int
        Of the first part: the book and the shift; the words of the sample, their bits, how many of them have no code,
        and what they take beyond a code of their own, about, in 1/256 bit. Of equal books the first.
    """
    is_uneven = _count(words, rotate, n_runs, run_words, counts) if n_runs else False
    place = shift = total = bits = escapes = excess_q8 = 0
    if costs.shape[0]:
        place, shift, total, bits, escapes, excess_q8 = _choose(counts[0], costs, traits, step)
    return is_uneven, place, shift, total, bits, escapes, excess_q8
