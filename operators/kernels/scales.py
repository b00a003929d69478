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
from operators.kernels.memory import fetch, item_bytes

STEPS = 8
"""Steps of a scale in an octave."""
SYMBOLS = 64
ESCAPE = 63
"""The symbol of what lies outside the window of a context."""
LEVELS = 5
"""Classes of columns by how far from even their signs are."""
SLOTS = 4096
"""Frequencies of a table add up to this."""
TILE_ROWS = 64
HEADROOM = 8
"""Octaves above the scale, and `DEPTH` below it, in which symbols are counted before a window is chosen."""
DEPTH = 64
CHUNK = 64
"""Neighbouring columns that are looked at together."""
_MEAN_CHUNKS = 64
"""Runs of words from which the mean of all exponents is made."""
ROW_CHUNKS = 4
"""Runs of columns from which the scale of a row is made."""
_FLOOR_OCTAVES = 3
"""An exponent farther below the mean counts as if it were there: few of them would sway the mean of a row most."""
_AHEAD = 8
"""Rows that are asked for before they are looked at."""


# -- scales ---------------------------------------------------------------------------------------------


@inlined
def _exponent(word: Any, shift: Any, keep: Any, least: Any) -> Any:
    """Return the exponent of a word in 16 bits."""
    return np.uint16(max(both(down(word, shift), keep), least))


