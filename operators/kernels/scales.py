"""Scales of rows and columns, and the tables of symbols that follow from them (`operators.literals.scaled`).

A scale is an integer in 1/8 octave: the mean of exponents, or of what stands for them. Everything here is
integer arithmetic, so a plan is the same on every machine.
"""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.alphabet import golomb_bits, peek, put_bits, put_golomb, take_golomb, zigzag
from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length, both, down

STEPS = 8
"""Steps of a scale in an octave."""
SYMBOLS = 64
ESCAPE = 63
"""The symbol of what lies outside the window of a context."""
LEVELS = 5
"""Classes of columns by how far from even their signs are."""
SLOTS = 4096
"""Frequencies of a table add up to this."""
MAIN_SLOTS = 16
"""Least slots of a symbol that is not rare: a vector decoder looks at buckets of so many."""
RARE_SLOTS = 128
"""Most slots of all rare symbols of a table."""
SCALE_LIMIT = 1 << 14
"""Scales lie below this, and above its negative."""
CHUNK = 64
"""Neighbouring columns that are looked at together."""
HEADROOM = 8
"""Octaves above the scale, and `DEPTH` below it, in which symbols are counted before a window is chosen."""
DEPTH = 64
_MANTISSA_BITS = 4


@kernel("sums")
def exponent_sums(words: Any, shift: int, mask: int, stride: int, sums: Any) -> None:
    """Set ``sums`` (int64, shape (2,)): the sum and the number of exponents above zero, of every `stride`-th word."""
    total, count = np.int64(0), np.int64(0)
    for i in range(0, words.size, stride):
        exponent = np.int64(down(words[i], shift)) & mask
        total += exponent
        count += exponent > 0
    sums[0] = total
    sums[1] = count


@kernel("scales")
def row_scales(
    words: Any, columns: int, step: int, shift: int, mask: int, floor: int, chunks: int, scales: Any
) -> None:
    """Set the scales of rows: means of the exponents of up to `chunks` runs of columns, spread over the row.

    Parameters
    ----------
    words : Words
    columns : int
    step : int
        Scale i is that of row ``i * step``.
    shift, mask : int
        Exponent of a word: ``(word >> shift) & mask``.
    floor : int
        Exponents below it count as it: zeros say nothing of a scale.
    chunks : int
    scales : int32 array
    """
    stride = CHUNK
    if columns > CHUNK * chunks:
        stride = columns // chunks
    keep = words.dtype.type(mask)
    least = words.dtype.type(floor)
    for i in range(scales.size):
        row = words[i * step * columns : (i * step + 1) * columns]
        total = np.int64(0)
        count = np.int64(0)
        for column in range(0, columns, stride):
            run = row[column : min(column + CHUNK, columns)]
            part = np.uint32(0)
            for c in range(run.size):
                part += np.uint32(max(both(down(run[c], shift), keep), least))
            total += np.int64(part)
            count += run.size
        scales[i] = (2 * STEPS * total + count) // (2 * count)


@kernel("sums", "scales")
def column_scales(
    words: Any, columns: int, rows: int, step: int, shift: int, mask: int, floor: int, sums: Any, scales: Any
) -> None:
    """Set the scales of columns: means of the exponents of every `step`-th row, less the mean of them all.

    Parameters
    ----------
    words : Words
    columns, rows, step : int
    shift, mask, floor : int
        As in `row_scales`.
    sums : uint32 array, shape (columns,)
        Scratch.
    scales : int32 array, shape (columns,)
    """
    keep = words.dtype.type(mask)
    least = words.dtype.type(floor)
    for c in range(columns):
        sums[c] = np.uint32(0)
    count = np.int64(0)
    for r in range(0, rows, step):
        row = words[r * columns : (r + 1) * columns]
        for c in range(columns):
            sums[c] += np.uint32(max(both(down(row[c], shift), keep), least))
        count += 1
    total = np.int64(0)
    for c in range(columns):
        total += np.int64(sums[c])
    half = count * columns
    for c in range(columns):
        scales[c] = (2 * STEPS * (np.int64(sums[c]) * columns - total) + half) // (2 * half)


