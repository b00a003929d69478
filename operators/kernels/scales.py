"""Scales of rows and columns, and the symbols that follow from them (`operators.literals.tiled`).

A scale is an integer in 1/8 octave: the mean of exponents, or of what stands for them. Everything here is
integer arithmetic, so a plan is the same on every machine.
"""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import both, down

STEPS = 8
"""Steps of a scale in an octave."""
SYMBOLS = 64
ESCAPE = 63
"""The symbol of what lies outside the window of a context."""
LEVELS = 5
"""Classes of columns by how far from even their signs are."""
SLOTS = 4096
"""Frequencies of a table add up to this."""
CHUNK = 64
"""Neighbouring columns that are looked at together."""
HEADROOM = 8
"""Octaves above the scale, and `DEPTH` below it, in which symbols are counted before a window is chosen."""
DEPTH = 64


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


@inlined
def _count_signs(words: Any, columns: Any, rows: Any, step: Any, sums: Any) -> Any:
    """Set how many signs of each column are set in every `step`-th row; return how many rows these are."""
    top = 8 * words.itemsize - 1
    for c in range(columns):
        sums[c] = np.uint32(0)
    count = np.int64(0)
    for r in range(0, rows, step):
        row = words[r * columns : (r + 1) * columns]
        for c in range(columns):
            sums[c] += np.uint32(down(row[c], top))
        count += 1
    return count


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
    count = _count_signs(words, columns, rows, step, sums)
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
    count = _count_signs(words, columns, rows, step, sums)
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
    top_bit = np.uint64(8 * words.itemsize - 1)
    bins = counts.shape[1]
    flat = counts.reshape(-1)
    runs_per_row = (columns + CHUNK - 1) // CHUNK
    per_row = min(runs_per_row, max(1, n_words // max(1, rows.size * CHUNK)))
    stride = max(1, rows.size * per_row * min(CHUNK, columns) // max(1, n_words))
    counted = np.int64(0)
    keep = np.uint64((np.int64(1) << field_bits) - 1)
    down_by = np.uint64(low)
    top = np.int32((HEADROOM + 1) << fraction) - np.int32(1)
    step_bins, level_bins, last = np.int32(bins), np.int32(STEPS * bins), np.int32(bins - 1)
    places = np.empty(CHUNK, np.int32)
    for i in range(0, rows.size, stride):
        row = words[np.int64(rows[i]) * columns : (np.int64(rows[i]) + 1) * columns]
        scale = scales[i]
        for k in range(per_row):
            run = (k * runs_per_row // per_row + i * 7) % runs_per_row
            start = run * CHUNK
            part = row[start : min(columns, start + CHUNK)]
            part_scales = column_scales[start : start + part.size]
            part_levels = levels[start : start + part.size]
            if signed == 2:
                part_flips = flips[start : start + part.size]
                for c in range(part.size):
                    word = np.uint64(part[c])
                    sign = ((word >> top_bit) ^ np.uint64(part_flips[c])) & np.uint64(1)
                    word ^= (sign ^ ((word >> down_by) & np.uint64(1))) << down_by
                    places[c] = np.int32((word >> down_by) & keep)
            else:
                for c in range(part.size):
                    places[c] = np.int32((np.uint64(part[c]) >> down_by) & keep)
            for c in range(part.size):
                context = np.int32(scale + part_scales[c])
                place = np.int32(((context >> 3) << fraction) + top - places[c])
                is_outside = np.uint32(place) > np.uint32(last)
                place = last if is_outside else place  # of the escapes
                places[c] = np.int32(part_levels[c] * level_bins + (context & 7) * step_bins + place)
            for c in range(part.size):
                flat[np.uint64(places[c])] += np.uint32(1)
            counted += part.size
    return counted


@inlined
def window(counts: Any, fraction_bits: Any, tables: Any, sums: Any) -> Any:
    """As `window_counts`."""
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
    return window(counts, fraction_bits, tables, sums)


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
