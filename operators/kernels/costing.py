"""What the search counts: histograms of bit fields, entropies, exact structure with an early exit.

Integers only, so that a cost is the same on every machine, compiled or not. Logarithms come from a table
of the caller in units of 2**-20 bit; the sums ``x * log2(x)`` of up to 2**26 words stay below 2**52.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import kernel

LOG_SCALE_BITS = 20
"""Logarithms are integers in units of ``2**-LOG_SCALE_BITS`` bit."""
LOG_TABLE_SIZE = (1 << 16) + 1
"""Entries of a table of logarithms, from 0."""


@kernel("counts", "live", "places", "sums")
def tally(
    words: Any,
    shift: int,
    mask: int,
    counts: Any,
    live: Any,
    places: Any,
    max_live: int,
    log_total: int,
    logs: Any,
    smooth_logs: Any,
    sums: Any,
) -> None:
    """Count the bit field ``(word >> shift) & mask`` of every word, and sum up what the cost of a code needs.

    Parameters
    ----------
    words : Words
        Fewer than 2**31.
    shift, mask : int
        `mask` has at most 16 bits.
    counts : int32 array, more than `mask` of them
        Zeros, and left so.
    live, places : int64 arrays, one more than of `counts`
        Their first ``sums[0]`` are set to the counts that are not zero, in the order of the fields, and to the
        fields.
    max_live : int
        Live fields beyond which no table is costed: its sums are those of no fields.
    log_total : int
        Logarithm of ``words.size``.
    logs, smooth_logs : int64 arrays, shape (LOG_TABLE_SIZE,)
        log2(x), and Grassberger's substitute for it.
    sums : int64 array, shape (13,)
        Set to: live fields, those seen once, those seen twice, sum of ``x * log2(x)``, the same with
        `smooth_logs`, the largest field; of a table in the form of `operators.kernels.alphabet`, the bits of its
        gaps, of its levels as differences, and of its values; what fields rarer than one in 2**14 would need
        to become that frequent, in 2**-24 of all; the fields equal to the one before, the or of all
        differences to the first, and how many would equal the one before in random order.
    """
    equal = 0
    varying = np.uint64(0)
    down = np.uint64(shift)
    keep = np.uint64(mask)
    if words.size:
        first = (np.uint64(words[0]) >> down) & keep
        previous = first ^ np.uint64(1)
        for i in range(words.size):
            word = (np.uint64(words[i]) >> down) & keep
            counts[word] += 1
            equal += word == previous
            varying |= word ^ first
            previous = word
        equal = int(equal)
    total = words.size
    n_live = 0
    once = 0
    twice = 0
    plain = 0
    smooth = 0
    last = -1
    gap_bits = 0
    level_bits = 0
    value_bits = 0
    level = 0
    rare = 0
    pairs = 0
    for symbol in range(mask + 1):
        x = np.int64(counts[symbol])
        # Written in any case, and kept where it counts: a branch would be mispredicted in noise.
        live[n_live] = x
        places[n_live] = symbol
        n_live += x != 0
        counts[symbol] = 0
    n_live = int(n_live)
    for k in range(n_live):
        x = live[k]
        if x == 1:
            once += 1
        elif x == 2:
            twice += 1
        pairs += x * x
        y = x
        up = 0
        while y > 65536:
            y >>= 1
            up += 1
        log = logs[y] + (up << 20)
        plain += x * log
        smooth += x * (smooth_logs[y] + (up << 20))
        if n_live > max_live:
            continue
        gap = places[k] - last
        last = places[k]
        gap_bits -= 1
        while gap:
            gap_bits += 2
            gap >>= 1
        share = (x << 24) // total
        if share < 1024:
            rare += 1024 - share
        length = (log_total - log + (1 << 19)) >> 20
        if length < 1:
            length = 1
        if length > 15:
            length = 15
        if length < 12:
            value_bits += 12 - length
        step = length - level
        level = length
        step = 2 * step if step >= 0 else -1 - 2 * step
        step += 1
        level_bits -= 1
        while step:
            level_bits += 2
            step >>= 1
    sums[0] = n_live
    sums[1] = once
    sums[2] = twice
    sums[3] = plain
    sums[4] = smooth
    sums[5] = places[n_live - 1] if n_live else 0
    sums[6] = gap_bits
    sums[7] = level_bits
    sums[8] = value_bits
    sums[9] = rare
    sums[10] = equal
    sums[11] = np.int64(varying)
    sums[12] = pairs // max(1, total)


@kernel("summary")
def outline(words: Any, summary: Any) -> None:
    """Set `summary` (uint64, shape (3,)): words equal to the one before, or of differences to the first, largest."""
    equal = np.uint64(0)
    varying = np.uint64(0)
    largest = np.uint64(0)
    if words.size:
        first = np.uint64(words[0])
        for i in range(words.size):
            word = np.uint64(words[i])
            varying |= word ^ first
            largest = max(largest, word)
        for i in range(1, words.size):
            equal += np.uint64(words[i] == words[i - 1])
    summary[0] = equal
    summary[1] = varying
    summary[2] = largest


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


@kernel("merged")
def huffman_bits(live: Any, merged: Any) -> int:
    """Return the bits of the Huffman code of all words, without a limit on lengths.

    Parameters
    ----------
    live : int64 array, shape (k,)
        Counts in ascending order, all positive.
    merged : int64 array, shape (k,)
        Scratch.
    """
    k = live.size
    if k == 1:
        return int(live[0])
    total = 0
    taken = 0
    head = 0
    for tail in range(k - 1):
        weight = 0
        for _ in range(2):
            if taken < k and (head >= tail or live[taken] <= merged[head]):
                weight += live[taken]
                taken += 1
            else:
                weight += merged[head]
                head += 1
        merged[tail] = weight
        total += weight
    return total


@kernel("low", "high", "sums")
def cut_sums(symbols: Any, counts: Any, width_bits: int, logs: Any, low: Any, high: Any, sums: Any) -> None:
    """For every cut of a word in two, sum up ``x * log2(x)`` over the histograms of both halves.

    Parameters
    ----------
    symbols, counts : uint64 and int64 arrays of one shape
        The distinct words and how often they occur.
    width_bits : int
    logs : int64 array, shape (LOG_TABLE_SIZE,)
    low, high : int32 arrays, shape (65536,)
        Zeros, and left so.
    sums : int64 array, shape (width_bits, 2)
        Row k is set to the sums of the low k bits and of the rest; -1 where that half has over 16 bits.
    """
    for cut in range(1, width_bits):
        keep = (np.uint64(1) << np.uint64(cut)) - np.uint64(1)
        down = np.uint64(cut)
        for half in range(2):
            half_bits = cut if half == 0 else width_bits - cut
            sums[cut, half] = -1
            if half_bits > 16:
                continue
            tables = low if half == 0 else high
            for i in range(symbols.size):
                part = symbols[i] & keep if half == 0 else symbols[i] >> down
                tables[part] += counts[i]
            total = 0
            for i in range(symbols.size):
                part = symbols[i] & keep if half == 0 else symbols[i] >> down
                x = tables[part]
                if x:
                    tables[part] = 0
                    y = x
                    up = 0
                    while y > 65536:
                        y >>= 1
                        up += 1
                    total += x * (logs[y] + (up << 20))
            sums[cut, half] = total


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


@kernel("sums")
def neighbour_bits(
    words: Any, shift: int, width_bits: int, stride: int, row_lag: int, row_block: int, sums: Any
) -> None:
    """Compare how far words are from the one before, from the one a row before, and from one far away.

    Parameters
    ----------
    words : Words
    shift, width_bits : int
        Bit field of the words that is looked at.
    stride : int
        Every so manyth word is looked at.
    row_lag, row_block : int
        The word ``row_lag`` later stands a row below, for the first half of each `row_block` words; or for
        all, where `row_block` is 0. 0 and 0 where there are no rows.
    sums : int64 array, shape (5,)
        Set to: bits of the differences to the next word, to a far one, and how many; bits of those to the word
        a row below, and how many.
    """
    n = words.size
    down = np.uint64(shift)
    keep = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits)
    half = n >> 1
    near, far, row, n_near, n_row = 0, 0, 0, 0, 0
    for i in range(0, n - 1, stride):
        word = (np.uint64(words[i]) >> down) & keep
        for other in range(3):
            j = i + 1 if other == 0 else i + half if other == 1 else i + row_lag
            if other == 2 and (row_lag == 0 or j >= n or (row_block and (i % row_block) * 2 >= row_block)):
                continue
            if j >= n:
                j -= n
            partner = (np.uint64(words[j]) >> down) & keep
            difference = word - partner if word > partner else partner - word
            bits = 0
            while difference:
                difference >>= np.uint64(1)
                bits += 1
            if other == 0:
                near += bits
                n_near += 1
            elif other == 1:
                far += bits
            else:
                row += bits
                n_row += 1
    sums[0] = near
    sums[1] = far
    sums[2] = n_near
    sums[3] = row
    sums[4] = n_row
