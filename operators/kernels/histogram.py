"""Counting words of up to 16 bits.

Several tables take turns, so that a run of one word does not make each increment wait for the store
of the one before it. Narrow words are counted in groups: a CPU makes one increment a cycle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.bits import pack_8
from operators.kernels.jit import kernel
from operators.kernels.memory import load_u64

Tables = NDArray[np.uint32]


@kernel("tables")
def count_u8(words: NDArray[np.uint8], tables: Tables) -> None:
    """Add how often each word occurs to `tables`, shape (4 or 1, 2**k), words taken modulo 2**k; k <= 8."""
    mask = np.uint64(tables.shape[1] - 1)
    last = tables.shape[0] - 1
    a, b, c, d = tables[0], tables[1 & last], tables[2 & last], tables[3 & last]
    one = np.uint32(1)
    n_fast = words.size & ~7
    for i in range(0, n_fast, 8):
        eight = load_u64(words, np.uint64(i))
        a[eight & mask] += one
        b[(eight >> np.uint64(8)) & mask] += one
        c[(eight >> np.uint64(16)) & mask] += one
        d[(eight >> np.uint64(24)) & mask] += one
        a[(eight >> np.uint64(32)) & mask] += one
        b[(eight >> np.uint64(40)) & mask] += one
        c[(eight >> np.uint64(48)) & mask] += one
        d[(eight >> np.uint64(56)) & mask] += one
    for i in range(n_fast, words.size):
        a[np.uint64(words[i]) & mask] += one


@kernel("tables")
def count_u16(words: NDArray[np.uint8], tables: Tables) -> None:
    """As `count_u8` for words of two bytes, given as a view of their bytes; k <= 16."""
    mask = np.uint64(tables.shape[1] - 1)
    last = tables.shape[0] - 1
    a, b, c, d = tables[0], tables[1 & last], tables[2 & last], tables[3 & last]
    one = np.uint32(1)
    n_fast = words.size & ~7
    for i in range(0, n_fast, 8):
        four = load_u64(words, np.uint64(i))
        a[four & mask] += one
        b[(four >> np.uint64(16)) & mask] += one
        c[(four >> np.uint64(32)) & mask] += one
        d[(four >> np.uint64(48)) & mask] += one
    for i in range(n_fast, words.size, 2):
        a[(np.uint64(words[i]) | (np.uint64(words[i + 1]) << np.uint64(8))) & mask] += one


@kernel("tables", "counts")
def count_groups(words: NDArray[np.uint8], width: int, tables: Tables, counts: NDArray[np.int64]) -> None:
    """Add how often each group of neighbouring words occurs to `tables`, and each word beyond the groups to `counts`.

    Parameters
    ----------
    words : uint8 array
        Below ``2**width``; larger ones are miscounted, but inside the tables.
    width : int
        1 to 6. Groups are of `group_of` words.
    tables : uint32 array, shape (2, 2**(width * group))
        Indexed by the words of a group, the first lowest.
    counts : int64 array, shape (2**width,)
    """
    w = np.uint64(width)
    mask = np.uint64(tables.shape[1] - 1)
    a, b = tables[0], tables[1]
    one = np.uint32(1)
    n_fast = words.size & ~15
    if width == 1:
        for i in range(0, n_fast, 16):
            a[pack_8(load_u64(words, np.uint64(i)), w) & mask] += one
            b[pack_8(load_u64(words, np.uint64(i + 8)), w) & mask] += one
    elif width <= 3:
        four = np.uint64(4) * w
        for i in range(0, n_fast, 8):
            x = pack_8(load_u64(words, np.uint64(i)), w)
            a[x & mask] += one
            b[(x >> four) & mask] += one
    else:
        two, four, six = w + w, np.uint64(4) * w, np.uint64(6) * w
        for i in range(0, n_fast, 8):
            x = pack_8(load_u64(words, np.uint64(i)), w)
            a[x & mask] += one
            b[(x >> two) & mask] += one
            a[(x >> four) & mask] += one
            b[(x >> six) & mask] += one
    for i in range(n_fast, words.size):
        counts[words[i] & (counts.size - 1)] += 1


@kernel("counts")
def add_groups(tables: Tables, width: int, counts: NDArray[np.int64]) -> None:
    """Add the words of all groups of `tables` to `counts`, shape (2**width,)."""
    mask = (1 << width) - 1
    for t in range(tables.shape[0]):
        for index in range(tables.shape[1]):
            n = np.int64(tables[t, index])
            if n:
                rest = tables.shape[1] >> 1
                group = index
                while rest:
                    counts[group & mask] += n
                    group >>= width
                    rest >>= width


def group_of(width_bits: int) -> int:
    """Return how many words are counted at once: as many as index a table that stays in the nearest cache."""
    return {1: 8, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2}.get(width_bits, 1)


class Histogram:
    """Counts the words of one stream, block by block.

    Parameters
    ----------
    width_bits : int
        1 to 16.
    n_words : int
        About how many words there will be: tables larger than that are not worth their number.
    """

    def __init__(self, width_bits: int, n_words: int = 1 << 32) -> None:
        self._width = width_bits
        self._group = group_of(width_bits) if n_words >= 1 << 12 else 1
        n_tables = 1 if n_words < 1 << width_bits else 4 if self._group == 1 else 2
        self._tables = np.zeros((n_tables, 1 << width_bits * self._group), np.uint32)
        self._rest = np.zeros(1 << width_bits, np.int64)

    def add(self, words: NDArray[Any]) -> None:
        """Count `words` (uint8 or uint16, below ``2**width_bits``); all calls together at most 2**32 of them."""
        if words.itemsize == 2:
            count_u16(words.view(np.uint8), self._tables)
        elif self._group > 1:
            count_groups(words, self._width, self._tables, self._rest)
        else:
            count_u8(words, self._tables)

    def counts(self) -> NDArray[np.int64]:
        """Return how often each word occurred: int64, shape (2**width_bits,)."""
        if self._group == 1:
            sums: NDArray[np.int64] = self._tables.sum(axis=0, dtype=np.int64)
            return sums
        counts = self._rest.copy()
        add_groups(self._tables, self._width, counts)
        return counts
