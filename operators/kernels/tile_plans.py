"""What the words of a literal in tiles are coded with (`operators.literals.tiled`): planned from them, or read.

One call: for a literal of a few thousand words a call takes as long as what it does. The pieces are those of
`operators.kernels.scales` and `operators.kernels.tile_heads`.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.magnitudes import magnitude_scales
from operators.kernels.scales import (
    STEPS,
    TILE_ROWS,
    count,
    count_tail,
    exponent_scales,
    mark_used,
    set_orders,
    window,
)
from operators.kernels.tile_heads import put_scales, take_scales


@kernel("row_scales", "column_scales", "levels", "flips", "sums")
def measure_scales(
    words: Any,
    columns: int,
    below: int,
    step: int,
    row_chunks: int,
    column_rows: int,
    geometry: NDArray[np.int64],
    row_scales: NDArray[np.int32],
    column_scales: NDArray[np.int32],
    levels: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    sums: NDArray[np.uint32],
) -> int:
    """Set the scales of rows and columns; return that of all words together.

    Parameters
    ----------
    words : Words
    columns : int
    below : int
        Bits of `words` below those that are coded.
    step : int
        Scale i is that of row ``i * step``.
    row_chunks, column_rows : int
        How many runs of columns make the scale of a row, `ROW_CHUNKS` or more than there are, and about how many rows
        those of columns.
    geometry : int64 array
        low_bits, fraction_bits, field_bits, signed, tables, scales.
    row_scales : int32 array, shape (rows of whole tiles / step,)
    column_scales : int32 array, shape (columns,)
        Less the mean of them all.
    levels, flips : uint8 arrays, shape (columns,)
        How uneven the signs of each column are, 0 to 4, and whether most are set.
    sums : uint32 array, shape (columns,)
        Scratch.

    Notes
    -----
    Words without a sign are magnitudes: small where they are near zero, as zigzag codes are. The window is then
    the same for all, and a scale says but which table (`operators.kernels.magnitudes`).
    """
    if geometry[3]:
        return exponent_scales(
            words, columns, below, step, row_chunks, column_rows, geometry, row_scales, column_scales, levels, flips,
            sums,
        )  # fmt: skip
    levels[:] = 0
    flips[:] = 0
    return magnitude_scales(
        words, columns, below, step, row_chunks, column_rows, geometry, row_scales, column_scales, sums
    )


@kernel(
    "row_scales", "column_scales", "levels", "flips", "order", "tiles", "column_order", "used", "sums", "sampled",
    "counts", "head",
)  # fmt: skip
def plan_tiles(
    words: Any,
    columns: int,
    row_chunks: int,
    column_rows: int,
    geometry: NDArray[np.int64],
    n_sampled: int,
    row_scales: NDArray[np.int32],
    column_scales: NDArray[np.int32],
    levels: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    order: NDArray[np.int32],
    tiles: NDArray[np.int32],
    column_order: NDArray[np.int32],
    used: NDArray[np.uint8],
    sums: NDArray[np.uint32],
    sampled: NDArray[np.uint32],
    counts: NDArray[np.int64],
    head: NDArray[np.uint8],
) -> tuple[int, int]:
    """Plan the contexts of words and write them to the start of `head`.

    Parameters
    ----------
    words : Words
    columns, row_chunks, column_rows, geometry
        As for `measure_scales`.
    n_sampled : int
        Words from which tables are made.
    row_scales : int32 array, shape (64 * T,)
        Set to the scales of the rows of whole tiles, with the window in them.
    column_scales, levels, flips : arrays, shape (columns,)
        As `measure_scales` leaves them.
    order : int32 array, shape (64 * T,)
        Set to the order of rows.
    tiles : int32 array, shape (T,)
        Set to the scales of tiles.
    column_order : int32 array, shape (columns,)
        Set.
    used : uint8 array, shape (n_tables,)
        Set: whether contexts take a table.
    sums : uint32 array, shape (columns,)
        Scratch.
    sampled : uint32 array
        Scratch, as for `operators.kernels.scales.count_symbols`.
    counts : int64 array, shape (n_tables, SYMBOLS)
        Set to the counts of symbols in the sample.
    head : uint8 array
        Zeroed, then written to; room as for `put_scales`.

    Returns
    -------
    bit, tail_scale : int
        The bit after the contexts, or -1 where a scale is too large.

    Notes
    -----
    The window of symbols is the one that leaves out least of the sample; it moves the scales of rows.
    """
    fraction, signed, tables, kept = geometry[1], geometry[3], geometry[4], geometry[5]
    tail_scale = measure_scales(
        words, columns, 0, 1, row_chunks, column_rows, geometry, row_scales, column_scales, levels, flips, sums
    )
    set_orders(kept, signed, tail_scale, row_scales, order, tiles, column_scales, levels, column_order)
    if order.size:
        count(
            words, columns, order, tiles, TILE_ROWS, column_scales, levels, flips, geometry, n_sampled, sampled
        )  # fmt: skip
    else:
        count_tail(words, tail_scale, geometry, n_sampled, sampled)
    largest = (np.int64(1) << (geometry[2] - fraction)) - 1
    moved = STEPS * window(sampled, fraction, tables, largest - 1 - (tail_scale >> 3), counts)
    tail_scale = tail_scale + moved
    for i in range(row_scales.size):
        row_scales[i] += moved
    for t in range(tiles.size):
        tiles[t] += moved
    mark_used(tiles, tail_scale, column_order, column_scales, levels, tables, signed, used)
    head[:] = 0
    bit = put_scales(
        row_scales if kept else row_scales[:0],
        column_scales if kept == 2 else column_scales[:0],
        tail_scale,
        levels if signed == 2 else levels[:0],
        flips,
        head,
    )
    return bit, tail_scale


@inlined
def take_plan(
    section: Any,
    geometry: Any,
    row_scales: Any,
    column_scales: Any,
    levels: Any,
    flips: Any,
    order: Any,
    tiles: Any,
    column_order: Any,
    used: Any,
) -> Any:
    """Read from `section`, any bytes, what `plan_tiles` writes, and set what it sets; return the same."""
    signed, tables, kept = geometry[3], geometry[4], geometry[5]
    column_scales[:] = 0
    levels[:] = 0
    flips[:] = 0
    bit, tail_scale = take_scales(
        section,
        row_scales if kept else row_scales[:0],
        column_scales if kept == 2 else column_scales[:0],
        levels if signed == 2 else levels[:0],
        flips,
    )
    if bit >= 0:
        set_orders(kept, signed, tail_scale, row_scales, order, tiles, column_scales, levels, column_order)
        mark_used(tiles, tail_scale, column_order, column_scales, levels, tables, signed, used)
    return bit, tail_scale
