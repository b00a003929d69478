"""Words of a tile as symbols and raw bits, and back: what the portable coders of tiles share.

A tile is 64 rows of C columns. It is worked on in blocks of `BLOCK` columns, which stay in the cache: rows of
words become rows of symbols by loops that vectorise, and 16 x 16 bytes at a time these become columns. The 64
symbols of a column lie where the coder wants them.

Nothing is read or written beyond the words given. Offsets are bytes of the scratch where nothing else is said.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import inlined
from operators.kernels.lanes import both, down, up
from operators.kernels.memory import copy_bytes, item_bytes, load_u16, load_u64, store_u64
from operators.kernels.tile_memory import SIDE, columns_to_rows, fetch_to_read, fetch_to_write, rows_to_columns

ROWS = 64
ESCAPE = 63
"""The symbol of a word whose field is too far below the top of its context, or above it."""
BLOCK = 256

EACH = np.uint64(0x0101010101010101)
BIT_7 = np.uint64(0x8080808080808080)
_AHEAD = 12
"""Rows by which memory is asked for before its turn: a row's first bytes are where nothing foresees them."""
_PLANE = ROWS * BLOCK
_SYMBOLS, _RAW, _PACKED, _NOWHERE = 0, _PLANE, 2 * _PLANE, 2 * _PLANE + BLOCK
_COLUMNS = _NOWHERE + ROWS
FIXED_BYTES = _COLUMNS + 4 * SIDE + 64 + 8
COLUMN_BYTES = 13
"""`FIXED_BYTES`, and `COLUMN_BYTES` for each column, are the scratch that is used here."""
BLOCK_COLUMN_BYTES = ROWS * 15 // 8
"""Of the largest raw block, for each column."""


@inlined
def areas(scratch: Any, columns: Any) -> Any:
    """Return what the scratch has for each column, and where that ends.

    Returns
    -------
    tops, flips : uint16 arrays, shape (columns,)
    places : int32 array, shape (columns,) and more
        Where the 64 symbols of a column lie: for the caller to set, but for those that are no column.
    columns : int32 array, shape (columns,)
        For the caller.
    tables : uint8 array, shape (columns / 2,)
        Of pairs.
    end : int
    """
    flips = _COLUMNS + 2 * columns
    places = flips + 2 * columns
    listed = places + 4 * (columns + SIDE)
    tables = listed + 4 * columns
    end = tables + (columns >> 1)
    of_columns = scratch[places:listed].view(np.int32)
    of_columns[columns:] = _NOWHERE
    return (
        scratch[_COLUMNS:flips].view(np.uint16),
        scratch[flips:places].view(np.uint16),
        of_columns,
        scratch[listed:tables].view(np.int32),
        scratch[tables:end],
        (end + 63) & ~63,
    )


@inlined
def range_of(coded: Any, symbol: Any) -> Any:
    """Return the range of symbols around `symbol` that are coded as such, as the sums that `outside` makes.

    Parameters
    ----------
    coded : array, shape (64,)
        Not 0 where there is a code; the escape is in no range.
    """
    first = min(np.int64(symbol), np.int64(ESCAPE))
    last = first
    while first > 0 and coded[first - 1]:
        first -= 1
    while last < ESCAPE - 1 and coded[last + 1]:
        last += 1
    last = min(last, np.int64(ESCAPE - 1))
    return np.uint64(128 - first) * EACH, np.uint64(127 - last) * EACH


@inlined
def outside(eight: Any, low: Any, high: Any) -> Any:
    """Return bit 7 of those of eight symbols that are outside a range, and other bits."""
    return ~(eight + low) | (eight + high)


@inlined
def set_contexts(
    scale: Any, column_order: Any, column_scales: Any, levels: Any, geometry: Any, tops: Any, tables: Any
) -> None:
    """Set the top of each column and the table of each pair of columns of a tile."""
    fraction_bits, table_bits = geometry[1], geometry[4]
    largest = (np.int64(1) << (geometry[2] - fraction_bits)) - 1
    for p in range(column_order.size >> 1):
        first, second = column_order[2 * p], column_order[2 * p + 1]
        q = np.int64(scale) + np.int64(column_scales[first])
        tables[p] = np.uint8((np.int64(levels[first]) << table_bits) + ((q & 7) >> (3 - table_bits)))
        exponent = q >> 3
        exponent = exponent if exponent > 0 else np.int64(0)
        exponent = min(largest, exponent)
        top = np.uint16((exponent << fraction_bits) | ((np.int64(1) << fraction_bits) - 1))
        tops[first] = top
        tops[second] = top


@inlined
def set_flips(flips: Any, width_bits: Any, out: Any) -> None:
    """Set for each column the bits of its words that are flipped."""
    for c in range(flips.size):
        out[c] = np.uint16(np.uint64(flips[c]) << np.uint64(width_bits - 1))


