"""Canonical Huffman codes over tiles: symbols by `operators.kernels.tile_planes`, codes by `operators.kernels.huffman`.

Tiles are taken in groups. The symbols of a group that share a table are brought together in coding order, and
coded as one block of four streams. The bytes are those of `operators.literals.scaled_huffman`.
"""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.huffman import (
    PRIMARY_BITS,
    STREAMS,
    canonical_codes,
    decode_block,
    decoding_tables,
    encode_block,
    encoding_table,
)
from operators.kernels.jit import inlined, kernel
from operators.kernels.memory import copy_bytes, load_u64, store_u64
from operators.kernels.tile_planes import (
    BIT_7,
    COLUMN_BYTES,
    EACH,
    EIGHT_ROWS,
    ESCAPE,
    FIXED_BYTES,
    ROWS,
    areas,
    column_at,
    field_of,
    merge_tile,
    outside,
    range_of,
    set_contexts,
    set_flips,
    split_tile,
    with_field,
)

MAX_LENGTH = 12
"""Bits of the longest code: no look-up ends before the first code does."""
GROUP_COLUMNS = 1 << 13
"""Columns of the tiles of a group, unless one tile has more: its symbols stay in the cache."""
SIZE_BYTES = 3
"""Of a stream, in the directory of its group."""
ENCODER_BYTES = 8 * (64 + 2)
"""Of a table: an entry of `operators.kernels.huffman` for each symbol, then the range of symbols with a code."""
DECODER_BYTES = 12 << PRIMARY_BITS
_ENTRIES = ENCODER_BYTES // 8
_ALL_LOW, _ALL_HIGH = np.uint64(128) * EACH, np.uint64(128 - ESCAPE) * EACH  # all symbols but the escape
_MANY_BYTES = 8 << PRIMARY_BITS
_MAX_TABLES = 40
_GROUP_BYTES = ROWS * GROUP_COLUMNS
SCRATCH_BYTES = FIXED_BYTES + 3 * _GROUP_BYTES + 256
SCRATCH_BYTES_PER_COLUMN = COLUMN_BYTES + 3 * ROWS
# Symbols by table, and then either codes of one table, up to two bytes a symbol, or a raw block.


