"""rANS over tiles for any machine: symbols by `operators.kernels.tile_planes`, coded a vector of 64 lanes at a time.

Where the CPU has AVX2 the steps of `operators.kernels.rans_avx2` do for a vector what the plain ones here do.

The bytes are those of `operators.literals.scaled`. Lane j of a group codes row j of its vectors; all lanes share
one stream. Source: Duda, Asymmetric numeral systems, 2013; Giesen, Interleaved entropy coders, 2014.
"""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import pick
from operators.kernels.memory import copy_bytes, item_bytes, load_u16, load_u64, store_u16
from operators.kernels.rans_avx2 import BITS, ESCAPED, LOWEST, put_vector, take_vector
from operators.kernels.tile_payloads import decode_payload, lane_tables
from operators.kernels.tile_planes import (
    BIT_7,
    BLOCK_COLUMN_BYTES,
    COLUMN_BYTES,
    ESCAPE,
    FIXED_BYTES,
    ROWS,
    areas,
    coded_of,
    field_of,
    merge_tile,
    outside,
    put_coded,
    range_of,
    set_contexts,
    set_flips,
    split_tile,
    top_bit_of,
    with_field,
)
from operators.kernels.vectors import HAS_AVX2

LANES = 64
PAIR_BYTES, PAIR_ESCAPES = 4 * LANES, 2 * LANES
"""Room that a pair of columns must have, whether it needs it or not: giving up must not depend on the machine."""
ENCODER_BYTES = 16 * 65
"""Of a table: for each symbol a reciprocal and a row as in `operators.kernels.rans`, then the range of live symbols."""
DECODER_BYTES = 4 << BITS
"""Of a table: for each slot ``symbol | escaped << 6 | place << 8 | frequency << 20``."""
_ENTRIES = ENCODER_BYTES // 8
SCRATCH_BYTES = FIXED_BYTES
SCRATCH_BYTES_PER_COLUMN = COLUMN_BYTES + ROWS + BLOCK_COLUMN_BYTES
# The symbols of a tile in coding order, and when decoding its raw block.


@inlined
def _canonical(frequencies: Any, order: Any) -> Any:
    """Set the live symbols, frequent ones first; return how many there are."""
    m = 0
    for symbol in range(64):
        if frequencies[symbol]:
            i = m
            while i > 0 and frequencies[order[i - 1]] < frequencies[symbol]:
                order[i] = order[i - 1]
                i -= 1
            order[i] = symbol
            m += 1
    return m


