"""Kernels of the operators that deal words out to several children, and of their search: rows of a class, turns."""

from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import kernel
from operators.kernels.lanes import both, pick
from operators.kernels.memory import copy_bytes, fetch, item_bytes

CHUNK_WORDS = 16
"""Words of a row that are looked at before it is given up: a row of noise costs one line of cache."""
FIRST_WORDS = 4
"""Words of a row that are looked at first: most often they are in the line that was asked for."""
_AHEAD = 16
"""Rows that are asked for before they are looked at."""


@kernel("flags")
def flag_rows(words: Any, row_words: int, low_bits: int, flags: Any) -> int:
    """Set `flags` to 1 for rows whose words all end in `low_bits` zero bits, to 0 for others; return how many are 1."""
    mask = words.dtype.type(np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - low_bits))
    zero = words.dtype.type(0)
    count = 0
    if row_words == 1:
        for i in range(flags.size):
            is_zero = both(words[i], mask) == zero
            flags[i] = is_zero
            count += is_zero
        return count
    for row in range(flags.size):
        at, end = row * row_words, (row + 1) * row_words
        used = zero
        while at < end and used == zero:
            stop = min(at + CHUNK_WORDS, end)
            for i in range(at, stop):
                used |= both(words[i], mask)
            at = stop
        flags[row] = used == zero
        count += used == zero
    return count


@kernel("zeros")
def trailing_zeros(words: Any, row_words: int, width_bits: int, zeros: Any) -> None:
    """Write how many low bits are zero in all words of each row, `width_bits` where all are, 0 where fewer than 4."""
    few = np.uint64(15)
    for row in range(zeros.size):
        fetch(words, min(row + _AHEAD, zeros.size - 1) * row_words * item_bytes(words))
        at, end = row * row_words, (row + 1) * row_words
        used = np.uint64(0)
        stop = min(at + FIRST_WORDS, end)
        while at < stop and used & few == np.uint64(0):
            for i in range(at, stop):
                used |= np.uint64(words[i])
            at, stop = stop, min(stop + CHUNK_WORDS, end)
        count = 0
        if used == np.uint64(0):
            count = width_bits
        elif used & few == np.uint64(0):
            while (used >> np.uint64(count)) & np.uint64(1) == np.uint64(0):
                count += 1
        zeros[row] = count


@kernel("out")
def part_words(words: Any, flags: Any, flag: int, first: int, out: Any) -> int:
    """Fill `out` with the words whose flag is `flag`, from word `first` on; return the word to go on with."""
    k = np.int64(0)
    while k < out.size:
        # Written in any case, and kept where it counts: a branch would be guessed wrong.
        out[k] = words[first]
        k += np.int64(flags[first] == flag)
        first += 1
    return first


@kernel("out")
def join_words(flags: Any, plain: Any, marked: Any, out: Any) -> None:
    """Join the words without a flag and those with one; `plain` and `marked` have one word more than are taken."""
    j = np.int64(0)
    k = np.int64(0)
    for i in range(out.size):
        flag = np.int64(flags[i])
        out[i] = out.dtype.type(pick(flag != 0, np.uint64(marked[k]), np.uint64(plain[j])))
        k += flag
        j += 1 - flag


@kernel("out")
def part_rows(data: Any, flags: Any, flag: int, row_bytes: int, first: int, out: Any) -> int:
    """As `part_words` for rows, from byte `first` on, which may lie within one; all arrays are bytes."""
    row, start = first // row_bytes, first % row_bytes
    k = 0
    while k < out.size:
        if flags[row] == flag:
            n = min(row_bytes - start, out.size - k)
            copy_bytes(out, k, data, row * row_bytes + start, n)
            k += n
            start += n
            if start < row_bytes:
                break
        start = 0
        row += 1
    return row * row_bytes + start


@kernel("out")
def join_rows(flags: Any, first: int, row_bytes: int, plain: Any, marked: Any, out: Any) -> None:
    """As `join_words` for rows and a stretch that begins `first` bytes into the row of ``flags[0]``."""
    j = 0
    k = 0
    at = 0
    row = 0
    left = row_bytes - first
    while at < out.size:
        n = min(left, out.size - at)
        if flags[row]:
            copy_bytes(out, at, marked, k, n)
            k += n
        else:
            copy_bytes(out, at, plain, j, n)
            j += n
        at += n
        left = row_bytes
        row += 1


@kernel("out")
def take_words(words: Any, period: int, start: int, out: Any) -> None:
    """Write word `start` of every period."""
    for i in range(out.size):
        out[i] = words[i * period + start]


@kernel("out")
def put_words(part: Any, period: int, start: int, out: Any) -> None:
    """Inverse of `take_words`."""
    for i in range(part.size):
        out[i * period + start] = part[i]


@kernel("out")
def take_part(data: Any, period: int, start: int, width: int, out: Any) -> None:
    """Write bytes `start` to ``start + width`` of every period, the last ones perhaps cut short; arrays are bytes."""
    k = 0
    at = start
    while k < out.size:
        copy_bytes(out, k, data, at, min(width, out.size - k))
        k += width
        at += period


@kernel("out")
def put_part(part: Any, period: int, start: int, width: int, out: Any) -> None:
    """Inverse of `take_part`. A negative `start` stands for what was put before: the rest comes first."""
    k = 0
    at = start
    while at < out.size:
        skipped = max(0, -at)
        n = min(width, out.size - at) - skipped
        if n > 0:
            copy_bytes(out, at + skipped, part, k, n)
            k += n
        at += period


@kernel("counts")
def count_places(data: Any, starts: Any, period: int, n_classes: int, counts: Any) -> None:
    """Count the classes below `n_classes` in `data` by where they stand in a period.

    Parameters
    ----------
    data : uint8 array
        Windows of equal size, one after the other.
    starts : int64 array
        Where each window starts.
    period, n_classes : int
    counts : int64 array, shape (period * n_classes,)
    """
    for i in range(counts.size):
        counts[i] = 0
    run = data.size // starts.size
    for window in range(starts.size):
        place = starts[window] % period
        for i in range(window * run, (window + 1) * run):
            counts[place * n_classes + np.int64(data[i])] += 1
            place += 1
            if place == period:
                place = 0
