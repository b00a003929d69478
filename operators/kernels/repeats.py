"""Whether the words of a literal repeat others before them: what LZ lives on.

Words with few values repeat by chance. Two places that have nothing to do with one another share a word with
probability ``2**-h``, where h is the collision entropy (Renyi, order 2) of how often each word occurs; so a window
of L words is met again by chance once in ``2**(h * L)`` places. Windows are made so long that hardly one in
``2**CHANCE_BITS`` is: those that are met again are repeats.
"""

# mypy: disable-error-code="no-any-return, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length
from operators.kernels.rans import log2_of

CHANCE_BITS = 8
"""One window in 2 to this many may be met again by chance."""
REPEATED = 32
"""One window in this many has to be."""
LOOKED_AT = 1 << 11
"""Windows that are looked at, the first ones."""
WIDE_WINDOW = 1
"""Words of a window where they are too wide to be counted: each is long enough for a match."""
_MIX = np.uint64(0x9E3779B97F4A7C15)


@kernel()
def window_of(counts: NDArray[np.int64]) -> int:
    """Return the words of a window, for words that occur `counts` times; more than there are words where all are one.

    Parameters
    ----------
    counts : int64 array
        Their sum is 1 to 2**20; zeros do not matter.
    """
    n, squares = np.int64(0), np.int64(0)
    for i in range(counts.size):
        n += counts[i]
        squares += counts[i] * counts[i]
    log_n = log2_of(n)
    entropy_q16 = 2 * log_n - log2_of(squares)
    return (log_n + (CHANCE_BITS << 16)) // entropy_q16 + 1 if entropy_q16 > 0 else n + 1


@inlined
def _turned(hashed: Any, by: Any) -> Any:
    """Rotate 64 bits to the left by 0 to 63."""
    return (hashed << by) | (hashed >> ((np.uint64(64) - by) & np.uint64(63)))


@kernel()
def repeats(words: NDArray[Any], window: int) -> bool:
    """Whether one in `REPEATED` of the first windows of `words` has been met before.

    Notes
    -----
    A window is known by a rolling hash (Cohen, Recursive hashing functions for n-grams, 1997), of which a table
    keeps 16 bits.
    """
    n_windows = min(words.size - window + 1, LOOKED_AT)
    if n_windows < REPEATED:
        return False
    index_bits = bit_length(n_windows)
    table = np.zeros(1 << index_bits, np.uint16)
    down, one = np.uint64(64 - index_bits), np.uint64(1)
    age = np.uint64((window - 1) & 63)
    hashed = np.uint64(0)
    for i in range(window - 1):
        hashed = _turned(hashed, one) ^ (np.uint64(words[i]) + one) * _MIX
    n_met = 0
    for i in range(n_windows):
        hashed = _turned(hashed, one) ^ (np.uint64(words[i + window - 1]) + one) * _MIX
        mixed = (hashed ^ (hashed >> np.uint64(29))) * _MIX
        place = mixed >> down
        tag = np.uint16(((mixed >> np.uint64(16)) & np.uint64(0xFFFF)) | one)
        n_met += table[place] == tag
        table[place] = tag
        hashed ^= _turned((np.uint64(words[i]) + one) * _MIX, age)
    return n_met * REPEATED >= n_windows