@kernel("sums", "levels", "flips")
def column_signs(words: Any, columns: int, rows: int, step: int, sums: Any, levels: Any, flips: Any) -> None:
    """Set how uneven the signs of each column are, 0 to 4, and whether most are set.

    Parameters
    ----------
    words : Words
    columns, rows, step : int
        Every `step`-th row is looked at.
    sums : uint32 array, shape (columns,)
        Scratch.
    levels, flips : uint8 arrays, shape (columns,)
    """
    top = 8 * words.itemsize - 1
    for c in range(columns):
        sums[c] = np.uint32(0)
    count = np.int64(0)
    for r in range(0, rows, step):
        row = words[r * columns : (r + 1) * columns]
        for c in range(columns):
            sums[c] += np.uint32(down(row[c], top))
        count += 1
    for c in range(columns):
        set_ = np.int64(sums[c])
        far = 100 * abs(2 * set_ - count)
        level = 0
        if far >= 12 * count:
            level = 1
        if far >= 30 * count:
            level = 2
        if far >= 54 * count:
            level = 3
        if far >= 80 * count:
            level = 4
        levels[c] = level
        flips[c] = 1 if 2 * set_ > count else 0


@kernel("sums")
def sign_spread(words: Any, columns: int, rows: int, step: int, sums: Any) -> int:
    """Return the sum over columns of the square of how many more signs are set than not in every `step`-th row."""
    top = 8 * words.itemsize - 1
    for c in range(columns):
        sums[c] = np.uint32(0)
    count = np.int64(0)
    for r in range(0, rows, step):
        row = words[r * columns : (r + 1) * columns]
        for c in range(columns):
            sums[c] += np.uint32(down(row[c], top))
        count += 1
    spread = np.int64(0)
    for c in range(columns):
        more = 2 * np.int64(sums[c]) - count
        spread += more * more
    return spread


@kernel("order")
def order_by(scales: NDArray[np.int32], levels: NDArray[np.uint8], order: NDArray[np.int32]) -> None:
    """Set the stable order by (level, scale), by counting; `levels` may be empty."""
    lowest, highest = np.int64(scales[0]), np.int64(scales[0])
    for i in range(scales.size):
        lowest = min(lowest, np.int64(scales[i]))
        highest = max(highest, np.int64(scales[i]))
    span = highest - lowest + 1
    starts = np.zeros(span * (LEVELS if levels.size else 1) + 1, np.int64)
    for i in range(scales.size):
        key = np.int64(scales[i]) - lowest + (np.int64(levels[i]) * span if levels.size else 0)
        starts[key + 1] += 1
    for k in range(starts.size - 1):
        starts[k + 1] += starts[k]
    for i in range(scales.size):
        key = np.int64(scales[i]) - lowest + (np.int64(levels[i]) * span if levels.size else 0)
        order[starts[key]] = i
        starts[key] += 1


@kernel("tiles")
def tile_scales(scales: NDArray[np.int32], order: NDArray[np.int32], tiles: NDArray[np.int32]) -> None:
    """Set the scale of each tile of 64 rows in their order: the mean of theirs, to the nearest."""
    for t in range(tiles.size):
        total = np.int64(0)
        for i in range(64):
            total += np.int64(scales[order[64 * t + i]])
        tiles[t] = (2 * total + 64) >> 7