@kernel("out")
def encoder_tables(lengths: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Set what `encode_tiles` needs of each table.

    Parameters
    ----------
    lengths : uint8 array, shape (n_tables, 64)
        Of the code of each symbol, 0 where it has none and is an escape: complete codes of at most `MAX_LENGTH`
        bits that the escape is in, or all 0.
    out : uint8 array, shape (n_tables, ENCODER_BYTES)
    """
    entries = out.reshape(-1).view(np.uint64)
    entries[:] = 0
    for table in range(lengths.shape[0]):
        live = np.flatnonzero(lengths[table])
        if live.size:
            lengths_of = lengths[table][live].astype(np.int64)
            codes = np.empty_like(lengths_of)
            canonical_codes(lengths_of, codes)
            of_table = entries[_ENTRIES * table : _ENTRIES * (table + 1)]
            encoding_table(live, lengths_of, codes, of_table)
            of_table[64], of_table[65] = range_of(lengths[table], live[np.argmin(lengths_of)])
            for symbol in range(ESCAPE):
                if lengths[table, symbol] == 0:
                    of_table[symbol] = of_table[ESCAPE]


@kernel("out")
def decoder_tables(lengths: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
    """Set what `decode_tiles` needs of each table; return -1 where lengths make no complete code.

    Parameters
    ----------
    lengths : uint8 array, shape (n_tables, 64)
        Any bytes.
    out : uint8 array, shape (n_tables, DECODER_BYTES)
    """
    flat = out.reshape(-1)
    flat[:] = 0
    for table in range(lengths.shape[0]):
        live = np.flatnonzero(lengths[table])
        if live.size:
            lengths_of = lengths[table][live].astype(np.int64)
            codes = np.empty_like(lengths_of)
            if live.size < 2 or lengths_of.max() > MAX_LENGTH or canonical_codes(lengths_of, codes) < 0:
                return -1
            start = DECODER_BYTES * table
            many = flat[start : start + _MANY_BYTES].view(np.uint64)
            single = flat[start + _MANY_BYTES : start + DECODER_BYTES].view(np.uint32)
            decoding_tables(live, lengths_of, codes, 1, single, many)
    return 0


@inlined
def _set_starts(
    tile_scales: Any,
    column_order: Any,
    column_scales: Any,
    levels: Any,
    geometry: Any,
    tables: Any,
    tops: Any,
    starts: Any,
) -> None:
    """Set where the symbols of each table start among those of a group, and where the last end."""
    starts[:] = 0
    for i in range(tile_scales.size):
        set_contexts(tile_scales[i], column_order, column_scales, levels, geometry, tops, tables)
        for p in range(tables.size):
            starts[np.int64(tables[p]) + 1] += 2 * ROWS
    for table in range(starts.size - 1):
        starts[table + 1] += starts[table]


@inlined
def _copy_column(scratch: Any, source: Any, step: Any, to: Any, to_step: Any, low: Any, high: Any) -> Any:
    """Copy the 64 symbols of a column; return whether one of them is outside a range."""
    bits = np.uint64(0)
    for g in range(8):
        eight = load_u64(scratch, np.uint64(source + g * step))
        store_u64(scratch, np.uint64(to + g * to_step), eight)
        bits |= outside(eight, low, high)
    return (bits & BIT_7) != np.uint64(0)


@kernel("raw", "stream", "escapes", "scratch")
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
    escapes: NDArray[np.uint16],
    n_escapes: int,
    scratch: NDArray[np.uint8],
) -> tuple[int, int]:
    """Encode tiles in groups; return the byte after them and the number of escapes.

    Parameters
    ----------
    words, columns, rows, tile_scales, column_order, column_scales, levels, flips, geometry, raw, scratch
        As for `operators.kernels.tiles.encode_tiles`.
    tables : uint8 array, shape (n_tables, ENCODER_BYTES)
        Of `encoder_tables`.
    stream : uint8 array
        Groups are written from byte `at` on.
    escapes : uint16 array
        Written from index `n_escapes` on.

    Returns
    -------
    tuple of int
        The first is -1 where the stream has less than two bytes for each symbol of a table, or the escapes
        have no room for a whole column that may have some.
    """
    tops, flipped, _, pair_tables, symbols_at, by_table = areas(scratch, columns)
    top_bit = 8 * words.itemsize - 1
    set_flips(flips, top_bit + 1, flipped)
    block_bytes = 8 * (geometry[0] + (1 if geometry[3] else 0)) * columns
    codes = tables.reshape(-1).view(np.uint64)
    starts, following = np.empty(_MAX_TABLES + 1, np.int64), np.empty(_MAX_TABLES + 1, np.int64)
    sizes = np.empty(STREAMS, np.int64)
    step = max(1, GROUP_COLUMNS // columns)
    for group in range(0, tile_scales.size, step):
        of_group = tile_scales[group : group + step]
        _set_starts(of_group, column_order, column_scales, levels, geometry, pair_tables, tops, starts)
        following[:] = starts
        for i in range(group, group + of_group.size):
            of_tile = rows[ROWS * i : ROWS * (i + 1)]
            set_contexts(tile_scales[i], column_order, column_scales, levels, geometry, tops, pair_tables)
            split_tile(words, columns, of_tile, geometry, scratch, raw, i * block_bytes)
            for v in range(columns):
                column = np.int64(column_order[v])
                table = np.int64(pair_tables[v >> 1])
                symbols = column_at(symbols_at, column)
                first = _ENTRIES * table
                low, high = codes[first + 64], codes[first + 65]
                if _copy_column(scratch, symbols, EIGHT_ROWS, by_table + following[table], 8, low, high):
                    if n_escapes + ROWS > escapes.size:
                        return -1, n_escapes
                    for j in range(ROWS):
                        symbol = np.int64(scratch[symbols + (j >> 3) * EIGHT_ROWS + (j & 7)])
                        if codes[first + symbol] == codes[first + ESCAPE]:
                            word = words[np.int64(of_tile[j]) * columns + column]
                            escapes[n_escapes] = np.uint16(field_of(word, flipped[column], geometry, top_bit))
                            n_escapes += 1
                following[table] += ROWS
        n_used = 0
        for table in range(_MAX_TABLES):
            n_used += 1 if starts[table + 1] > starts[table] else 0
        directory = at
        at += n_used * STREAMS * SIZE_BYTES
        workspace = scratch[by_table + starts[_MAX_TABLES] :]
        for table in range(_MAX_TABLES):
            n = starts[table + 1] - starts[table]
            if n:
                if at + 2 * n > stream.size:
                    return -1, n_escapes
                of_table = scratch[by_table + starts[table] : by_table + starts[table + 1]]
                at += encode_block(
                    of_table, codes[_ENTRIES * table : _ENTRIES * (table + 1)], stream[at:], workspace, sizes
                )
                for k in range(STREAMS):
                    for byte in range(SIZE_BYTES):
                        stream[directory] = np.uint8((sizes[k] >> (8 * byte)) & 255)
                        directory += 1
    return at, n_escapes


@kernel("scratch", "words")
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
    escapes: NDArray[np.uint16],
    n_escapes: int,
    scratch: NDArray[np.uint8],
    words: NDArray[Any],
) -> tuple[int, int]:
    """Decode tiles; return the byte after their groups, and the next escape.

    Parameters
    ----------
    payload, raw_at, escapes, n_escapes, scratch, words
        As for `operators.kernels.tiles.decode_tiles`; the groups lie in bytes `at` to `end`.
    columns, rows, tile_scales, column_order, column_scales, levels, flips, geometry
        As for `encode_tiles`, and right: they are not looked at.
    tables : uint8 array, shape (n_tables, DECODER_BYTES)
        Of `decoder_tables`.

    Returns
    -------
    tuple of int
        The first is -1 where the groups cannot be those of these tiles, or the escapes run out.
    """
    tops, flipped, listed, pair_tables, symbols_at, by_table = areas(scratch, columns)
    top_bit = 8 * words.itemsize - 1
    set_flips(flips, top_bit + 1, flipped)
    block_bytes = 8 * (geometry[0] + (1 if geometry[3] else 0)) * columns
    flat = tables.reshape(-1)
    block_at = scratch.size - block_bytes - 8
    starts, ends = np.empty(_MAX_TABLES + 1, np.int64), np.empty(STREAMS + 1, np.int64)
    step = max(1, GROUP_COLUMNS // columns)
    for group in range(0, tile_scales.size, step):
        of_group = tile_scales[group : group + step]
        _set_starts(of_group, column_order, column_scales, levels, geometry, pair_tables, tops, starts)
        n_used = 0
        for table in range(_MAX_TABLES):
            n_used += 1 if starts[table + 1] > starts[table] else 0
        directory = at
        at += n_used * STREAMS * SIZE_BYTES
        if at > end:
            return -1, n_escapes
        for table in range(_MAX_TABLES):
            if starts[table + 1] == starts[table]:
                continue
            for k in range(STREAMS):
                ends[k] = at
                for byte in range(SIZE_BYTES):
                    at += np.int64(payload[directory]) << (8 * byte)
                    directory += 1
            ends[STREAMS] = at
            if at > end:
                return -1, n_escapes
            first = DECODER_BYTES * table
            many = flat[first : first + _MANY_BYTES].view(np.uint64)
            single = flat[first + _MANY_BYTES : first + DECODER_BYTES].view(np.uint32)
            symbols = scratch[by_table + starts[table] : by_table + starts[table + 1]]
            if decode_block(payload, ends, many, single, symbols, symbols) < 0:
                return -1, n_escapes
        for i in range(group, group + of_group.size):
            of_tile = rows[ROWS * i : ROWS * (i + 1)]
            set_contexts(tile_scales[i], column_order, column_scales, levels, geometry, tops, pair_tables)
            n_listed = 0
            for v in range(columns):
                column = np.int64(column_order[v])
                table = np.int64(pair_tables[v >> 1])
                to = column_at(symbols_at, column)
                listed[n_listed] = column
                source = by_table + starts[table]
                n_listed += 1 if _copy_column(scratch, source, 8, to, EIGHT_ROWS, _ALL_LOW, _ALL_HIGH) else 0
                starts[table] += ROWS
            copy_bytes(scratch, block_at, payload, raw_at + i * block_bytes, block_bytes)
            merge_tile(words, columns, of_tile, geometry, scratch, block_at)
            for k in range(n_listed):
                column = np.int64(listed[k])
                symbols_of = column_at(symbols_at, column)
                for j in range(ROWS):
                    if scratch[symbols_of + (j >> 3) * EIGHT_ROWS + (j & 7)] == ESCAPE:
                        if n_escapes == escapes.size:
                            return -1, n_escapes
                        here = np.int64(of_tile[j]) * columns + column
                        words[here] = words.dtype.type(
                            with_field(words[here], escapes[n_escapes], flipped[column], geometry, top_bit)
                        )
                        n_escapes += 1
    return at, n_escapes