@kernel("out")
def encoder_tables(frequencies: NDArray[np.uint16], out: NDArray[np.uint8]) -> None:
    """Set what `encode_tiles` needs of each table.

    Parameters
    ----------
    frequencies : uint16 array, shape (n_tables, 64)
        By symbol, at most 4095 each; those of a table add up to 4096, or are all 0 where there is none.
    out : uint8 array, shape (n_tables, ENCODER_BYTES)
    """
    entries = out.reshape(-1).view(np.uint64)
    order = np.empty(64, np.int64)
    for table in range(frequencies.shape[0]):
        start = 0
        # Of an escape without slots, which no symbol has: what was there before could be the row of one.
        entries[_ENTRIES * table + 2 * ESCAPE] = np.uint64(0)
        entries[_ENTRIES * table + 2 * ESCAPE + 1] = np.uint64(0)
        for i in range(_canonical(frequencies[table], order)):
            f = np.int64(frequencies[table, order[i]])
            at = _ENTRIES * table + 2 * order[i]
            entries[at] = np.uint64((np.int64(1) << (32 + BITS)) // f + 1)
            entries[at + 1] = np.uint64(f << (32 - BITS)) | np.uint64(start << 32) | np.uint64(((1 << BITS) - f) << 48)
            start += f
        of_table = entries[_ENTRIES * table : _ENTRIES * (table + 1)]
        of_table[128], of_table[129] = range_of(frequencies[table], order[0] if start else np.int64(0))
        # Symbols without slots are escapes too.
        for symbol in range(ESCAPE):
            if frequencies[table, symbol] == 0:
                of_table[2 * symbol] = of_table[2 * ESCAPE]
                of_table[2 * symbol + 1] = of_table[2 * ESCAPE + 1]


@kernel("out")
def decoder_tables(frequencies: NDArray[np.uint16], out: NDArray[np.uint8]) -> None:
    """Set what `decode_tiles` needs of each table; `out` has shape (n_tables, DECODER_BYTES)."""
    entries = out.reshape(-1).view(np.uint32)
    entries[:] = 0
    order = np.empty(64, np.int64)
    for table in range(frequencies.shape[0]):
        slot = table << BITS
        for i in range(_canonical(frequencies[table], order)):
            symbol = order[i]
            f = np.int64(frequencies[table, symbol])
            for place in range(f):
                entries[slot] = (
                    np.uint32(symbol | f << 20) | np.uint32(place << 8) | np.uint32(ESCAPED if symbol == ESCAPE else 0)
                )
                slot += 1


@inlined
def _seeded_bytes(block_bytes: Any, lanes: Any) -> Any:
    """Return how many bytes at the end of the last block are in the end states instead."""
    return min(2 * lanes, block_bytes)


@inlined
def _put(symbol: Any, entries: Any, first: Any, states: Any, lane: Any, stream: Any, at: Any) -> Any:
    """Encode a symbol; return the byte where the stream starts."""
    entry = first + (symbol & np.uint64(255)) * np.uint64(2)
    row = entries[entry + np.uint64(1)]
    x = np.uint64(states[lane])
    store_u16(stream, at - np.uint64(2), np.uint16(x & np.uint64(0xFFFF)))
    is_full = x >= (row & np.uint64(0xFFFFFFFF))
    x = pick(is_full, x >> np.uint64(16), x)
    at = pick(is_full, at - np.uint64(2), at)
    q = (x * entries[entry]) >> np.uint64(32 + BITS)
    states[lane] = np.uint32(x + ((row >> np.uint64(32)) & np.uint64(0xFFFF)) + q * (row >> np.uint64(48)))
    return at


@inlined
def _outside_vector(scratch: Any, symbols: Any, entries: Any, first: Any) -> Any:
    """Return 0 where all 64 symbols of a column are in the range of its table: then none of them is an escape."""
    low, high = entries[first + np.uint64(128)], entries[first + np.uint64(129)]
    bits = np.uint64(0)
    for g in range(8):
        bits |= outside(load_u64(scratch, np.uint64(symbols + 8 * g)), low, high)
    return bits & BIT_7


@inlined
def _put_vector_plain(
    scratch: Any, symbols: Any, entries: Any, first: Any, states: Any, lane: Any, stream: Any, at: Any
) -> Any:
    """Encode the 64 symbols of a column, the last first; return the byte where the stream starts."""
    for g in range(7, -1, -1):
        eight = load_u64(scratch, np.uint64(symbols + 8 * g))
        j = lane + np.uint64(8 * g)
        at = _put(eight >> np.uint64(56), entries, first, states, j + np.uint64(7), stream, at)
        at = _put(eight >> np.uint64(48), entries, first, states, j + np.uint64(6), stream, at)
        at = _put(eight >> np.uint64(40), entries, first, states, j + np.uint64(5), stream, at)
        at = _put(eight >> np.uint64(32), entries, first, states, j + np.uint64(4), stream, at)
        at = _put(eight >> np.uint64(24), entries, first, states, j + np.uint64(3), stream, at)
        at = _put(eight >> np.uint64(16), entries, first, states, j + np.uint64(2), stream, at)
        at = _put(eight >> np.uint64(8), entries, first, states, j + np.uint64(1), stream, at)
        at = _put(eight, entries, first, states, j, stream, at)
    return at


_put_vector = put_vector if HAS_AVX2 else _put_vector_plain


@kernel("raw", "stream", "states", "escapes", "scratch")
def encode_tiles(
    words: NDArray[Any],
    columns: int,
    rows: NDArray[np.int32],
    tile_scales: NDArray[np.int32],
    column_order: NDArray[np.int32],
    column_scales: NDArray[np.int32],
    levels: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    geometry: NDArray[np.int64],
    tables: NDArray[np.uint8],
    raw: NDArray[np.uint8],
    stream: NDArray[np.uint8],
    at: int,
    states: NDArray[np.uint32],
    escapes: NDArray[np.uint16],
    n_escapes: int,
    scratch: NDArray[np.uint8],
    is_last: bool,
) -> tuple[int, int]:
    """Encode tiles, the last first; return where the stream and the escapes start.

    Parameters
    ----------
    words : uint8 or uint16 array
        The rows, `columns` words each.
    rows : int32 array, shape (64 * tiles,)
        Numbers of the rows in coding order.
    tile_scales : int32 array, shape (tiles,)
    column_order, column_scales, levels, flips : arrays, shape (columns,)
        Numbers of the columns in coding order; the others by column.
    geometry : int64 array, shape (5,)
        Low bits, fraction bits, field bits, signed, tables.
    tables : uint8 array, shape (n_tables, ENCODER_BYTES)
        Of `encoder_tables`.
    raw : uint8 array
        The raw blocks are written to its start, whole.
    stream : uint8 array
        Its words are written below byte `at`.
    states : uint32 array, shape (64 * groups,)
        Advanced. With `is_last` they start from the seeds.
    escapes : uint16 array
        Written below index `n_escapes`.
    scratch : uint8 array
        `SCRATCH_BYTES` and `SCRATCH_BYTES_PER_COLUMN`.
    is_last : bool
        Whether the last tile is the last of the literal.

    Returns
    -------
    tuple of int
        The byte where the stream starts, or -1 where it or the escapes may not have room for the next pair of
        columns, and the index of the first escape.
    """
    tops, flipped, places, _, pair_tables, symbols_at = areas(scratch, columns)
    entries = tables.reshape(-1).view(np.uint64)
    top_bit = 8 * item_bytes(words) - 1
    set_flips(flips, top_bit + 1, flipped)
    block_bytes = 8 * (geometry[0] + (1 if geometry[3] else 0)) * columns
    for v in range(columns):
        places[column_order[v]] = symbols_at + ROWS * v
    last_group = states.size - LANES
    n_tiles = tile_scales.size
    if is_last:
        states[:] = LOWEST
    below = np.uint64(at)
    for i in range(n_tiles - 1, -1, -1):
        of_tile = rows[ROWS * i : ROWS * (i + 1)]
        set_contexts(tile_scales[i], column_order, column_scales, levels, geometry, tops, pair_tables)
        split_tile(words, columns, rows, i, geometry, scratch, places, raw)
        if is_last and i == n_tiles - 1:
            n_seeded = _seeded_bytes(block_bytes, states.size)
            for lane in range(n_seeded >> 1):
                seed = load_u16(raw, np.uint64((i + 1) * block_bytes - n_seeded + 2 * lane))
                states[lane] = np.uint32(LOWEST) + np.uint32(seed)
        for v in range(columns - 1, -1, -1):
            if v & 1 and (np.int64(below) < PAIR_BYTES or n_escapes < PAIR_ESCAPES):
                return -1, n_escapes
            column = np.int64(column_order[v])
            first = np.uint64(_ENTRIES * np.int64(pair_tables[v >> 1]))
            escape_row = entries[first + np.uint64(2 * ESCAPE + 1)]
            symbols = np.int64(places[column])
            lane = np.uint64(last_group if v & 1 else 0)
            below = _put_vector(scratch, symbols, entries, first, states, lane, stream, below)
            if _outside_vector(scratch, symbols, entries, first):
                for j in range(ROWS - 1, -1, -1):
                    symbol = np.uint64(scratch[symbols + j])
                    if entries[first + np.uint64(2) * symbol + np.uint64(1)] == escape_row:
                        n_escapes -= 1
                        word = words[np.int64(of_tile[j]) * columns + column]
                        escapes[n_escapes] = np.uint16(field_of(word, flipped[column], geometry, top_bit))
    return np.int64(below), n_escapes


@inlined
def _take(payload: Any, at: Any, entries: Any, first: Any, states: Any, lane: Any, scratch: Any, to: Any) -> Any:
    """Decode a symbol; return its entry, and the byte after the bits that came in."""
    x = np.uint64(states[lane])
    entry = np.uint64(entries[first + (x & np.uint64((1 << BITS) - 1))])
    x = (entry >> np.uint64(20)) * (x >> np.uint64(BITS)) + ((entry >> np.uint64(8)) & np.uint64(0xFFF))
    scratch[to] = np.uint8(entry & np.uint64(127))
    empty = x < np.uint64(LOWEST)
    states[lane] = np.uint32(pick(empty, (x << np.uint64(16)) | np.uint64(load_u16(payload, at)), x))
    return entry, pick(empty, at + np.uint64(2), at)


@inlined
def _take_vector_plain(
    payload: Any, at: Any, entries: Any, first: Any, states: Any, lane: Any, scratch: Any, symbols: Any
) -> Any:
    """Decode the 64 symbols of a column; return the byte after the bits that came in, and 0 without escapes."""
    escaped = np.uint64(0)
    for g in range(8):
        to = np.uint64(symbols + 8 * g)
        j = lane + np.uint64(8 * g)
        for k in range(8):
            i = np.uint64(k)
            entry, at = _take(payload, at, entries, first, states, j + i, scratch, to + i)
            escaped |= entry
    return at, escaped & np.uint64(ESCAPED)


_take_vector = take_vector if HAS_AVX2 else _take_vector_plain


@inlined
def _take_vector_at_end(
    payload: Any, at: Any, end: Any, entries: Any, first: Any, states: Any, lane: Any, scratch: Any, symbols: Any
) -> Any:
    """As `_take_vector` where the stream may end: the byte returned is beyond `end` if it does."""
    escaped = np.uint64(0)
    for j in range(ROWS):
        x = np.uint64(states[lane + np.uint64(j)])
        entry = np.uint64(entries[first + (x & np.uint64((1 << BITS) - 1))])
        x = (entry >> np.uint64(20)) * (x >> np.uint64(BITS)) + ((entry >> np.uint64(8)) & np.uint64(0xFFF))
        if x < np.uint64(LOWEST):
            x <<= np.uint64(16)
            if np.int64(at) + 2 <= end:
                x |= np.uint64(load_u16(payload, at))
            at += np.uint64(2)
        states[lane + np.uint64(j)] = np.uint32(x)
        scratch[symbols + j] = np.uint8(entry & np.uint64(127))
        escaped |= entry
    return at, escaped & np.uint64(ESCAPED)


@inlined
def _put_seeds(states: Any, n_seeded: Any, out: Any, to: Any) -> Any:
    """Write the seeds in end states; return whether these are right."""
    for lane in range(states.size):
        seed = np.uint64(states[lane]) ^ np.uint64(LOWEST)
        if 2 * lane < n_seeded:
            store_u16(out, np.uint64(to + 2 * lane), np.uint16(seed & np.uint64(0xFFFF)))
            seed >>= np.uint64(16)
        if seed != np.uint64(0):
            return False
    return True


@kernel("states", "scratch", "words")
def decode_tiles(
    payload: NDArray[np.uint8],
    columns: int,
    rows: NDArray[np.int32],
    tile_scales: NDArray[np.int32],
    column_order: NDArray[np.int32],
    column_scales: NDArray[np.int32],
    levels: NDArray[np.uint8],
    flips: NDArray[np.uint8],
    geometry: NDArray[np.int64],
    tables: NDArray[np.uint8],
    raw_at: int,
    at: int,
    end: int,
    states: NDArray[np.uint32],
    escapes: NDArray[np.uint16],
    n_escapes: int,
    scratch: NDArray[np.uint8],
    lows: NDArray[np.uint8],
    words: NDArray[Any],
    is_last: bool,
) -> tuple[int, int]:
    """Decode tiles; return the byte after what they took of the stream, and the next escape.

    Parameters
    ----------
    payload : uint8 array
        The raw blocks of these tiles start at byte `raw_at`, all inside it; of the stream bytes `at` to `end`
        are used. Nothing else is read.
    columns, rows, tile_scales, column_order, column_scales, levels, flips, geometry
        As for `encode_tiles`, and right: they are not looked at.
    tables : uint8 array, shape (n_tables, DECODER_BYTES)
        Of `decoder_tables`.
    states : uint32 array, shape (64 * groups,)
        Advanced; any values.
    escapes : uint16 array
        From index `n_escapes` on they are those of these tiles.
    scratch : uint8 array
        `SCRATCH_BYTES` and `SCRATCH_BYTES_PER_COLUMN`.
    lows : uint8 array
        The bytes of the lower halves of words of 32 bits; not looked at where words are smaller.
    words : uint8, uint16 or uint32 array
        All words of `rows` are written on success, no others ever; of 32 bits what is decoded is the upper half.
    is_last : bool
        Whether the last tile is the last of the literal, whose raw block lacks its seeded end.

    Returns
    -------
    tuple of int
        The first is -1 where the stream or the escapes end early, or the states end wrong.
    """
    tops, flipped, places, listed, pair_tables, symbols_at = areas(scratch, columns)
    block_at = symbols_at + ROWS * columns
    for v in range(columns):
        places[column_order[v]] = symbols_at + ROWS * v
    entries = tables.reshape(-1).view(np.uint32)
    top_bit = top_bit_of(words)
    set_flips(flips, top_bit + 1, flipped)
    block_bytes = 8 * (geometry[0] + (1 if geometry[3] else 0)) * columns
    last_group = states.size - LANES
    n_tiles = tile_scales.size
    above = np.uint64(at)
    for i in range(n_tiles):
        of_tile = rows[ROWS * i : ROWS * (i + 1)]
        set_contexts(tile_scales[i], column_order, column_scales, levels, geometry, tops, pair_tables)
        n_listed = 0
        for v in range(columns):
            column = np.int64(column_order[v])
            first = np.uint64(np.int64(pair_tables[v >> 1]) << BITS)
            symbols = np.int64(places[column])
            lane = np.uint64(last_group if v & 1 else 0)
            if np.int64(above) + 2 * LANES <= end:
                above, escaped = _take_vector(payload, above, entries, first, states, lane, scratch, symbols)
            else:
                above, escaped = _take_vector_at_end(
                    payload, above, end, entries, first, states, lane, scratch, symbols
                )
                if np.int64(above) > end:
                    return -1, n_escapes
            listed[n_listed] = column
            n_listed += 1 if escaped else 0
        n_seeded = 0
        if is_last and i == n_tiles - 1:
            n_seeded = _seeded_bytes(block_bytes, states.size)
            if not _put_seeds(states, n_seeded, scratch, block_at + block_bytes - n_seeded):
                return -1, n_escapes
        copy_bytes(scratch, block_at, payload, raw_at + i * block_bytes, block_bytes - n_seeded)
        merge_tile(words, lows, columns, rows, i, geometry, scratch, places, block_at)
        for k in range(n_listed):
            column = np.int64(listed[k])
            symbols = np.int64(places[column])
            for j in range(ROWS):
                if scratch[symbols + j] & ESCAPED:
                    if n_escapes == escapes.size:
                        return -1, n_escapes
                    here = np.int64(of_tile[j]) * columns + column
                    word = with_field(coded_of(words, here), escapes[n_escapes], flipped[column], geometry, top_bit)
                    put_coded(words, lows, here, word)
                    n_escapes += 1
    if is_last and not n_tiles and not _put_seeds(states, 0, scratch, block_at):
        return -1, n_escapes
    return np.int64(above), n_escapes


@inlined
def _take_tables(section: Any, contexts: Any, n_tables: Any, scratch: Any) -> Any:
    return lane_tables(decoder_tables, DECODER_BYTES, section, contexts, n_tables, scratch)


@kernel("scratch", "words")
def decode_literal(
    payload: NDArray[np.uint8],
    numbers: NDArray[np.int64],
    has_escapes: bool,
    lows: NDArray[np.uint8],
    scratch: NDArray[np.uint8],
    words: NDArray[Any],
) -> tuple[int, int, int]:
    """Decode a whole literal: `operators.kernels.tile_payloads.decode_payload`."""
    return decode_payload(_take_tables, decode_tiles, payload, numbers, has_escapes, lows, scratch, words)