@inlined
def top_bit_of(words: Any) -> Any:
    """Return the number of the top bit of what of words is decoded: of 32 bits that is the upper half."""
    return 7 if item_bytes(words) == 1 else 15


@inlined
def coded_of(words: Any, i: Any) -> Any:
    """Return what of word `i` is decoded."""
    return np.uint16(np.uint32(words[i]) >> np.uint32(16) if item_bytes(words) == 4 else np.uint32(words[i]))


@inlined
def put_coded(words: Any, lows: Any, i: Any, coded: Any) -> None:
    """Set word `i` from what is decoded of it, and from the bytes of all lower halves."""
    if item_bytes(words) == 4:
        low = np.uint32(load_u16(lows, np.uint64(i) * np.uint64(2)))
        words[i] = words.dtype.type(np.uint32(np.uint32(coded) << np.uint32(16)) | low)
    else:
        words[i] = words.dtype.type(coded)


@inlined
def _turned(word: Any, low_bits: Any, top_bit: Any) -> Any:
    """Return a word whose sign and lowest bit of the field have changed places."""
    differ = both(np.uint16(down(word, low_bits) ^ down(word, top_bit)), np.uint16(1))
    return np.uint16(word ^ up(differ, low_bits) ^ up(differ, top_bit))


@inlined
def _word(words: Any, i: Any, scratch: Any, flip: Any, turned: Any, low_bits: Any) -> Any:
    """Return word `i` in two bytes, where `turned` with what is flipped at `flip`, sign and field turned."""
    word = np.uint16(words[i])
    if turned:
        word = _turned(np.uint16(word ^ load_u16(scratch, flip)), low_bits, 8 * item_bytes(words) - 1)
    return word


@inlined
def _split_row(
    words: Any, first: Any, scratch: Any, flips: Any, turned: Any, tops: Any, view: Any, wide: Any, j: Any, n: Any
) -> None:  # fmt: skip
    """Write row `j` of symbols, and of the low bytes of raw fields; of `wide` ones the high bytes."""
    low_bits, mask, low_mask, shift, sign = view
    start, flip, top_at = np.uint64(first), np.uint64(flips), np.uint64(tops)
    to, raw_to, most = np.uint64(_SYMBOLS + j * BLOCK), np.uint64(_RAW + j * BLOCK), np.uint16(ESCAPE)
    for c in range(n):
        word = _word(words, start + c, scratch, flip + c + c, turned, low_bits)
        field = both(down(word, low_bits), mask)
        # Fields above the top differ by more than 63 from it, modulo 2**16: they have 15 bits at most.
        scratch[to + c] = np.uint8(min(np.uint16(load_u16(scratch, top_at + c + c) - field), most))
        raw = np.uint16(both(word, low_mask) | both(down(word, shift), sign))
        scratch[raw_to + c] = np.uint8(down(raw, 8) if wide else both(raw, np.uint16(255)))


@inlined
def _split_whole_row(words: Any, first: Any, scratch: Any, tops: Any, j: Any, n: Any) -> None:
    """Write row `j` of symbols, where fields have 16 bits: above the top they may wrap to a small difference."""
    start, top_at, to, most = np.uint64(first), np.uint64(tops), np.uint64(_SYMBOLS + j * BLOCK), np.uint16(ESCAPE)
    for c in range(n):
        field, top = np.uint16(words[start + c]), load_u16(scratch, top_at + c + c)
        x = min(np.uint16(top - field), most)
        scratch[to + c] = np.uint8(x if field <= top else most)


@inlined
def _split_low(words: Any, first: Any, scratch: Any, flips: Any, turned: Any, view: Any, n: Any) -> None:
    """Write the low bytes of the raw fields of a row to the packed row."""
    low_bits, _, low_mask, shift, sign = view
    start, flip, to = np.uint64(first), np.uint64(flips), np.uint64(_PACKED)
    for c in range(n):
        word = _word(words, start + c, scratch, flip + c + c, turned, low_bits)
        raw = np.uint16(both(word, low_mask) | both(down(word, shift), sign))
        scratch[to + c] = np.uint8(both(raw, np.uint16(255)))


