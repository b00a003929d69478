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
from operators.kernels.scales import STEPS, TILE_ROWS, count, count_tail, mark_used, set_orders, window
from operators.kernels.tile_heads import put_scales, take_scales


@kernel("row_scales", "order", "tiles", "column_order", "used", "sampled", "counts", "head")
def plan_tiles(
    words: Any,
    columns: int,
    geometry: NDArray[np.int64],
    n_sampled: int,
    tail_scale: int,
    row_scales: NDArray[np.int32],
    column_scales: NDArray[np.int32],
    levels: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    order: NDArray[np.int32],
    tiles: NDArray[np.int32],
    column_order: NDArray[np.int32],
    used: NDArray[np.uint8],
    sampled: NDArray[np.uint32],
    counts: NDArray[np.int64],
    head: NDArray[np.uint8],
) -> tuple[int, int]:
    """Plan the contexts of words and write them to the start of `head`.

    Parameters
    ----------
    words : Words
    columns : int
    geometry : int64 array
        low_bits, fraction_bits, field_bits, signed, tables, scales.
    n_sampled : int
        Words from which tables are made.
    tail_scale : int
    row_scales : int32 array, shape (64 * T,)
        Of the rows of whole tiles; moved with the window.
    column_scales, levels, flips : arrays, shape (columns,)
        As `operators.kernels.scales.measure_scales` leaves them.
    order : int32 array, shape (64 * T,)
        Set to the order of rows.
    tiles : int32 array, shape (T,)
        Set to the scales of tiles.
    column_order : int32 array, shape (columns,)
        Set.
    used : uint8 array, shape (n_tables,)
        Set: whether contexts take a table.
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