@kernel("counts")
def count_symbols(
    words: Any,
    columns: int,
    rows: NDArray[np.int32],
    scales: NDArray[np.int32],
    column_scales: NDArray[np.int32],
    levels: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    geometry: NDArray[np.int64],
    n_words: int,
    counts: Any,
) -> int:
    """Count symbols by context in a sample of runs of columns; return how many words were counted.

    Parameters
    ----------
    words : Words
    columns : int
    rows : int32 array, shape (m,)
        Rows to sample from; each gives a few runs of columns, that move from row to row.
    scales : int32 array, shape (m,)
        Their scales.
    column_scales, levels, flips : arrays, shape (columns,)
    geometry : int64 array
        low_bits, fraction_bits, field_bits, signed, tables.
    n_words : int
        About how many words to count.
    counts : uint32 array, shape (LEVELS * STEPS, (HEADROOM + DEPTH) << fraction_bits)
        Zeroed. By level and step of the context, and by distance below the octave `HEADROOM` above the scale; the
        last for all that is farther off, or above.
    """
    low, fraction, field_bits, signed = geometry[0], geometry[1], geometry[2], geometry[3]
    top_bit = 8 * words.itemsize - 1
    bins = counts.shape[1]
    flat = counts.reshape(-1)
    runs_per_row = (columns + CHUNK - 1) // CHUNK
    per_row = min(runs_per_row, max(1, n_words // max(1, rows.size * CHUNK)))
    stride = max(1, rows.size * per_row * min(CHUNK, columns) // max(1, n_words))
    counted = np.int64(0)
    keep = np.uint64((np.int64(1) << field_bits) - 1)
    down_by = np.uint64(low)
    for i in range(0, rows.size, stride):
        row = words[np.int64(rows[i]) * columns : (np.int64(rows[i]) + 1) * columns]
        scale = np.int64(scales[i])
        for k in range(per_row):
            run = (k * runs_per_row // per_row + i * 7) % runs_per_row
            end = min(columns, (run + 1) * CHUNK)
            for c in range(run * CHUNK, end):
                word = np.uint64(row[c])
                if signed == 2:
                    sign = ((word >> np.uint64(top_bit)) ^ np.uint64(flips[c])) & np.uint64(1)
                    lowest = (word >> down_by) & np.uint64(1)
                    word ^= (sign ^ lowest) << down_by
                context = scale + np.int64(column_scales[c])
                place = (((context >> 3) + HEADROOM + 1) << fraction) - 1 - np.int64((word >> down_by) & keep)
                if place < 0 or place >= bins:
                    place = bins - 1  # of the escapes
                at = np.uint64((np.int64(levels[c]) * STEPS + (context & 7)) * bins + place)
                flat[at] += np.uint32(1)
            counted += end - run * CHUNK
    return counted


@inlined
def _window(counts: Any, fraction_bits: Any, tables: Any, sums: Any) -> Any:
    bins = counts.shape[1]
    totals = np.zeros(bins, np.int64)
    for row in range(counts.shape[0]):
        for k in range(bins):
            totals[k] += np.int64(counts[row, k])
    # The window that leaves out least, of equals the highest.
    best, best_inside = np.int64(0), np.int64(-1)
    for head in range(HEADROOM, -1, -1):
        start = (HEADROOM - head) << fraction_bits
        inside = np.int64(0)
        for k in range(start, min(bins - 1, start + ESCAPE)):
            inside += totals[k]
        if inside > best_inside:
            best, best_inside = np.int64(head), inside
    start = (HEADROOM - best) << fraction_bits
    for table in range(sums.shape[0]):
        for v in range(SYMBOLS):
            sums[table, v] = 0
    for row in range(counts.shape[0]):
        table = ((row >> 3) << tables) + ((row & 7) >> (3 - tables))
        if table >= sums.shape[0]:
            continue
        for k in range(bins):
            symbol = k - start
            if symbol < 0 or symbol >= ESCAPE or k == bins - 1:
                symbol = np.int64(ESCAPE)
            sums[table, symbol] += np.int64(counts[row, k])
    return best


@kernel("sums")
def window_counts(counts: Any, fraction_bits: int, tables: int, sums: Any) -> int:
    """Choose the window of symbols and sum up the counts of each table in it; return its octaves above the scale.

    Parameters
    ----------
    counts : uint32 array
        As `count_symbols` leaves them.
    fraction_bits : int
    tables : int
        ``2**tables`` tables an octave.
    sums : int64 array, shape (n_tables, SYMBOLS)
        Set, the last symbol to what the window leaves out.
    """
    return _window(counts, fraction_bits, tables, sums)


@inlined
def _log(x: Any, logs: Any) -> Any:
    """Return the logarithm of any count: beyond the table by its upper bits."""
    up = 0
    while x > 65536:
        x >>= 1
        up += 1
    return logs[x] + (np.int64(up) << 20)


@kernel("sums", "costs")
def table_costs(
    counts: Any,
    fraction_bits: int,
    field_bits: int,
    logs: NDArray[np.int64],
    smooth_logs: NDArray[np.int64],
    sums: NDArray[np.int64],
    costs: NDArray[np.int64],
) -> None:
    """Work out what the symbols of a sample would take with 1, 2, 4 and 8 tables an octave.

    Parameters
    ----------
    counts : uint32 array, shape (rows, bins)
        As `count_symbols` leaves them; as many rows as contexts may take.
    fraction_bits, field_bits : int
    logs, smooth_logs : int64 arrays
        log2 of 0 to 65536 in 2**-20 bit, and what stands for it in Grassberger's estimator of entropy.
    sums : int64 array, shape (rows, SYMBOLS)
        Scratch.
    costs : int64 array, shape (4, 2)
        Set, for each number of tables: bits of all symbols and escapes in 2**-20 bit, and bits of the tables.
    """
    for tables in range(4):
        found = sums[: (counts.shape[0] >> 3) << tables]
        _window(counts, fraction_bits, tables, found)
        bits, head = np.int64(0), np.int64(0)
        escapes, counted = np.int64(0), np.int64(0)
        for table in range(found.shape[0]):
            total = np.int64(0)
            for v in range(SYMBOLS):
                total += found[table, v]
            head += 1
            if total == 0:
                continue
            coded = total * _log(total, logs)
            head += 6
            previous = np.int64(0)
            for v in range(SYMBOLS):
                x = found[table, v]
                coded -= x * _log(x, smooth_logs)
                n_bits = bit_length((2 * x * SLOTS + total) // (2 * total))
                head += golomb_bits(0, zigzag(n_bits - previous)) + min(max(n_bits - 1, np.int64(0)), 4)
                previous = n_bits
            bits += max(np.int64(0), coded) + ((found[table, ESCAPE] * field_bits) << 20)
            escapes += found[table, ESCAPE]
            counted += total
        if 2 * escapes > counted:
            bits = (counted * 64) << 20  # the writer gives up
        costs[tables, 0] = bits
        costs[tables, 1] = head


@kernel("used")
def mark_used(
    tiles: NDArray[np.int32],
    tail_scale: int,
    order: NDArray[np.int32],
    scales: NDArray[np.int32],
    levels: NDArray[np.uint8],
    tables: int,
    used: NDArray[np.uint8],
) -> None:
    """Mark the tables that the pairs of columns of all tiles take; `used` is zeroed, one byte a table."""
    row_steps = np.zeros(STEPS, np.uint8)
    for t in range(tiles.size):
        row_steps[np.int64(tiles[t]) & 7] = 1
    for p in range(0, order.size, 2):
        column = order[p]
        first = np.int64(levels[column]) << tables
        for step in range(STEPS):
            if row_steps[step]:
                used[first + (((step + np.int64(scales[column])) & 7) >> (3 - tables))] = 1
    used[(tail_scale & 7) >> (3 - tables)] = 1


@inlined
def _rounded(frequency: Any) -> Any:
    """Return the nearest number with at most 5 significant bits."""
    spare = bit_length(frequency) - 1 - _MANTISSA_BITS
    if spare <= 0:
        return frequency
    return ((frequency + (np.int64(1) << (spare - 1))) >> spare) << spare


@kernel("frequencies")
def fit_table(counts: NDArray[np.int64], pool: NDArray[np.int64], frequencies: NDArray[np.uint16]) -> int:
    """Set frequencies close to the proportions of `counts`; return the symbol that takes what is left.

    Symbols that are hardly seen are left to the escape. Every frequency but that of one symbol has at most 5
    significant bits, so that a table costs about a byte a symbol; what rounding leaves goes to that one.

    Parameters
    ----------
    counts : int64 array, shape (SYMBOLS,)
    pool : int64 array, shape (SYMBOLS,)
        Counts of all tables together, which stand in where `counts` are few.
    frequencies : uint16 array, shape (SYMBOLS,)
    """
    seen, pooled = np.int64(0), np.int64(0)
    for v in range(SYMBOLS):
        seen += counts[v]
        pooled += pool[v]
    g = np.zeros(SYMBOLS, np.int64)
    total = np.int64(0)
    for v in range(SYMBOLS):
        # In units of 1/16, so that a borrowed part of a count is not lost.
        g[v] = 16 * counts[v]
        if seen < SLOTS and pooled:
            g[v] += pool[v] * SLOTS // pooled
        total += g[v]
    least = max(np.int64(1), total // 50000)
    for v in range(ESCAPE):
        if g[v] < least:
            g[ESCAPE] += g[v]
            g[v] = 0
    g[ESCAPE] = max(g[ESCAPE], np.int64(1))
    total, live, largest = np.int64(0), np.int64(0), 0
    for v in range(SYMBOLS):
        total += g[v]
        live += g[v] > 0
        if g[v] > g[largest]:
            largest = v
    if live == 1:
        g[0] = 1
        total += 1
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


@inlined
def _scale_code(scales: Any) -> Any:
    """Return base, order and bits of the code of an array of scales."""
    total = np.int64(0)
    for i in range(scales.size):
        total += np.int64(scales[i])
    base = (2 * total + scales.size) // (2 * scales.size)
    order, best = 0, np.int64(1) << 62
    for k in range(12):
        n_bits = np.int64(0)
        for i in range(scales.size):
            n_bits += golomb_bits(k, zigzag(np.int64(scales[i]) - base))
        if n_bits < best:
            order, best = k, n_bits
    return base, order, best


@kernel()
def scale_bits(scales: NDArray[np.int32]) -> int:
    """Return the bits that an array of scales takes."""
    return _scale_code(scales)[2] + 19 if scales.size else 0


@inlined
def _put_scales(out: Any, bit: Any, scales: Any) -> Any:
    """Write an array of scales: its base, an order, then Exp-Golomb codes of the differences to the base."""
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


@kernel("out")
def put_head(
    row_scales: NDArray[np.int32],
    column_scales: NDArray[np.int32],
    tail_scale: int,
    levels: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    frequencies: NDArray[np.uint16],
    spare: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> int:
    """Write scales, signs and tables to the zeroed `out`; return the bytes that they take.

    Parameters
    ----------
    row_scales, column_scales : int32 arrays
        Empty where the payload has none.
    tail_scale : int
    levels, flips : uint8 arrays, shape (columns,), or empty
    frequencies : uint16 array, shape (n_tables, SYMBOLS)
        Zeros for a table that is not there.
    spare : int64 array, shape (n_tables,)
        The symbol of each table that takes what the others leave.
    out : uint8 array
        Room for 6 bytes per scale, 1 per column and 160 per table, and 64.
    """
    bit = put_bits(out, 0, tail_scale + SCALE_LIMIT, 15)
    if row_scales.size:
        bit = _put_scales(out, bit, row_scales)
    if column_scales.size:
        bit = _put_scales(out, bit, column_scales)
    for c in range(levels.size):
        bit = put_bits(out, bit, np.int64(levels[c]) | np.int64(flips[c]) << 3, 4)
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


@kernel("row_scales", "column_scales", "levels", "flips", "frequencies", "numbers")
def take_head(
    buffer: NDArray[np.uint8],
    row_scales: NDArray[np.int32],
    column_scales: NDArray[np.int32],
    levels: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    frequencies: NDArray[np.uint16],
    numbers: NDArray[np.int64],
) -> int:
    """Read what `put_head` writes into arrays of the same shapes; return its bytes, or -1 where it is none.

    ``numbers[0]`` is set to the scale of the tail. Tables are checked: their sums, and the rule of rare symbols.
    """
    end = 8 * buffer.size
    numbers[0] = np.int64(peek(buffer, 0) & np.uint64(0x7FFF)) - SCALE_LIMIT
    bit = np.int64(15)
    if row_scales.size:
        bit = _take_scales(buffer, bit, row_scales)
        if bit < 0:
            return -1
    if column_scales.size:
        bit = _take_scales(buffer, bit, column_scales)
        if bit < 0:
            return -1
    for c in range(levels.size):
        nibble = np.int64(peek(buffer, bit) & np.uint64(15))
        bit += 4
        levels[c] = nibble & 7
        flips[c] = nibble >> 3
        if nibble & 7 >= LEVELS or bit > end:
            return -1
    for table in range(frequencies.shape[0]):
        for v in range(SYMBOLS):
            frequencies[table, v] = 0
        is_there = np.int64(peek(buffer, bit) & np.uint64(1))
        bit += 1
        if bit > end:
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
    if bit & 7 and buffer[bit >> 3] >> (bit & 7):
        return -1
    return (bit + 7) >> 3