@inlined
def _merge_row(
    scratch: Any, flips: Any, turned: Any, tops: Any, view: Any, low_at: Any, wide: Any, words: Any, lows: Any,
    first: Any, j: Any, n: Any,
) -> None:  # fmt: skip
    """Set a row of words from row `j` of symbols and raw fields; the low bytes of `wide` ones are apart."""
    low_bits, mask, low_mask, shift, sign = view
    start, flip, top_at, low = np.uint64(first), np.uint64(flips), np.uint64(tops), np.uint64(low_at)
    source, plane = np.uint64(_SYMBOLS + j * BLOCK), np.uint64(_RAW + j * BLOCK)
    for c in range(n):
        symbol, bits = np.uint16(scratch[source + c]), np.uint16(scratch[plane + c])
        if wide:
            bits = np.uint16(up(bits, 8) | np.uint16(scratch[low + c]))
        field = both(np.uint16(load_u16(scratch, top_at + c + c) - symbol), mask)
        word = np.uint16(up(field, low_bits) | both(bits, low_mask) | both(up(bits, shift), sign))
        if turned:
            word = np.uint16(_turned(word, low_bits, top_bit_of(words)) ^ load_u16(scratch, flip + c + c))
        put_coded(words, lows, start + c, word)


@inlined
def _row_ahead(rows: Any, tile: Any, j: Any, c: Any, columns: Any) -> Any:
    """Return the first word of what will be worked on `_AHEAD` rows after row `j` of the block at column `c`."""
    j += _AHEAD
    if j >= ROWS:
        j -= ROWS
        c += BLOCK
        if c >= columns:
            c = 0
            tile += 1
    return np.int64(rows[min(ROWS * tile + j, rows.size - 1)]) * columns + c


