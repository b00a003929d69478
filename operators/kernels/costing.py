"""What the search looks for: distinct words, cuts, exact structure with an early exit. See `judging` for costs.

Integers only, so that a cost is the same on every machine, compiled or not. Logarithms come from a table
of the caller in units of 2**-20 bit; the sums ``x * log2(x)`` of up to 2**26 words stay below 2**52.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import kernel
from operators.kernels.memory import fetch, item_bytes

LOG_SCALE_BITS = 20
"""Logarithms are integers in units of ``2**-LOG_SCALE_BITS`` bit."""
LOG_TABLE_SIZE = (1 << 16) + 1
"""Entries of a table of logarithms, from 0."""
_AHEAD = 8
"""Runs that are asked for before they are copied."""


@kernel("slots", "hits")
def distinct_words(words: Any, limit: int, slots: Any, hits: Any) -> int:
    """Count the distinct words in a hash table, up to a limit.

    Parameters
    ----------
    words : Words
    limit : int
    slots, hits : uint64 and int64 arrays, shape (2**k,), more than `limit`
        `hits` is zero on entry. Afterwards both begin with the distinct words and how often each occurs, in
        an order that depends on the words alone.

    Returns
    -------
    int
        How many distinct words there are, or -1 where more than `limit`.
    """
    wrap = np.uint64(slots.size - 1)
    spread = np.uint64(0x9E3779B97F4A7C15)
    n_distinct = 0
    for i in range(words.size):
        word = np.uint64(words[i])
        place = ((word * spread) >> np.uint64(32)) & wrap
        while hits[place] and slots[place] != word:
            place = (place + np.uint64(1)) & wrap
        if hits[place] == 0:
            if n_distinct == limit:
                return -1
            n_distinct += 1
            slots[place] = word
        hits[place] += 1
    n_distinct = 0
    for slot in range(slots.size):
        if hits[slot]:
            word, count = slots[slot], hits[slot]
            hits[slot] = 0
            slots[n_distinct] = word
            hits[n_distinct] = count
            n_distinct += 1
    return n_distinct


@kernel("slots", "ranks", "out")
def rank_words(words: Any, values: Any, slots: Any, ranks: Any, out: Any) -> None:
    """Write the index of each word among `values`, all different, which hold every word.

    Parameters
    ----------
    words, values : Words
    slots, ranks : uint64 and int64 arrays, shape (2**k,), more than `values`
        Scratch; `ranks` is zero on entry.
    out : Words, as long as `words`
    """
    wrap = np.uint64(slots.size - 1)
    spread = np.uint64(0x9E3779B97F4A7C15)
    for k in range(values.size):
        word = np.uint64(values[k])
        place = ((word * spread) >> np.uint64(32)) & wrap
        while ranks[place]:
            place = (place + np.uint64(1)) & wrap
        slots[place] = word
        ranks[place] = k + 1
    for i in range(words.size):
        word = np.uint64(words[i])
        place = ((word * spread) >> np.uint64(32)) & wrap
        while slots[place] != word or ranks[place] == 0:
            place = (place + np.uint64(1)) & wrap
        out[i] = ranks[place] - 1


@kernel("table", "symbols", "counts", "sums")
def cut_sums(words: Any, width_bits: int, logs: Any, table: Any, symbols: Any, counts: Any, sums: Any) -> None:
    """For every cut of a word in two, sum up ``x * log2(x)`` over the histograms of both halves.

    The histogram of a half follows from that of the half which is a bit wider, and has fewer entries.

    Parameters
    ----------
    words : Words
        Fewer than `LOG_TABLE_SIZE`.
    width_bits : int
    logs : int64 array, shape (LOG_TABLE_SIZE,)
    table : int32 array, shape (65536,)
        Zeros, and left so.
    symbols, counts : int64 arrays, as long as `words`
        Scratch.
    sums : int64 array, shape (width_bits, 2)
        Row k is set to the sums of the low k bits and of the rest; -1 where that half has over 16 bits.
    """
    sums[:] = -1
    for half in range(2):
        n_live = np.int64(words.size)
        widest = min(16, width_bits - 1)
        keep = (np.uint64(1) << np.uint64(widest)) - np.uint64(1)
        top = np.uint64(width_bits - widest)
        for i in range(n_live):
            word = np.uint64(words[i])
            symbols[i] = np.int64(word & keep if half == 0 else word >> top)
            counts[i] = 1
        for bits in range(widest, 0, -1):
            mask = (1 << bits) - 1
            for i in range(n_live):
                symbol = symbols[i] & mask if half == 0 else symbols[i] >> (0 if bits == widest else 1)
                symbols[i] = symbol
                table[symbol] += counts[i]
            total = np.int64(0)
            kept = np.int64(0)
            for i in range(n_live):
                symbol = symbols[i]
                # Written in any case, and kept where it is the first of its kind: a branch would be guessed wrong.
                x = np.int64(table[symbol])
                table[symbol] = 0
                symbols[kept] = symbol
                counts[kept] = x
                kept += np.int64(x != 0)
                total += x * logs[x]
            n_live = kept
            if half == 0:
                sums[bits, 0] = total
            else:
                sums[width_bits - bits, 1] = total


@kernel("out")
def gather_runs(words: Any, starts: Any, out: Any) -> None:
    """Copy runs of ``out.size // starts.size`` words that begin at `starts` (int64) to `out`, one after the other."""
    run = out.size // starts.size if starts.size else 0
    for i in range(starts.size):
        if i + _AHEAD < starts.size:
            for j in range(0, run, max(1, 64 // item_bytes(words))):
                fetch(words, (starts[i + _AHEAD] + j) * item_bytes(words))
        start = starts[i]
        for j in range(run):
            out[i * run + j] = words[start + j]


@kernel()
def first_change(words: Any, lag: int) -> int:
    """Return the first index i >= lag with ``words[i] != words[i - lag]``, or ``words.size``."""
    start = lag
    while start < words.size:
        stop = start + 1024
        if stop > words.size:
            stop = words.size
        varying = np.uint64(0)
        for i in range(start, stop):
            varying |= np.uint64(words[i] ^ words[i - lag])
        if varying != np.uint64(0):
            for i in range(start, stop):
                if words[i] != words[i - lag]:
                    return i
        start = stop
    return int(words.size)


@kernel()
def last_change(words: Any, lag: int) -> int:
    """Return the last index i >= lag with ``words[i] != words[i - lag]``, or ``lag - 1``."""
    stop = words.size
    while stop > lag:
        start = stop - 1024
        if start < lag:
            start = lag
        varying = np.uint64(0)
        for i in range(start, stop):
            varying |= np.uint64(words[i] ^ words[i - lag])
        if varying != np.uint64(0):
            for i in range(stop - 1, start - 1, -1):
                if words[i] != words[i - lag]:
                    return i
        stop = start
    return lag - 1


@kernel()
def is_ramp(words: Any) -> bool:
    """Return whether all differences of neighbours are equal, modulo the container."""
    if words.size < 2:
        return False
    step = np.uint64(words[1]) - np.uint64(words[0])
    step = np.uint64(words.dtype.type(step & np.uint64(words.dtype.type(0) - words.dtype.type(1))))
    start = 1
    while start < words.size:
        stop = start + 1024
        if stop > words.size:
            stop = words.size
        varying = np.uint64(0)
        for i in range(start, stop):
            varying |= np.uint64(words.dtype.type(words[i] - words[i - 1])) ^ step
        if varying != np.uint64(0):
            return False
        start = stop
    return True


@kernel()
def first_period(words: Any, lags: Any, max_work: int) -> int:
    """Return the first of `lags` at which all words repeat, or 0.

    Parameters
    ----------
    words : Words
    lags : int64 array
        Those below 1 and of more than half of the words, rounded up, are passed over.
    max_work : int
        Words to look at in full comparisons, about; then the search for a period ends.
    """
    n = words.size
    work = 0
    for k in range(lags.size):
        lag = lags[k]
        if lag < 1 or lag > n - n // 2 or work > max_work:
            continue
        # The ends and the middle refuse most lags before a full comparison starts.
        differs = words[n - 1] != words[n - 1 - lag]
        start = lag
        for _ in range(2):
            stop = start + 32
            if stop > n:
                stop = n
            for i in range(start, stop):
                differs |= words[i] != words[i - lag]
            start = lag + (n - lag) // 2
        if differs:
            continue
        change = first_change(words, lag)
        if change == n:
            return int(lag)
        work += change
    return 0
