"""Kernels of the operators that deal words out to several children: rows of a class, parts of a period."""

from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import kernel
from operators.kernels.lanes import both, pick

CHUNK_WORDS = 16
"""Words of a row that are looked at before it is given up: a row of noise costs one line of cache."""


@kernel("flags")
def flag_rows(words: Any, row_words: int, low: int, flags: Any) -> int:
    """Flag the rows in which the bits `low` of every word are zero; return how many they are.

    Parameters
    ----------
    words : Words, ``row_words * flags.size`` of them
    row_words : int
    low : int
        Mask of low bits.
    flags : uint8 array
        Set to 0 and 1.
    """
    mask = words.dtype.type(low)
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
        at, end = row * row_words, (row + 1) * row_words
        used = np.uint64(0)
        while at < end and used & few == np.uint64(0):
            stop = min(at + CHUNK_WORDS, end)
            for i in range(at, stop):
                used |= np.uint64(words[i])
            at = stop
        count = 0
        if used == np.uint64(0):
            count = width_bits
        elif used & few == np.uint64(0):
            while (used >> np.uint64(count)) & np.uint64(1) == np.uint64(0):
                count += 1
        zeros[row] = count


@kernel("plain", "marked")
def part_rows(words: Any, flags: Any, row_words: int, plain: Any, marked: Any) -> None:
    """Write the rows without a flag to `plain`, those with one to `marked`; both have room for one word more."""
    j = 0
    k = 0
    if row_words == 1:
        for i in range(flags.size):
            # Written to both and kept in one: a branch would be guessed wrong.
            word = words[i]
            plain[j] = word
            marked[k] = word
            flag = np.int64(flags[i])
            k += flag
            j += 1 - flag
        return
    for row in range(flags.size):
        at = row * row_words
        if flags[row]:
            for i in range(row_words):
                marked[k + i] = words[at + i]
            k += row_words
        else:
            for i in range(row_words):
                plain[j + i] = words[at + i]
            j += row_words


@kernel("out")
def join_rows(flags: Any, first: int, row_words: int, plain: Any, marked: Any, out: Any) -> None:
    """Inverse of `part_rows` for a stretch of words that begins `first` words into the row of ``flags[0]``.

    `plain` and `marked` have one word more than are taken from them.
    """
    j = 0
    k = 0
    if row_words == 1:
        for i in range(out.size):
            flag = np.int64(flags[i])
            out[i] = out.dtype.type(pick(flag != 0, np.uint64(marked[k]), np.uint64(plain[j])))
            k += flag
            j += 1 - flag
        return
    at = 0
    left = row_words - first
    row = 0
    while at < out.size:
        n = min(left, out.size - at)
        if flags[row]:
            for i in range(n):
                out[at + i] = marked[k + i]
            k += n
        else:
            for i in range(n):
                out[at + i] = plain[j + i]
            j += n
        at += n
        left = row_words
        row += 1


@kernel("out")
def take_part(words: Any, period: int, start: int, width: int, out: Any) -> None:
    """Write words `start` to ``start + width`` of every period, the last one perhaps cut short."""
    if width == 1:
        for i in range(out.size):
            out[i] = words[i * period + start]
        return
    k = 0
    at = start
    while k < out.size:
        for i in range(min(width, out.size - k)):
            out[k + i] = words[at + i]
        k += width
        at += period


@kernel("out")
def put_part(part: Any, period: int, start: int, width: int, phase: int, out: Any) -> None:
    """Inverse of `take_part` for a stretch of words that begins `phase` words into a period."""
    at = start - phase
    if at <= -width:
        at += period
    k = 0
    if at < 0:
        n = min(width + at, out.size)
        for i in range(n):
            out[i] = part[i]
        k = n
        at += period
    if width == 1:
        while at < out.size:
            out[at] = part[k]
            k += 1
            at += period
        return
    while at < out.size:
        n = min(width, out.size - at)
        for i in range(n):
            out[at + i] = part[k + i]
        k += n
        at += period
