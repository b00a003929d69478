"""Counting words of up to 16 bits.

Several tables take turns, so that a run of one word does not make each increment wait for the store
of the one before it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import kernel
from operators.kernels.memory import load_u64

Tables = NDArray[np.uint32]


@kernel("tables")
def count_u8(words: NDArray[np.uint8], tables: Tables) -> None:
    """Add how often each word occurs to `tables`, shape (4, 2**k) for some k <= 8, words taken modulo 2**k."""
    mask = np.uint64(tables.shape[1] - 1)
    a, b, c, d = tables[0], tables[1], tables[2], tables[3]
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
    a, b, c, d = tables[0], tables[1], tables[2], tables[3]
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


class Histogram:
    """Counts the words of one stream, block by block.

    Parameters
    ----------
    width_bits : int
        1 to 16.
    """

    def __init__(self, width_bits: int) -> None:
        self._tables = np.zeros((4, 1 << width_bits), np.uint32)

    def add(self, words: NDArray[Any]) -> None:
        """Count `words` (uint8 or uint16, below ``2**width_bits``); all calls together at most 2**32 of them."""
        if words.itemsize == 1:
            count_u8(words, self._tables)
        else:
            count_u16(words.view(np.uint8), self._tables)

    def counts(self) -> NDArray[np.int64]:
        """Return how often each word occurred: int64, shape (2**width_bits,)."""
        counts: NDArray[np.int64] = self._tables.sum(axis=0, dtype=np.int64)
        return counts


def histogram(words: NDArray[Any], width_bits: int) -> NDArray[np.int64]:
    """Return how often each word of `words` (below ``2**width_bits``, at most 16 bits) occurs."""
    counted = Histogram(width_bits)
    counted.add(words)
    return counted.counts()
