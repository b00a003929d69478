"""Words of a tile as symbols and raw bits, and back: what the portable coders of tiles share.

A tile is 64 rows of C columns. It is worked on in blocks of `BLOCK` columns, which stay in the cache: rows of
words become rows of symbols by loops that vectorise, and 8 x 8 bytes at a time these become columns. The
symbols of 8 rows of one column are 8 neighbouring bytes of the scratch, at `column_at` for the first 8 rows
and `EIGHT_ROWS` bytes further for each next 8.

Nothing is read or written beyond the words given. Offsets are bytes of the scratch where nothing else is said.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import inlined
from operators.kernels.lanes import both, down, up
from operators.kernels.memory import copy_bytes, load_u16, load_u64, store_u16, store_u64

ROWS = 64
ESCAPE = 63
"""The symbol of a word whose field is too far below the top of its context, or above it."""
BLOCK = 256
EIGHT_ROWS = 8 * BLOCK + 64  # not a power of two: the 8 lines of a column would share two sets of the cache
BLOCK_BYTES = 8 * EIGHT_ROWS

EACH = np.uint64(0x0101010101010101)
BIT_7 = np.uint64(0x8080808080808080)
_PLANE = ROWS * BLOCK
_SYMBOLS, _RAW, _PACKED, _ROW = 0, _PLANE, 2 * _PLANE, 2 * _PLANE + BLOCK
_COLUMNS = _ROW + 2 * BLOCK
FIXED_BYTES = _COLUMNS + 64 + BLOCK_BYTES + 8
COLUMN_BYTES = 9 + BLOCK_BYTES // BLOCK
"""`FIXED_BYTES`, and `COLUMN_BYTES` for each column, are the scratch that is used here."""
BLOCK_COLUMN_BYTES = ROWS * 15 // 8
"""Of the largest raw block, for each column."""


@inlined
def areas(scratch: Any, columns: Any) -> Any:
    """Return what the scratch has for each column, and where.

    Returns
    -------
    tops, flips : uint16 arrays, shape (columns,)
    columns : int32 array, shape (columns,)
        For the caller.
    tables : uint8 array, shape (columns / 2,)
        Of pairs.
    symbols, end : int
        Where the symbols by column are, and where they end.
    """
    flips = _COLUMNS + 2 * columns
    listed = flips + 2 * columns
    tables = listed + 4 * columns
    symbols = _symbols_at(columns)
    return (
        scratch[_COLUMNS:flips].view(np.uint16),
        scratch[flips:listed].view(np.uint16),
        scratch[listed:tables].view(np.int32),
        scratch[tables : tables + (columns >> 1)],
        symbols,
        symbols + ((columns + BLOCK - 1) >> 8) * BLOCK_BYTES,
    )


@inlined
def _symbols_at(columns: Any) -> Any:
    return (_COLUMNS + 8 * columns + (columns >> 1) + 63) & ~63


@inlined
def column_at(symbols_at: Any, column: Any) -> Any:
    """Return where the first 8 symbols of a column are."""
    return symbols_at + (column >> 8) * BLOCK_BYTES + (column & 7) * BLOCK + (column & 0xF8)


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
def _load_row(words: Any, first: Any, flips: Any, signed: Any, low_bits: Any, scratch: Any, n: Any) -> None:
    """Bring words into two bytes each; in sign mode flip them and swap the sign with the lowest bit of the field."""
    start, to, flip, one = np.uint64(first), np.uint64(_ROW), np.uint64(flips), np.uint16(1)
    top_bit = 8 * words.itemsize - 1
    if signed == 2:
        for c in range(n):
            word = np.uint16(np.uint16(words[start + c]) ^ load_u16(scratch, flip + c + c))
            differ = both(np.uint16(down(word, low_bits) ^ down(word, top_bit)), one)
            store_u16(scratch, to + c + c, np.uint16(word ^ up(differ, low_bits) ^ up(differ, top_bit)))
    else:
        for c in range(n):
            store_u16(scratch, to + c + c, np.uint16(words[start + c]))


@inlined
def _store_row(scratch: Any, flips: Any, signed: Any, low_bits: Any, words: Any, first: Any, n: Any) -> None:
    """Inverse of `_load_row`."""
    start, source, flip, one = np.uint64(first), np.uint64(_ROW), np.uint64(flips), np.uint16(1)
    top_bit = 8 * words.itemsize - 1
    if signed == 2:
        for c in range(n):
            word = load_u16(scratch, source + c + c)
            differ = both(np.uint16(down(word, low_bits) ^ down(word, top_bit)), one)
            word = np.uint16(word ^ up(differ, low_bits) ^ up(differ, top_bit) ^ load_u16(scratch, flip + c + c))
            words[start + c] = words.dtype.type(word)
    else:
        for c in range(n):
            words[start + c] = words.dtype.type(load_u16(scratch, source + c + c))


@inlined
def _split_symbols(scratch: Any, tops: Any, low_bits: Any, mask: Any, to: Any, n: Any) -> None:
    row, top_at, out, most = np.uint64(_ROW), np.uint64(tops), np.uint64(to), np.uint16(ESCAPE)
    for c in range(n):
        field = both(down(load_u16(scratch, row + c + c), low_bits), mask)
        top = load_u16(scratch, top_at + c + c)
        x = min(np.uint16(top - field), most)
        # A field of 16 bits above the top may wrap to a small difference.
        scratch[out + c] = np.uint8(x if field <= top else most)


@inlined
def _split_raw(scratch: Any, low_mask: Any, shift: Any, sign: Any, drop: Any, to: Any, n: Any) -> None:
    """Write bits `drop` to ``drop + 8`` of the raw fields."""
    row, start, byte = np.uint64(_ROW), np.uint64(to), np.uint16(255)
    for c in range(n):
        word = load_u16(scratch, row + c + c)
        raw = np.uint16(both(word, low_mask) | both(down(word, shift), sign))
        scratch[start + c] = np.uint8(both(down(raw, drop), byte))


@inlined
def _merge(
    scratch: Any,
    symbols: Any,
    tops: Any,
    low_bits: Any,
    mask: Any,
    raw_at: Any,
    low_mask: Any,
    shift: Any,
    sign: Any,
    n: Any,
) -> None:
    """Set the row from symbols and the low 8 bits of raw fields."""
    row, source, top_at, start = np.uint64(_ROW), np.uint64(symbols), np.uint64(tops), np.uint64(raw_at)
    for c in range(n):
        symbol = np.uint16(scratch[source + c])
        field = both(np.uint16(load_u16(scratch, top_at + c + c) - symbol), mask)
        bits = np.uint16(scratch[start + c])
        word = np.uint16(up(field, low_bits) | both(bits, low_mask) | both(up(bits, shift), sign))
        store_u16(scratch, row + c + c, word)


@inlined
def _merge_high(scratch: Any, raw_at: Any, low_mask: Any, shift: Any, sign: Any, n: Any) -> None:
    """Or the high 8 bits of raw fields into the row."""
    row, start = np.uint64(_ROW), np.uint64(raw_at)
    for c in range(n):
        bits = up(np.uint16(scratch[start + c]), 8)
        word = np.uint16(load_u16(scratch, row + c + c) | both(bits, low_mask) | both(up(bits, shift), sign))
        store_u16(scratch, row + c + c, word)


@inlined
def _transpose(scratch: Any, source: Any, step: Any, to: Any, to_step: Any, n: Any) -> None:
    """Transpose `n` squares of 8 x 8 bytes; rows are `step` and `to_step` apart, squares 8 bytes."""
    m4, m2, m1 = np.uint64(0x00000000FFFFFFFF), np.uint64(0x0000FFFF0000FFFF), np.uint64(0x00FF00FF00FF00FF)
    s4, s2, s1 = np.uint64(32), np.uint64(16), np.uint64(8)
    i0, o0 = np.uint64(source), np.uint64(to)
    u, v = np.uint64(step), np.uint64(to_step)
    i1, i2, i3, i4 = i0 + u, i0 + u * np.uint64(2), i0 + u * np.uint64(3), i0 + u * np.uint64(4)
    i5, i6, i7 = i4 + u, i4 + u * np.uint64(2), i4 + u * np.uint64(3)
    o1, o2, o3, o4 = o0 + v, o0 + v * np.uint64(2), o0 + v * np.uint64(3), o0 + v * np.uint64(4)
    o5, o6, o7 = o4 + v, o4 + v * np.uint64(2), o4 + v * np.uint64(3)
    for k in range(n):
        at = np.uint64(k) * np.uint64(8)
        a, b, c, d = (
            load_u64(scratch, i0 + at),
            load_u64(scratch, i1 + at),
            load_u64(scratch, i2 + at),
            load_u64(scratch, i3 + at),
        )
        e, f, g, h = (
            load_u64(scratch, i4 + at),
            load_u64(scratch, i5 + at),
            load_u64(scratch, i6 + at),
            load_u64(scratch, i7 + at),
        )
        a, e = (a & m4) | (e << s4), (a >> s4) | (e & ~m4)
        b, f = (b & m4) | (f << s4), (b >> s4) | (f & ~m4)
        c, g = (c & m4) | (g << s4), (c >> s4) | (g & ~m4)
        d, h = (d & m4) | (h << s4), (d >> s4) | (h & ~m4)
        a, c = (a & m2) | ((c & m2) << s2), ((a >> s2) & m2) | (c & ~m2)
        b, d = (b & m2) | ((d & m2) << s2), ((b >> s2) & m2) | (d & ~m2)
        e, g = (e & m2) | ((g & m2) << s2), ((e >> s2) & m2) | (g & ~m2)
        f, h = (f & m2) | ((h & m2) << s2), ((f >> s2) & m2) | (h & ~m2)
        a, b = (a & m1) | ((b & m1) << s1), ((a >> s1) & m1) | (b & ~m1)
        c, d = (c & m1) | ((d & m1) << s1), ((c >> s1) & m1) | (d & ~m1)
        e, f = (e & m1) | ((f & m1) << s1), ((e >> s1) & m1) | (f & ~m1)
        g, h = (g & m1) | ((h & m1) << s1), ((g >> s1) & m1) | (h & ~m1)
        store_u64(scratch, o0 + at, a)
        store_u64(scratch, o1 + at, b)
        store_u64(scratch, o2 + at, c)
        store_u64(scratch, o3 + at, d)
        store_u64(scratch, o4 + at, e)
        store_u64(scratch, o5 + at, f)
        store_u64(scratch, o6 + at, g)
        store_u64(scratch, o7 + at, h)


@inlined
def _to_columns(scratch: Any, to: Any, n_columns: Any) -> None:
    for i in range(8):
        _transpose(
            scratch, _SYMBOLS + 8 * i * BLOCK, BLOCK, to + i * EIGHT_ROWS, BLOCK, np.uint64((n_columns + 7) >> 3)
        )


@inlined
def _to_rows(scratch: Any, source: Any, n_columns: Any) -> None:
    for i in range(8):
        _transpose(
            scratch, source + i * EIGHT_ROWS, BLOCK, _SYMBOLS + 8 * i * BLOCK, BLOCK, np.uint64((n_columns + 7) >> 3)
        )


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
def split_tile(words: Any, columns: Any, rows: Any, geometry: Any, scratch: Any, raw: Any, raw_at: Any) -> None:
    """Write the symbols of a tile by column, and its raw block to byte `raw_at` of `raw`."""
    low_bits, signed = geometry[0], geometry[3]
    raw_bits = low_bits + (1 if signed else 0)
    mask = np.uint16((np.int64(1) << geometry[2]) - 1)
    low_mask = np.uint16((np.int64(1) << low_bits) - 1)
    sign = np.uint16(np.int64(1) << low_bits) if signed else np.uint16(0)
    shift = 8 * words.itemsize - 1 - low_bits
    tops, flips, symbols_at = _COLUMNS, _COLUMNS + 2 * columns, _symbols_at(columns)
    for c in range(0, columns, BLOCK):
        n_columns = min(BLOCK, columns - c)
        n = np.uint64(n_columns)
        for j in range(ROWS):
            _load_row(words, np.int64(rows[j]) * columns + c, flips + 2 * c, signed, low_bits, scratch, n)
            _split_symbols(scratch, tops + 2 * c, low_bits, mask, _SYMBOLS + j * BLOCK, n)
            if raw_bits >= 8:
                _split_raw(scratch, low_mask, shift, sign, 0, _PACKED, n)
                copy_bytes(raw, raw_at + j * columns + c, scratch, _PACKED, n_columns)
            _split_raw(scratch, low_mask, shift, sign, raw_bits & 8, _RAW + j * BLOCK, n)
        _to_columns(scratch, symbols_at + (c >> 8) * BLOCK_BYTES, n_columns)
        to = raw_at + c + (ROWS * columns if raw_bits >= 8 else 0)
        bit = 0
        for p in range(2, -1, -1):
            width = 1 << p
            if raw_bits & width:
                _pack_part(scratch, bit, width, n_columns, raw, to, columns)
                bit += width
                to += 8 * width * columns


@inlined
def merge_tile(words: Any, columns: Any, rows: Any, geometry: Any, scratch: Any, block_at: Any) -> None:
    """Inverse of `split_tile`, but for the fields of escapes; the scratch holds the raw block and 8 bytes more."""
    low_bits, signed = geometry[0], geometry[3]
    raw_bits = low_bits + (1 if signed else 0)
    mask = np.uint16((np.int64(1) << geometry[2]) - 1)
    low_mask = np.uint16((np.int64(1) << low_bits) - 1)
    sign = np.uint16(np.int64(1) << (8 * words.itemsize - 1)) if signed else np.uint16(0)
    shift = 8 * words.itemsize - 1 - low_bits
    tops, flips, symbols_at = _COLUMNS, _COLUMNS + 2 * columns, _symbols_at(columns)
    for c in range(0, columns, BLOCK):
        n_columns = min(BLOCK, columns - c)
        n = np.uint64(n_columns)
        _to_rows(scratch, symbols_at + (c >> 8) * BLOCK_BYTES, n_columns)
        start = block_at + c + (ROWS * columns if raw_bits >= 8 else 0)
        bit = 0
        for p in range(2, -1, -1):
            width = 1 << p
            if raw_bits & width:
                _unpack_part(scratch, bit, width, n_columns, start, columns)
                bit += width
                start += 8 * width * columns
        for j in range(ROWS):
            plane = _RAW + j * BLOCK
            low = block_at + j * columns + c if raw_bits >= 8 else plane
            _merge(scratch, _SYMBOLS + j * BLOCK, tops + 2 * c, low_bits, mask, low, low_mask, shift, sign, n)
            if raw_bits > 8:
                _merge_high(scratch, plane, low_mask, shift, sign, n)
            to = np.int64(rows[j]) * columns + c
            _store_row(scratch, flips + 2 * c, signed, low_bits, words, to, n)


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