@inlined
def _mean(words: Any, shift: Any, keep: Any) -> Any:
    """Return the mean of exponents above zero, from runs spread over all words."""
    stride = max(CHUNK, words.size // _MEAN_CHUNKS | 1)
    total, count = np.int64(0), np.int64(0)
    for start in range(0, words.size, stride):
        run = words[start : min(start + CHUNK, words.size)]
        part, seen = np.uint32(0), np.uint32(0)
        for c in range(run.size):
            exponent = both(down(run[c], shift), keep)
            part += np.uint32(exponent)
            seen += np.uint32(1 if exponent > 0 else 0)
        total += np.int64(part)
        count += np.int64(seen)
    return total // max(np.int64(1), count)


@inlined
def _fetch_row(words: Any, start: Any, columns: Any) -> None:
    """Ask for the runs of a row that make its scale."""
    for k in range(ROW_CHUNKS):
        for c in range(0, CHUNK * item_bytes(words), 64):
            fetch(words, (start + k * (columns // ROW_CHUNKS)) * item_bytes(words) + c)


@inlined
def _row_scales(
    words: Any, columns: Any, step: Any, chunks: Any, shift: Any, keep: Any, least: Any, scales: Any
) -> None:
    """Set the scale of each `step`-th row: the mean of the exponents of a few runs of columns, spread over the row."""
    if columns <= chunks * CHUNK:
        for i in range(scales.size):
            start, total = np.uint64(i * step * columns), np.uint32(0)
            for c in range(columns):
                total += np.uint32(_exponent(words[start + np.uint64(c)], shift, keep, least))
            scales[i] = (2 * STEPS * np.int64(total) + columns) // (2 * columns)
        return
    stride, count = np.uint64(columns // ROW_CHUNKS), np.int64(ROW_CHUNKS * CHUNK)
    for i in range(scales.size):
        if i + _AHEAD < scales.size:
            _fetch_row(words, (i + _AHEAD) * step * columns, columns)
        start, total = np.uint64(i * step * columns), np.uint32(0)
        for c in range(CHUNK):
            # Narrow sums are twice as fast. They overflow where no payload could hold the scale anyway.
            place = start + np.uint64(c)
            four = _exponent(words[place], shift, keep, least)
            for _ in range(ROW_CHUNKS - 1):
                place += stride
                four = np.uint16(four + _exponent(words[place], shift, keep, least))
            total += np.uint32(four)
        scales[i] = (2 * STEPS * np.int64(total) + count) // (2 * count)


@inlined
def _column_scales(
    words: Any, columns: Any, rows: Any, step: Any, shift: Any, keep: Any, least: Any, sums: Any, scales: Any
) -> None:
    """Set the scales of columns: means of the exponents of every `step`-th row, less the mean of them all."""
    for c in range(columns):
        sums[c] = np.uint32(0)
    count = (rows + step - 1) // step
    for i in range(0, count - 1, 2):
        first, second = np.uint64(i * step * columns), np.uint64((i + 1) * step * columns)
        for c in range(columns):
            one = _exponent(words[first + np.uint64(c)], shift, keep, least)
            two = _exponent(words[second + np.uint64(c)], shift, keep, least)
            sums[c] += np.uint32(np.uint16(one + two))
    if count & 1:
        last = np.uint64((count - 1) * step * columns)
        for c in range(columns):
            sums[c] += np.uint32(_exponent(words[last + np.uint64(c)], shift, keep, least))
    total = np.int64(0)
    for c in range(columns):
        total += np.int64(sums[c])
    half = count * columns
    for c in range(columns):
        scales[c] = (2 * STEPS * (np.int64(sums[c]) * columns - total) + half) // (2 * half)


@inlined
def _count_signs(words: Any, columns: Any, rows: Any, step: Any, sums: Any) -> Any:
    """Set how many signs of each column are set in every `step`-th row; return how many rows these are."""
    top = 8 * item_bytes(words) - 1
    for c in range(columns):
        sums[c] = np.uint32(0)
    count = np.int64(0)
    for r in range(0, rows, step):
        row = words[r * columns : (r + 1) * columns]
        for c in range(columns):
            sums[c] += np.uint32(down(row[c], top))
        count += 1
    return count


@inlined
def _column_signs(words: Any, columns: Any, rows: Any, step: Any, sums: Any, levels: Any, flips: Any) -> None:
    """Set how uneven the signs of each column are in every `step`-th row, 0 to 4, and whether most are set."""
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


@inlined
def exponent_scales(
    words: Any,
    columns: Any,
    below: Any,
    step: Any,
    row_chunks: Any,
    column_rows: Any,
    geometry: Any,
    row_scales: Any,
    column_scales: Any,
    levels: Any,
    flips: Any,
    sums: Any,
) -> Any:
    """Set the scales of words with an exponent, as `operators.kernels.tile_plans.measure_scales` returns them."""
    low, fraction, field_bits, signed, kept = geometry[0], geometry[1], geometry[2], geometry[3], geometry[5]
    shift, mask = low + below + fraction, (np.int64(1) << (field_bits - fraction)) - 1
    keep = words.dtype.type(mask)
    mean = _mean(words, shift, keep)
    least = words.dtype.type(max(np.int64(0), mean - _FLOOR_OCTAVES))
    tail_scale = STEPS * mean + STEPS // 2
    rows = words.size // columns // TILE_ROWS * TILE_ROWS
    sampled = max(np.int64(1), rows // column_rows)
    if rows and kept:
        _row_scales(words, columns, step, row_chunks, shift, keep, least, row_scales)
    else:
        for i in range(row_scales.size):
            row_scales[i] = tail_scale
    if rows and kept == 2:
        _column_scales(words, columns, rows, sampled, shift, keep, least, sums, column_scales)
    else:
        for c in range(column_scales.size):
            column_scales[c] = 0
    if rows and signed == 2:
        _column_signs(words, columns, rows, sampled, sums, levels, flips)
    else:
        for c in range(levels.size):
            levels[c], flips[c] = 0, 0
    return tail_scale


# -- orders ---------------------------------------------------------------------------------------------


@inlined
def order_by(scales: Any, levels: Any, order: Any) -> None:
    """Set the stable order by (level, scale), by counting; `levels` may be empty."""
    lowest, highest = np.int64(scales[0]), np.int64(scales[0])
    for i in range(scales.size):
        lowest = min(lowest, np.int64(scales[i]))
        highest = max(highest, np.int64(scales[i]))
    span = highest - lowest + 1
    starts = np.zeros(span * (LEVELS if levels.size else 1) + 1, np.int64)
    for i in range(scales.size):
        key = np.int64(scales[i]) - lowest + (np.int64(levels[i]) * span if levels.size else 0)
        starts[np.uint64(key + 1)] += 1
    for k in range(starts.size - 1):
        starts[k + 1] += starts[k]
    for i in range(scales.size):
        key = np.uint64(np.int64(scales[i]) - lowest + (np.int64(levels[i]) * span if levels.size else 0))
        order[np.uint64(starts[key])] = i
        starts[key] += 1


@inlined
def set_orders(
    kept: Any,
    signed: Any,
    tail_scale: Any,
    row_scales: Any,
    order: Any,
    tiles: Any,
    column_scales: Any,
    levels: Any,
    column_order: Any,
) -> None:
    """Set the order of rows, the scales of tiles (means of 64 rows, to the nearest), and the order of columns."""
    if kept and row_scales.size:
        order_by(row_scales, levels[:0], order)
        for t in range(tiles.size):
            total = np.int64(0)
            for i in range(TILE_ROWS):
                total += np.int64(row_scales[order[TILE_ROWS * t + i]])
            tiles[t] = (2 * total + TILE_ROWS) // (2 * TILE_ROWS)
    else:
        for i in range(order.size):
            order[i] = i
        for t in range(tiles.size):
            tiles[t] = tail_scale
    if signed == 2:
        order_by(column_scales, levels, column_order)
    elif kept == 2:
        order_by(column_scales, levels[:0], column_order)
    else:
        for c in range(column_order.size):
            column_order[c] = c


@inlined
def mark_used(
    tiles: Any, tail_scale: Any, order: Any, scales: Any, levels: Any, tables: Any, signed: Any, used: Any
) -> None:
    """Mark the tables that the pairs of columns of all tiles take, one byte a table."""
    for table in range(used.size):
        used[table] = 0
    row_steps = np.zeros(STEPS, np.uint8)
    for t in range(tiles.size):
        row_steps[np.int64(tiles[t]) & 7] = 1
    # Of a level and step of columns one pair tells it all.
    seen = np.zeros(LEVELS * STEPS, np.uint8)
    for p in range(0, order.size, 2):
        column = np.uint64(order[p])
        level = np.int64(levels[column]) if signed == 2 else np.int64(0)
        seen[np.uint64(level * STEPS + (np.int64(scales[column]) & 7))] = 1
    for context in range(seen.size):
        if seen[context]:
            for step in range(STEPS):
                if row_steps[step]:
                    used[((context >> 3) << tables) + (((step + context) & 7) >> (3 - tables))] = 1
    used[(tail_scale & 7) >> (3 - tables)] = 1


# -- counts ---------------------------------------------------------------------------------------------


@inlined
def count(
    words: Any,
    columns: Any,
    rows: Any,
    scales: Any,
    rows_per_scale: Any,
    column_scales: Any,
    levels: Any,
    flips: Any,
    geometry: Any,
    n_words: Any,
    counts: Any,
) -> None:
    """As `count_symbols`, with a scale for so many rows in turn."""
    low, fraction, field_bits, signed = geometry[0], geometry[1], geometry[2], geometry[3]
    top_bit, down_by = np.uint64(8 * item_bytes(words) - 1), np.uint64(low)
    bins = counts.shape[1]
    flat = counts.reshape(-1)
    for k in range(flat.size):
        flat[k] = 0
    runs_per_row = (columns + CHUNK - 1) // CHUNK
    per_row = min(runs_per_row, max(1, n_words // max(1, rows.size * CHUNK)))
    stride = max(1, rows.size * per_row * min(CHUNK, columns) // max(1, n_words))
    keep = np.uint64((np.int64(1) << field_bits) - 1)
    top = np.int32((HEADROOM + 1) << fraction) - np.int32(1)
    step_bins, level_bins, last = np.int32(bins), np.int32(STEPS * bins), np.int32(bins - 1)
    places = np.empty(CHUNK, np.int32)
    for i in range(0, rows.size, stride):
        scale = scales[i // rows_per_scale]
        for k in range(per_row):
            start = (k * runs_per_row // per_row + i * 7) % runs_per_row * CHUNK
            first, column = np.uint64(np.int64(rows[i]) * columns + start), np.uint64(start)
            n = min(CHUNK, columns - start)
            if signed == 2:
                for c in range(n):
                    word = np.uint64(words[first + np.uint64(c)])
                    sign = ((word >> top_bit) ^ np.uint64(flips[column + np.uint64(c)])) & np.uint64(1)
                    word ^= (sign ^ ((word >> down_by) & np.uint64(1))) << down_by
                    places[c] = np.int32((word >> down_by) & keep)
            else:
                for c in range(n):
                    places[c] = np.int32((np.uint64(words[first + np.uint64(c)]) >> down_by) & keep)
            for c in range(n):
                context = np.int32(scale + column_scales[column + np.uint64(c)])
                place = np.int32(((context >> 3) << fraction) + top - places[c])
                is_outside = np.uint32(place) > np.uint32(last)
                place = last if is_outside else place  # of the escapes
                places[c] = np.int32((context & 7) * step_bins + place)
            if signed == 2:
                for c in range(n):
                    places[c] += np.int32(levels[column + np.uint64(c)]) * level_bins
            for c in range(n):
                flat[np.uint64(places[c])] += np.uint32(1)


@inlined
def count_tail(words: Any, tail_scale: Any, geometry: Any, n_words: Any, counts: Any) -> None:
    """Count symbols of words that have no rows, as `count` does."""
    columns = words.size // (2 * TILE_ROWS) * 2
    scales, zeros = np.zeros(columns, np.int32), np.zeros(columns, np.uint8)
    tiles = np.full(1, tail_scale, np.int32)
    rows = np.arange(TILE_ROWS).astype(np.int32)
    count(words, columns, rows, tiles, TILE_ROWS, scales, zeros, zeros, geometry, n_words, counts)


@kernel("counts")
def count_symbols(
    words: Any,
    columns: int,
    rows: NDArray[np.int32],
    scales: NDArray[np.int32],
    tail_scale: int,
    column_scales: NDArray[np.int32],
    levels: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    geometry: NDArray[np.int64],
    n_words: int,
    counts: Any,
) -> None:
    """Count symbols by context in a sample of runs of columns.

    Parameters
    ----------
    words : Words
    columns : int
    rows : int32 array, shape (m,)
        Rows to sample from; each gives a few runs of columns, that move from row to row. Without any the words
        are taken as those of a tail.
    scales : int32 array, shape (m,)
        Their scales.
    tail_scale : int
    column_scales, levels, flips : arrays, shape (columns,)
    geometry : int64 array
        As for `operators.kernels.tile_plans.measure_scales`, the words below included.
    n_words : int
        About how many words to count.
    counts : uint32 array, shape (contexts, (HEADROOM + DEPTH) << fraction_bits)
        Set. By level and step of the context (`STEPS` where there is no level, `LEVELS` times as many where there
        is), and by distance below the octave `HEADROOM` above the scale; the last for all that is farther off, or
        above.
    """
    if rows.size:
        count(words, columns, rows, scales, 1, column_scales, levels, flips, geometry, n_words, counts)
    else:
        count_tail(words, tail_scale, geometry, n_words, counts)


@inlined
def window(counts: Any, fraction_bits: Any, tables: Any, most: Any, sums: Any) -> Any:
    """Choose the window of symbols and sum up the counts of each table in it; return its octaves above the scale.

    Parameters
    ----------
    counts : uint32 array
        As `count_symbols` leaves them.
    fraction_bits : int
    tables : int
        ``2**tables`` tables an octave.
    most : int
        Octaves above the scale that the window may have: tops beyond the field would be cut off.
    sums : int64 array, shape (n_tables, SYMBOLS)
        Set, the last symbol to what the window leaves out.
    """
    bins = counts.shape[1]
    totals = np.zeros(bins, np.int64)
    for row in range(counts.shape[0]):
        for k in range(bins):
            totals[k] += np.int64(counts[row, k])
    # The window that leaves out least, of equals the highest.
    best, best_inside = np.int64(0), np.int64(-1)
    for head in range(min(max(most, 0), HEADROOM), -1, -1):
        start = (HEADROOM - head) << fraction_bits
        inside = np.int64(0)
        for k in range(start, min(bins - 1, start + ESCAPE)):
            inside += totals[k]
        if inside > best_inside:
            best, best_inside = np.int64(head), inside
    start = (HEADROOM - best) << fraction_bits
    stop = min(bins - 1, start + ESCAPE)
    for table in range(sums.shape[0]):
        for v in range(SYMBOLS):
            sums[table, v] = 0
    for row in range(counts.shape[0]):
        table = ((row >> 3) << tables) + ((row & 7) >> (3 - tables))
        if table >= sums.shape[0]:
            continue
        outside = np.int64(0)
        for k in range(bins):
            outside += np.int64(counts[row, k])
        for k in range(start, stop):
            sums[table, k - start] += np.int64(counts[row, k])
            outside -= np.int64(counts[row, k])
        sums[table, ESCAPE] += outside
    return best
