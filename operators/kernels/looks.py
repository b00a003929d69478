"""Whether words have structure that shows at once: what decides which programs are tried on them.

Buckets are coarse on purpose. Tensors that play one role differ by chance, and whoever takes over a program compares
bytes; only what would want another kind of program is to be seen.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any, Final

import numpy as np

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length
from operators.kernels.memory import item_bytes

RUNS: Final = 16
"""Runs of neighbours that are looked at, spread over all words."""
RUN_WORDS: Final = 64
FEW: Final = 16
"""So many different words are few; wide ones, of which no code of single words can be made, from more on."""
SLOTS: Final = 1024
"""Places of the table of different words: more than twice as many as are counted."""
NEARER: Final = 3
"""Half bits by which differences to a neighbour are shorter than those to a word far away, where words are in order."""


@inlined
def _bits_of(word: Any) -> Any:
    high = bit_length(np.int64(word >> np.uint64(32)))
    return high + 32 if high else bit_length(np.int64(word & np.uint64(0xFFFFFFFF)))


@inlined
def _distance_bits(words: Any, i: Any, j: Any) -> Any:
    a, b = np.uint64(words[i]), np.uint64(words[j])
    return _bits_of(a - b if a > b else b - a)


@inlined
def _in_order(far: Any, near: Any, n: Any) -> Any:
    return np.int64(n >= 16 and 2 * (far - near) >= NEARER * n)


@inlined
def _often(part: Any, whole: Any) -> Any:
    """Return 1 from an eighth on, 2 from a half on."""
    return np.int64(8 * part >= whole) + np.int64(2 * part >= whole)


@kernel()
def look(words: Any, columns: int) -> int:
    """Return what shows of `words`, as one number.

    Parameters
    ----------
    words : Words, shape (n,)
        At least one.
    columns : int
        Words of a row, 0 where there are none.

    Returns
    -------
    int
        In octal, from the lowest digit: 1 for one word, 2 for few different ones, 3 for many of them; how often one
        equals the one before it (an eighth, a half); how often one is zero (the same); whole bytes at the lower end
        that are the same in all; whole bytes at the upper end that are zero in all; whether neighbours are near, and
        whether rows are.
    """
    n = words.size
    whole = n <= RUNS * RUN_WORDS
    n_runs, run_words = (1, n) if whole else (RUNS, RUN_WORDS)
    slots, used = np.empty(SLOTS, np.uint64), np.zeros(SLOTS, np.uint8)
    spread = np.uint64(0x9E3779B97F4A7C15)
    first = np.uint64(words[0])
    varying, largest = np.uint64(0), np.uint64(0)
    most = max(FEW, min(n, RUNS * RUN_WORDS) // 4 if item_bytes(words) > 2 else 0)
    live, equal, zeros, seen = 0, 0, 0, 0
    near, row, far, far_row, n_near, n_row = np.int64(0), np.int64(0), np.int64(0), np.int64(0), 0, 0
    for r in range(n_runs):
        start = 0 if whole else r * (n - run_words) // (n_runs - 1)
        before = first ^ np.uint64(1)
        for i in range(start, start + run_words):
            word = np.uint64(words[i])
            varying |= word ^ first
            largest |= word
            equal += word == before
            zeros += word == np.uint64(0)
            before = word
            if live <= most:
                place = ((word * spread) >> np.uint64(40)) & np.uint64(SLOTS - 1)
                while used[place] and slots[place] != word:
                    place = (place + np.uint64(1)) & np.uint64(SLOTS - 1)
                if not used[place]:
                    used[place] = 1
                    slots[place] = word
                    live += 1
        seen += run_words
        for i in range(start, start + run_words - 1, 5):
            j = i + (n >> 1)
            distance = _distance_bits(words, i, j if j < n else j - n)
            near += _distance_bits(words, i, i + 1)
            far += distance
            n_near += 1
            if 0 < columns < n - i:
                row += _distance_bits(words, i, i + columns)
                far_row += distance
                n_row += 1
    width_bits = 8 * item_bytes(words)
    dead_low = width_bits if varying == np.uint64(0) else 0
    while dead_low < width_bits and not (varying >> np.uint64(dead_low)) & np.uint64(1):
        dead_low += 1
    dead_high = width_bits - _bits_of(largest)
    number = np.int64(1 if live == 1 else 2 if live <= most else 3)
    number |= _often(equal, seen) << 3
    number |= _often(zeros, seen) << 6
    number |= np.int64(min(7, dead_low >> 3)) << 9
    number |= np.int64(min(7, dead_high >> 3)) << 12
    number |= (_in_order(far, near, n_near) | _in_order(far_row, row, n_row) << 1) << 15
    return number