@inlined
def _pack_part(scratch: Any, bit: Any, width: Any, n_columns: Any, raw: Any, to: Any, columns: Any) -> None:
    """Pack bits `bit` to ``bit + width`` of the raw plane, of 8 / width rows into each byte, to rows of `raw`."""
    mask = ((np.uint64(1) << np.uint64(width)) - np.uint64(1)) * EACH
    drop = np.uint64(bit)
    packed = np.uint64(_PACKED)
    n = np.uint64((n_columns + 7) >> 3)
    for i in range(8 * width):
        for j in range(8 // width):
            plane = np.uint64(_RAW + (i + 8 * width * j) * BLOCK)
            shift = np.uint64(width * j)
            for k in range(n):
                at = np.uint64(k) * np.uint64(8)
                bits = ((load_u64(scratch, plane + at) >> drop) & mask) << shift
                store_u64(scratch, packed + at, bits if j == 0 else bits | load_u64(scratch, packed + at))
        copy_bytes(raw, to + i * columns, scratch, _PACKED, n_columns)


@inlined
def _unpack_part(scratch: Any, bit: Any, width: Any, n_columns: Any, start: Any, columns: Any) -> None:
    """Inverse of `_pack_part`; the part at bit 0 replaces what the plane held."""
    mask = ((np.uint64(1) << np.uint64(width)) - np.uint64(1)) * EACH
    raised = np.uint64(bit)
    n = np.uint64((n_columns + 7) >> 3)
    for i in range(8 * width):
        packed = np.uint64(start + i * columns)
        for j in range(8 // width):
            plane = np.uint64(_RAW + (i + 8 * width * j) * BLOCK)
            shift = np.uint64(width * j)
            for k in range(n):
                at = np.uint64(k) * np.uint64(8)
                bits = ((load_u64(scratch, packed + at) >> shift) & mask) << raised
                store_u64(scratch, plane + at, bits if bit == 0 else bits | load_u64(scratch, plane + at))


@inlined
def split_tile(
    words: Any, columns: Any, rows: Any, tile: Any, geometry: Any, scratch: Any, places: Any, raw: Any
) -> None:  # fmt: skip
    """Write the symbols of a tile to the places of its columns, and its raw block to `raw`, which has those of all."""
    low_bits, signed = geometry[0], geometry[3]
    raw_bits = low_bits + (1 if signed else 0)
    mask = np.uint16((np.int64(1) << geometry[2]) - 1)
    low_mask = np.uint16((np.int64(1) << low_bits) - 1)
    sign = np.uint16(np.int64(1) << low_bits) if signed else np.uint16(0)
    view = low_bits, mask, low_mask, 8 * item_bytes(words) - 1 - low_bits, sign
    is_wide = raw_bits & 8
    raw_at = 8 * raw_bits * columns * tile
    for c in range(0, columns, BLOCK):
        n_columns = min(BLOCK, columns - c)
        n = np.uint64(n_columns)
        tops, flips = _COLUMNS + 2 * c, _COLUMNS + 2 * (columns + c)
        for j in range(ROWS):
            ahead = item_bytes(words) * _row_ahead(rows, tile, j, c, columns)
            for byte in range(0, BLOCK * item_bytes(words), 64):
                fetch_to_read(words, ahead + byte)
            if j < 8 * raw_bits:
                for byte in range(0, n_columns, 64):
                    fetch_to_write(raw, raw_at + j * columns + c + byte)
            first = np.int64(rows[ROWS * tile + j]) * columns + c
            if is_wide:
                if signed == 2:
                    _split_low(words, first, scratch, flips, True, view, n)
                    _split_row(words, first, scratch, flips, True, tops, view, True, j, n)
                else:
                    _split_low(words, first, scratch, flips, False, view, n)
                    _split_row(words, first, scratch, flips, False, tops, view, True, j, n)
                copy_bytes(raw, raw_at + j * columns + c, scratch, _PACKED, n_columns)
            elif geometry[2] == 16:
                _split_whole_row(words, first, scratch, tops, j, n)
            elif signed == 2:
                _split_row(words, first, scratch, flips, True, tops, view, False, j, n)
            else:
                _split_row(words, first, scratch, flips, False, tops, view, False, j, n)
        for square in range(0, n_columns, SIDE):
            for j in range(0, ROWS, SIDE):
                rows_to_columns(scratch, _SYMBOLS + j * BLOCK + square, BLOCK, places, c + square, j)
        to = raw_at + c + (ROWS * columns if is_wide else 0)
        bit = 0
        for p in range(2, -1, -1):
            width = 1 << p
            if raw_bits & width:
                _pack_part(scratch, bit, width, n_columns, raw, to, columns)
                bit += width
                to += 8 * width * columns


@inlined
def merge_tile(
    words: Any, lows: Any, columns: Any, rows: Any, tile: Any, geometry: Any, scratch: Any, places: Any, block_at: Any
) -> None:  # fmt: skip
    """Inverse of `split_tile`, but for the fields of escapes; the scratch holds the raw block and 8 bytes more."""
    low_bits, signed = geometry[0], geometry[3]
    raw_bits = low_bits + (1 if signed else 0)
    mask = np.uint16((np.int64(1) << geometry[2]) - 1)
    low_mask = np.uint16((np.int64(1) << low_bits) - 1)
    sign = np.uint16(np.int64(1) << top_bit_of(words)) if signed else np.uint16(0)
    view = low_bits, mask, low_mask, top_bit_of(words) - low_bits, sign
    is_wide = raw_bits & 8
    for c in range(0, columns, BLOCK):
        n_columns = min(BLOCK, columns - c)
        n = np.uint64(n_columns)
        tops, flips = _COLUMNS + 2 * c, _COLUMNS + 2 * (columns + c)
        for square in range(0, n_columns, SIDE):
            for j in range(0, ROWS, SIDE):
                columns_to_rows(scratch, _SYMBOLS + j * BLOCK + square, BLOCK, places, c + square, j)
        start = block_at + c + (ROWS * columns if is_wide else 0)
        bit = 0
        for p in range(2, -1, -1):
            width = 1 << p
            if raw_bits & width:
                _unpack_part(scratch, bit, width, n_columns, start, columns)
                bit += width
                start += 8 * width * columns
        for j in range(ROWS):
            ahead = item_bytes(words) * _row_ahead(rows, tile, j, c, columns)
            for byte in range(0, BLOCK * item_bytes(words), 64):
                fetch_to_write(words, ahead + byte)
            first, low = np.int64(rows[ROWS * tile + j]) * columns + c, block_at + j * columns + c
            if is_wide:
                if signed == 2:
                    _merge_row(scratch, flips, True, tops, view, low, True, words, lows, first, j, n)
                else:
                    _merge_row(scratch, flips, False, tops, view, low, True, words, lows, first, j, n)
            elif signed == 2:
                _merge_row(scratch, flips, True, tops, view, low, False, words, lows, first, j, n)
            else:
                _merge_row(scratch, flips, False, tops, view, low, False, words, lows, first, j, n)


@inlined
def _swap(bits: Any, a: Any, b: Any) -> Any:
    differ = ((bits >> a) ^ (bits >> b)) & np.uint64(1)
    return bits ^ (differ << a) ^ (differ << b)


@inlined
def field_of(word: Any, flip: Any, geometry: Any, top_bit: Any) -> Any:
    """Return the field of a word."""
    low_bits, bits = np.uint64(geometry[0]), np.uint64(word)
    if geometry[3] == 2:
        bits = _swap(bits ^ np.uint64(flip), low_bits, np.uint64(top_bit))
    return (bits >> low_bits) & ((np.uint64(1) << np.uint64(geometry[2])) - np.uint64(1))


@inlined
def with_field(word: Any, field: Any, flip: Any, geometry: Any, top_bit: Any) -> Any:
    """Return a word with the low bits of `field` as its field."""
    low_bits, bits = np.uint64(geometry[0]), np.uint64(word)
    mask = (np.uint64(1) << np.uint64(geometry[2])) - np.uint64(1)
    if geometry[3] == 2:
        bits = _swap(bits ^ np.uint64(flip), low_bits, np.uint64(top_bit))
    bits = (bits & ~(mask << low_bits)) | ((np.uint64(field) & mask) << low_bits)
    if geometry[3] == 2:
        bits = _swap(bits, low_bits, np.uint64(top_bit)) ^ np.uint64(flip)
    return bits
