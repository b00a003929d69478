"""What a literal in tiles has before its words (`operators.literals.tiled`): scales and tables, fitted, written, read.

Readers get any bytes.
"""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.alphabet import golomb_bits, peek, put_bits, put_golomb, take_golomb, zigzag
from operators.kernels.huffman import limited_lengths
from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length
from operators.kernels.scales import ESCAPE, LEVELS, SLOTS, SYMBOLS

MAIN_SLOTS = 16
"""Least slots of a symbol that is not rare: a vector decoder looks at buckets of so many."""
RARE_SLOTS = 128
"""Most slots of all rare symbols of a table."""
MAX_LENGTH = 12
"""Bits of the longest code of a symbol."""
SCALE_LIMIT = 1 << 14
"""Scales lie below this, and above its negative."""
_MANTISSA_BITS = 4


# -- scales ---------------------------------------------------------------------------------------------


@inlined
def _scale_code(scales: Any) -> Any:
    """Return base, order and bits of the code of an array of scales."""
    total = np.int64(0)
    for i in range(scales.size):
        total += np.int64(scales[i])
    base = (2 * total + scales.size) // (2 * scales.size)
    spread = np.int64(0)
    for i in range(scales.size):
        spread += zigzag(np.int64(scales[i]) - base)
    # The best order is the logarithm of the mean or next to it.
    middle = min(max(bit_length(spread // scales.size), np.int64(1)), np.int64(10))
    below, at, above = np.int64(0), np.int64(0), np.int64(0)
    for i in range(scales.size):
        code = zigzag(np.int64(scales[i]) - base)
        below += golomb_bits(middle - 1, code)
        at += golomb_bits(middle, code)
        above += golomb_bits(middle + 1, code)
    order, best = middle - 1, below
    if at < best:
        order, best = middle, at
    if above < best:
        order, best = middle + 1, above
    return base, order, best


@kernel()
def scale_bits(scales: NDArray[np.int32]) -> int:
    """Return the bits that an array of scales takes."""
    return _scale_code(scales)[2] + 19 if scales.size else 0


@inlined
def _put_scales(out: Any, bit: Any, scales: Any) -> Any:
    """Write an array of scales: its base, an order, then Exp-Golomb codes of the differences to the base.

    Return the bit after it, or -1 where a scale is too large.
    """
    for i in range(scales.size):
        if not -SCALE_LIMIT < scales[i] < SCALE_LIMIT:
            return np.int64(-1)
    base, order, _ = _scale_code(scales)
    bit = put_bits(out, bit, base + SCALE_LIMIT, 15)
    bit = put_bits(out, bit, order, 4)
    for i in range(scales.size):
        bit = put_golomb(out, bit, order, zigzag(np.int64(scales[i]) - base))
    return bit


@inlined
def _take_scales(buffer: Any, bit: Any, scales: Any) -> Any:
    """Read an array of scales; return the bit after it, or -1 where there is none."""
    base = np.int64(peek(buffer, bit) & np.uint64(0x7FFF)) - SCALE_LIMIT
    order = np.int64(peek(buffer, bit + 15) & np.uint64(15))
    bit += 19
    for i in range(scales.size):
        code, bit = take_golomb(buffer, bit, order)
        scale = base + (code >> 1 if code & 1 == 0 else -((code + 1) >> 1))
        if code < 0 or bit > 8 * buffer.size or scale <= -SCALE_LIMIT or scale >= SCALE_LIMIT:
            return np.int64(-1)
        scales[i] = scale
    return bit


@inlined
def put_scales(row_scales: Any, column_scales: Any, tail_scale: Any, levels: Any, flips: Any, out: Any) -> Any:
    """Write scales and signs to the zeroed `out`; return the bit after them, or -1 where a scale is too large.

    Parameters
    ----------
    row_scales, column_scales : int32 arrays
        Empty where the payload has none.
    tail_scale : int
    levels, flips : uint8 arrays, shape (columns,), or empty
    out : uint8 array
        Room for 6 bytes per scale and 1 per column, and 64.
    """
    if not -SCALE_LIMIT < tail_scale < SCALE_LIMIT:
        return np.int64(-1)
    bit = put_bits(out, 0, tail_scale + SCALE_LIMIT, 15)
    if row_scales.size:
        bit = _put_scales(out, bit, row_scales)
        if bit < 0:
            return np.int64(-1)
    if column_scales.size:
        bit = _put_scales(out, bit, column_scales)
        if bit < 0:
            return np.int64(-1)
    for c in range(levels.size):
        bit = put_bits(out, bit, np.int64(levels[c]) | np.int64(flips[c]) << 3, 4)
    return bit


@inlined
def take_scales(buffer: Any, row_scales: Any, column_scales: Any, levels: Any, flips: Any) -> Any:
    """Read what `put_scales` writes into arrays of the same shapes.

    Returns
    -------
    bit, tail_scale : int
        `bit` is the one after it, or -1 where it is none.
    """
    tail_scale = np.int64(peek(buffer, 0) & np.uint64(0x7FFF)) - SCALE_LIMIT
    bit = np.int64(15)
    for scales in (row_scales, column_scales):
        if scales.size:
            bit = _take_scales(buffer, bit, scales)
            if bit < 0:
                return np.int64(-1), tail_scale
    for c in range(levels.size):
        nibble = np.int64(peek(buffer, bit) & np.uint64(15))
        bit += 4
        levels[c] = nibble & 7
        flips[c] = nibble >> 3
        if nibble & 7 >= LEVELS or bit > 8 * buffer.size:
            return np.int64(-1), tail_scale
    return bit, tail_scale


@inlined
def _end(buffer: Any, bit: Any) -> Any:
    """Return the byte after `bit`, or -1 where the bits up to it are not zero or it lies beyond the buffer."""
    if bit > 8 * buffer.size:
        return np.int64(-1)
    if bit & 7 and buffer[bit >> 3] >> (bit & 7):
        return np.int64(-1)
    return (bit + 7) >> 3


# -- frequencies ----------------------------------------------------------------------------------------


@inlined
def _rounded(frequency: Any) -> Any:
    """Return the nearest number with at most 5 significant bits."""
    spare = bit_length(frequency) - 1 - _MANTISSA_BITS
    if spare <= 0:
        return frequency
    return ((frequency + (np.int64(1) << (spare - 1))) >> spare) << spare


@inlined
def _likely(counts: Any, pool: Any, g: Any) -> None:
    """Set how likely each symbol is, in no unit; what is hardly seen is left to the escape, at least two are live."""
    pooled = np.int64(0)
    for v in range(SYMBOLS):
        pooled += pool[v]
    total = np.int64(0)
    for v in range(SYMBOLS):
        # In units of 1/16, so that a borrowed part of a count is not lost; all tables together lend 512 counts.
        g[v] = 16 * counts[v]
        if pooled:
            g[v] += 2 * pool[v] * SLOTS // pooled
        total += g[v]
    least = max(np.int64(1), total // 50000)
    for v in range(ESCAPE):
        if g[v] < least:
            g[ESCAPE] += g[v]
            g[v] = 0
    g[ESCAPE] = max(g[ESCAPE], np.int64(1))
    live = 0
    for v in range(SYMBOLS):
        live += g[v] > 0
    if live == 1:
        g[0] = 1


@kernel("frequencies", "spare")
def fit_frequencies(
    counts: NDArray[np.int64], used: NDArray[np.uint8], frequencies: NDArray[np.uint16], spare: NDArray[np.int64]
) -> None:
    """Set frequencies close to the proportions of counts.

    Symbols that are hardly seen are left to the escape. Every frequency but that of one symbol has at most 5
    significant bits, so that a table costs about a byte a symbol; what rounding leaves goes to that one.

    Parameters
    ----------
    counts : int64 array, shape (n_tables, SYMBOLS)
        Those of all tables together lend a part, for the symbols that one has not seen.
    used : uint8 array, shape (n_tables,)
        Whether there is a table.
    frequencies : uint16 array, shape (n_tables, SYMBOLS)
        Set, to zeros where there is no table.
    spare : int64 array, shape (n_tables,)
        Set to the symbol that takes what is left.
    """
    pool = _pool(counts)
    for table in range(counts.shape[0]):
        frequencies[table] = 0
        spare[table] = 0
        if used[table]:
            spare[table] = _fit_frequencies(counts[table], pool, frequencies[table])


@inlined
def _pool(counts: Any) -> Any:
    """Return the counts of all tables together."""
    pool = np.zeros(SYMBOLS, np.int64)
    for table in range(counts.shape[0]):
        for v in range(SYMBOLS):
            pool[v] += counts[table, v]
    return pool


@inlined
def _fit_frequencies(counts: Any, pool: Any, frequencies: Any) -> Any:
    """Set the frequencies of one table; return the symbol that takes what is left."""
    g = np.zeros(SYMBOLS, np.int64)
    _likely(counts, pool, g)
    total, largest = np.int64(0), 0
    for v in range(SYMBOLS):
        total += g[v]
        if g[v] > g[largest]:
            largest = v
    f = np.zeros(SYMBOLS, np.int64)
    rare = np.int64(0)
    for v in range(SYMBOLS):
        if g[v] and g[v] * SLOTS < total * MAIN_SLOTS:
            f[v] = max(np.int64(1), (2 * g[v] * SLOTS + total) // (2 * total))
            if f[v] >= MAIN_SLOTS:
                f[v] = MAIN_SLOTS - 1
            rare += f[v]
    while rare > RARE_SLOTS:  # the most frequent of them become main ones
        most = -1
        for v in range(SYMBOLS):
            if 0 < f[v] < MAIN_SLOTS and (most < 0 or g[v] > g[most]):
                most = v
        rare -= f[most]
        f[most] = MAIN_SLOTS
    # Main symbols share what is left in proportion, none below its least.
    left, mass = np.int64(SLOTS), np.int64(0)
    for v in range(SYMBOLS):
        if f[v]:
            left -= f[v]
        else:
            mass += g[v]
    again = True
    while again:
        again = False
        for v in range(SYMBOLS):
            if g[v] and f[v] == 0 and g[v] * left < mass * MAIN_SLOTS and v != largest:
                f[v] = MAIN_SLOTS
                left -= MAIN_SLOTS
                mass -= g[v]
                again = True
    carry = np.int64(0)
    shared = left
    for v in range(SYMBOLS):
        if g[v] and f[v] == 0 and v != largest:
            exact = (2 * g[v] * shared + mass) // (2 * mass)
            f[v] = max(np.int64(MAIN_SLOTS), _rounded(max(exact + carry, np.int64(1))))
            carry += exact - f[v]
            left -= f[v]
    f[largest] = left
    for v in range(SYMBOLS):
        frequencies[v] = f[v]
    return largest


@kernel("out")
def put_frequencies(frequencies: NDArray[np.uint16], spare: NDArray[np.int64], out: NDArray[np.uint8], bit: int) -> int:
    """Write tables of frequencies at `bit` of the zeroed `out`; return the byte after them.

    Parameters
    ----------
    frequencies : uint16 array, shape (n_tables, SYMBOLS)
        Zeros for a table that is not there.
    spare : int64 array, shape (n_tables,)
        The symbol of each table that takes what the others leave.
    out : uint8 array
        Room for 160 bytes per table, and 64.
    bit : int
    """
    for table in range(frequencies.shape[0]):
        is_there = 0
        for v in range(SYMBOLS):
            if frequencies[table, v]:
                is_there = 1
        bit = put_bits(out, bit, is_there, 1)
        if not is_there:
            continue
        bit = put_bits(out, bit, spare[table], 6)
        previous = np.int64(0)
        for v in range(SYMBOLS):
            if v == spare[table]:
                continue
            f = np.int64(frequencies[table, v])
            n_bits = bit_length(f)
            bit = put_golomb(out, bit, 0, zigzag(n_bits - previous))
            previous = n_bits
            kept = min(n_bits - 1, np.int64(_MANTISSA_BITS))
            if kept > 0:
                bit = put_bits(out, bit, f >> (n_bits - 1 - kept), kept)
    return (bit + 7) >> 3


@kernel("frequencies", "out")
def make_frequencies(
    counts: NDArray[np.int64],
    used: NDArray[np.uint8],
    frequencies: NDArray[np.uint16],
    out: NDArray[np.uint8],
    bit: int,
) -> int:
    """Fit tables to counts and write them, in one call: see `fit_frequencies` and `put_frequencies`."""
    spare = np.empty(counts.shape[0], np.int64)
    fit_frequencies(counts, used, frequencies, spare)
    return put_frequencies(frequencies, spare, out, bit)


@kernel("frequencies")
def take_frequencies(
    buffer: NDArray[np.uint8], bit: int, used: NDArray[np.uint8], frequencies: NDArray[np.uint16]
) -> int:
    """Read what `put_frequencies` writes; return the byte after it, or -1 where it is none.

    Tables are checked: that those in use are there, their sums, the rule of rare symbols, and that the escape is in
    them.
    """
    end = 8 * buffer.size
    for table in range(frequencies.shape[0]):
        for v in range(SYMBOLS):
            frequencies[table, v] = 0
        is_there = np.int64(peek(buffer, bit) & np.uint64(1))
        bit += 1
        if bit > end or used[table] > is_there:
            return -1
        if not is_there:
            continue
        spare = np.int64(peek(buffer, bit) & np.uint64(63))
        bit += 6
        previous, total, rare = np.int64(0), np.int64(0), np.int64(0)
        for v in range(SYMBOLS):
            if v == spare:
                continue
            code, bit = take_golomb(buffer, bit, 0)
            previous += code >> 1 if code & 1 == 0 else -((code + 1) >> 1)
            if code < 0 or previous < 0 or previous > 12 or bit > end:
                return -1
            if previous == 0:
                continue
            kept = min(previous - 1, np.int64(_MANTISSA_BITS))
            f = np.int64(1) << kept
            if kept:
                f |= np.int64(peek(buffer, bit)) & ((np.int64(1) << kept) - 1)
                bit += kept
            f <<= previous - 1 - kept
            frequencies[table, v] = f
            total += f
            if f < MAIN_SLOTS:
                rare += f
        if bit > end or total >= SLOTS or total == 0:
            return -1
        left = SLOTS - total
        frequencies[table, spare] = left
        if left < MAIN_SLOTS:
            rare += left
        if rare > RARE_SLOTS or frequencies[table, ESCAPE] == 0:
            return -1
    return _end(buffer, bit)


# -- code lengths ---------------------------------------------------------------------------------------


@kernel("lengths")
def fit_lengths(counts: NDArray[np.int64], used: NDArray[np.uint8], lengths: NDArray[np.uint8]) -> None:
    """Set the lengths of the best codes of at most `MAX_LENGTH` bits for the proportions of counts.

    Parameters
    ----------
    counts, used : arrays
        As for `fit_frequencies`.
    lengths : uint8 array, shape (n_tables, SYMBOLS)
        Set, 0 for symbols that are left to the escape, and where there is no table. The escape always has a code.
    """
    pool = _pool(counts)
    g = np.zeros(SYMBOLS, np.int64)
    for table in range(counts.shape[0]):
        lengths[table] = 0
        if used[table]:
            _likely(counts[table], pool, g)
            code_lengths(g, lengths[table])


@inlined
def code_lengths(weights: Any, lengths: Any) -> None:
    """Set the lengths of the best code of at most `MAX_LENGTH` bits for symbols of these weights, 0 where that is 0.

    The escape has a code in any case, and another symbol.
    """
    keys = np.zeros(SYMBOLS, np.int64)
    live = 0
    for v in range(SYMBOLS):
        lengths[v] = 0
        weight = max(weights[v], np.int64(1)) if v == ESCAPE else weights[v]
        if weight > 0:
            keys[live] = weight * SYMBOLS + v
            live += 1
    if live == 1:
        keys[live] = SYMBOLS
        live += 1
    keys = np.sort(keys[:live])
    found = np.empty(live, np.int64)
    limited_lengths(keys // SYMBOLS, MAX_LENGTH, found)
    for i in range(live):
        lengths[keys[i] % SYMBOLS] = found[i]


@kernel("out")
def put_lengths(lengths: NDArray[np.uint8], out: NDArray[np.uint8], bit: int) -> int:
    """Write tables of code lengths, all 0 where a table is not there; return the byte after them.

    `out` and `bit` are those of `put_frequencies`.
    """
    for table in range(lengths.shape[0]):
        is_there = 1 if lengths[table].any() else 0
        bit = put_bits(out, bit, is_there, 1)
        if not is_there:
            continue
        previous = np.int64(0)
        for v in range(SYMBOLS):
            bit = put_golomb(out, bit, 0, zigzag(np.int64(lengths[table, v]) - previous))
            previous = np.int64(lengths[table, v])
    return (bit + 7) >> 3


@kernel("lengths")
def take_lengths(buffer: NDArray[np.uint8], bit: int, used: NDArray[np.uint8], lengths: NDArray[np.uint8]) -> int:
    """Read what `put_lengths` writes; return the byte after it, or -1 where it is none.

    Tables in use are there, lengths are at most `MAX_LENGTH`, and the escape has one; whether codes are complete is
    left to their user.
    """
    end = 8 * buffer.size
    for table in range(lengths.shape[0]):
        lengths[table] = 0
        is_there = np.int64(peek(buffer, bit) & np.uint64(1))
        bit += 1
        if bit > end or used[table] > is_there:
            return -1
        if not is_there:
            continue
        previous = np.int64(0)
        for v in range(SYMBOLS):
            code, bit = take_golomb(buffer, bit, 0)
            previous += code >> 1 if code & 1 == 0 else -((code + 1) >> 1)
            if code < 0 or previous < 0 or previous > MAX_LENGTH or bit > end:
                return -1
            lengths[table, v] = previous
        if previous == 0:  # of the escape, the last
            return -1
    return _end(buffer, bit)
