"""Words of a tile as symbols and raw bits, and back, with AVX-512: `tile_planes` for that.

A tile is worked on 64 columns at a time. Its 64 rows of words become rows of symbols, one byte each, and rows of
raw fields; 16 x 16 bytes at a time the symbols are transposed, so that a column is one vector. Columns beyond the
last are left out by masks: nothing is read or written beyond the words and the block of raw bits.

Two vectors of 16-bit lanes that are packed into one of bytes lie in turns of 8 lanes: 0-7, 32-39, 8-15, 40-47 ...
The rows of a column, and the columns of a row of 16-bit words, stay in this **packed** order between the steps.

Memory is reached by address; the caller's arrays are not looked at.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from operators.kernels.jit import inlined
from operators.kernels.vectors import (
    address,
    all_bytes,
    all_words,
    bits_of_bytes,
    byte_mask,
    bytes_as_words,
    choose_bytes,
    choose_words,
    fetch_to_read,
    fetch_to_write,
    interleave_first,
    interleave_last,
    item_bytes,
    least_bytes,
    least_words,
    load_byte,
    load_bytes,
    load_dword,
    load_some_bytes,
    load_some_words,
    load_word,
    load_words,
    natural_to_packed,
    odd_words,
    pack_words,
    packed_to_natural,
    shift_pair,
    store_bytes,
    store_some_bytes,
    store_some_words,
    transpose,
    widen_high,
    widen_low,
    word_mask,
    words_as_bytes,
)

ROWS = 64
ESCAPE = 63
"""The symbol of a word whose field is too far below the top of its context, or above it."""

# Scratch: 64 x 64 symbols and as many raw fields, then what there is for each column.
_X, _U, _COLUMNS = 0, 4096, 8192
FIXED_BYTES = _COLUMNS + 64 * ROWS + 2 * ROWS
COLUMN_BYTES = 64 + 2
"""`FIXED_BYTES`, and `COLUMN_BYTES` for each column, are the scratch that is used here: the first is aligned to 64."""


class View(NamedTuple):
    """The words, and how their bits are used.

    Attributes
    ----------
    words, flips : address
    n_bytes : int
        Of a word, a constant: 1, 2, or 4 where its upper half is what is decoded.
    lows : address
        Of the lower halves of words of 4 bytes.
    columns : int
    low, field, raw : int
        Bits of the word that are stored raw, of its field, and of its raw field with the sign.
    signed : int
    tops, symbols, scratch : address
        Of the field of symbol 0 by column, and of the vectors of symbols.
    """

    words: Any
    flips: Any
    n_bytes: Any
    lows: Any
    columns: Any
    low: Any
    field: Any
    raw: Any
    signed: Any
    tops: Any
    symbols: Any
    scratch: Any


@inlined
def view_of(words: Any, lows: Any, flips: Any, columns: Any, geometry: Any, scratch: Any) -> Any:
    """Return the view of `words`, their lower halves and its scratch at the addresses `lows` and `scratch`."""
    low, signed = geometry[0], geometry[3]
    return View(
        address(words),
        address(flips),
        item_bytes(words),
        lows,
        columns,
        low,
        geometry[2],
        low + (1 if signed else 0),
        signed,
        scratch + _COLUMNS + 64 * ROWS + 64 * columns,
        scratch + _COLUMNS,
        scratch,
    )


@inlined
def _ones(n: Any) -> Any:
    return (1 << n) - 1


# -- bits of a word -------------------------------------------------------------------------------


@inlined
def _byte_down(x: Any, n: Any) -> Any:
    """Return bytes shifted; what comes in from the neighbour is for the caller to mask."""
    return words_as_bytes(bytes_as_words(x) >> n)


@inlined
def _byte_up(x: Any, n: Any) -> Any:
    return words_as_bytes(bytes_as_words(x) << n)


@inlined
def _turn(x: Any, n: Any) -> Any:
    """Return bytes shifted up by `n`, or down where it is negative; as for `_byte_down`."""
    pair = bytes_as_words(x)
    return words_as_bytes(shift_pair(pair, pair, all_words(n & 15)))


@inlined
def _swap(x: Any, low_bit: Any, distance: Any) -> Any:
    """Exchange bit `low_bit`, a mask, with the one `distance` above it."""
    differ = ((x >> distance) ^ x) & low_bit
    return x ^ differ ^ (differ << distance)


@inlined
def _swap_bytes(x: Any, low_bit: Any, distance: Any) -> Any:
    differ = (_byte_down(x, distance) ^ x) & low_bit
    return x ^ differ ^ _byte_up(differ, distance)


@inlined
def _symbols(field: Any, top: Any) -> Any:
    escape = all_words(ESCAPE)
    return choose_words(field <= top, least_words(top - field, escape), escape)


@inlined
def _byte_symbols(field: Any, top: Any) -> Any:
    escape = all_bytes(ESCAPE)
    return choose_bytes(field <= top, least_bytes(top - field, escape), escape)


# -- parts of the raw fields ------------------------------------------------------------------------


@inlined
def _pack_part(raws: Any, out: Any, view: Any, width: Any, offset: Any, some: Any) -> None:
    """Pack `width` bits of each of the 64 x 64 bytes at `raws`, from bit `offset` on, into byte rows at `out`."""
    n_rows = 8 * width
    for i in range(n_rows):
        held = all_bytes(0)
        for j in range(8 // width):
            mask = all_bytes(((1 << width) - 1) << width * j)
            held |= _turn(load_bytes(raws + 64 * (i + n_rows * j)), width * j - offset) & mask
        store_some_bytes(some, out + i * view.columns, packed_to_natural(held) if view.n_bytes == 2 else held)


@inlined
def _unpack_part(raws: Any, block: Any, view: Any, width: Any, offset: Any, some: Any) -> None:
    """Inverse of `_pack_part`; other bits at `raws` are kept, but for a part of 4 bits."""
    n_rows = 8 * width
    mask = all_bytes(((1 << width) - 1) << offset)
    for i in range(n_rows):
        held = load_some_bytes(some, block + i * view.columns)
        if view.n_bytes != 1:
            held = natural_to_packed(held)
        for j in range(8 // width):
            place = raws + 64 * (i + n_rows * j)
            part = _turn(held, offset - width * j) & mask
            store_bytes(place, part if width == 4 else part | load_bytes(place))


@inlined
def _pack_parts(raws: Any, out: Any, view: Any, some: Any) -> None:
    """Pack 64 x 64 fields of fewer than 8 bits at `raws` into byte rows: a part of 4, of 2, of 1."""
    n_bits = view.raw & 7
    if n_bits & 4:
        _pack_part(raws, out, view, 4, 0, some)
    if n_bits & 2:
        _pack_part(raws, out + 8 * (n_bits & 4) * view.columns, view, 2, n_bits & 4, some)
    if n_bits & 1:
        _pack_part(raws, out + 8 * (n_bits & 6) * view.columns, view, 1, n_bits & 6, some)


@inlined
def _unpack_parts(raws: Any, block: Any, view: Any, some: Any) -> None:
    """Inverse of `_pack_parts`."""
    n_bits = view.raw & 7
    if n_bits & 4:
        _unpack_part(raws, block, view, 4, 0, some)
    else:
        for j in range(ROWS):
            store_bytes(raws + 64 * j, all_bytes(0))
    if n_bits & 2:
        _unpack_part(raws, block + 8 * (n_bits & 4) * view.columns, view, 2, n_bits & 4, some)
    if n_bits & 1:
        _unpack_part(raws, block + 8 * (n_bits & 6) * view.columns, view, 1, n_bits & 6, some)


# -- a tile -----------------------------------------------------------------------------------------


@inlined
def row_at(view: Any, rows: Any, j: Any) -> Any:
    """Return the address of row `j` of the tile whose numbers of rows are at `rows`."""
    return view.words + load_dword(rows + 4 * j) * view.columns * view.n_bytes


@inlined
def _packed(j: Any) -> Any:
    """Return the place of a row in packed order."""
    return ((j & 24) << 1) | ((j >> 5) << 3) | (j & 7)


@inlined
def _turns(view: Any) -> Any:
    """Return how far apart the columns of two 16-byte parts of a row of symbols are, and those of halves of a part."""
    return (16 * 64, 8 * 64) if view.n_bytes == 1 else (8 * 64, 32 * 64)


@inlined
def _per_column(view: Any, c: Any) -> Any:
    """Return masks of up to 64 columns from `c` on as bytes and as words, their flips as bytes, and their tops."""
    bits = ~np.uint64(0) >> np.uint64(64 - min(view.columns - c, 64))
    some = byte_mask(bits)
    flips = load_some_bytes(some, view.flips + c)
    tops = view.tops + c * 2
    return (
        some,
        word_mask(bits),
        word_mask(bits >> np.uint64(32)),
        flips if view.n_bytes == 1 else natural_to_packed(flips),
        load_words(tops),
        load_words(tops + 64),
    )


@inlined
def split_tile(view: Any, rows: Any, out: Any) -> None:
    """Split a tile into vectors of symbols at `view.symbols` and a block of raw bits at `out`."""
    above = 8 * view.n_bytes - 1 - view.low
    low, distance, up = all_words(view.low), all_words(above), all_words(view.raw & 8)
    field_mask, keep, low_bit = _ones(view.field), _ones(view.low), 1 << view.low
    sign_bit = low_bit if view.signed else 0
    x, raws = view.scratch + _X, view.scratch + _U
    part, half = _turns(view)
    for c in range(0, view.columns, 64):
        some, some_a, some_b, flips, top_a, top_b = _per_column(view, c)
        for j in range(ROWS):
            row = row_at(view, rows, j) + c * view.n_bytes
            if view.n_bytes == 2:
                a, b = load_some_words(some_a, row), load_some_words(some_b, row + 64)
                if view.signed == 2:
                    a = _swap(a ^ (widen_low(flips) << all_words(15)), all_words(low_bit), distance)
                    b = _swap(b ^ (widen_high(flips) << all_words(15)), all_words(low_bit), distance)
                mask = all_words(field_mask)
                symbols = pack_words(_symbols((a >> low) & mask, top_a), _symbols((b >> low) & mask, top_b))
                a = (a & all_words(keep)) | ((a >> distance) & all_words(sign_bit))
                b = (b & all_words(keep)) | ((b >> distance) & all_words(sign_bit))
                if view.raw & 8:
                    byte = all_words(255)
                    lows = packed_to_natural(pack_words(a & byte, b & byte))
                    store_some_bytes(some, out + j * view.columns + c, lows)
                held = pack_words(a >> up, b >> up)
            else:
                y = load_some_bytes(some, row)
                if view.signed == 2:
                    flip = _byte_up(flips, all_words(7))
                    y = _swap_bytes(y ^ flip, all_bytes(low_bit), distance)
                top = packed_to_natural(pack_words(top_a, top_b))
                symbols = _byte_symbols(_byte_down(y, low) & all_bytes(field_mask), top)
                held = y & all_bytes(keep)
                held |= _byte_down(y, distance) & all_bytes(sign_bit)
            store_bytes(x + _packed(j) * 64, symbols)
            store_bytes(raws + j * 64, held)
        _pack_parts(raws, out + ROWS // 8 * (view.raw & 8) * view.columns + c, view, some)
        for q in range(4):
            source, to = x + q * 16, view.symbols + c * 64 + q * part
            transpose(source, source + 8 * 64, 16 * 64, to, to + half)


@inlined
def _halves(n: Any, first: Any) -> Any:
    """Return the mask of the 32 halves of words `first` to ``first + 16``, of which there are `n`."""
    n = min(max(n, np.uint64(first)) - np.uint64(first), np.uint64(16))
    return word_mask((np.uint64(1) << (n + n)) - np.uint64(1))


@inlined
def _load_uppers(view: Any, row: Any, some_a: Any, some_b: Any, wide: Any) -> Any:
    """Return what of 64 words of 2 or 4 bytes is decoded, as it is in memory."""
    if view.n_bytes == 2:
        return load_some_words(some_a, row), load_some_words(some_b, row + 64)
    return (
        odd_words(load_some_words(wide[0], row), load_some_words(wide[1], row + 64)),
        odd_words(load_some_words(wide[2], row + 128), load_some_words(wide[3], row + 192)),
    )


@inlined
def merge_tile(view: Any, rows: Any, block: Any) -> None:
    """Inverse of `split_tile`; fields of escapes are in the words already, where they belong."""
    above = (7 if view.n_bytes == 1 else 15) - view.low
    low, distance, up = all_words(view.low), all_words(above), all_words(view.raw & 8)
    field_mask, keep, low_bit = _ones(view.field), _ones(view.low), 1 << view.low
    sign_bit = low_bit if view.signed else 0
    x, raws = view.scratch + _X, view.scratch + _U
    part, half = _turns(view)
    for c in range(0, view.columns, 64):
        some, some_a, some_b, flips, top_a, top_b = _per_column(view, c)
        n = np.uint64(min(view.columns - c, 64))
        wide = _halves(n, 0), _halves(n, 16), _halves(n, 32), _halves(n, 48)
        for q in range(4):
            source, to = view.symbols + c * 64 + q * 16, x + q * 16 * 64
            transpose(source, source + half, part, to, to + 8 * 64)
        _unpack_parts(raws, block + ROWS // 8 * (view.raw & 8) * view.columns + c, view, some)
        for j in range(ROWS):
            row = row_at(view, rows, j) + c * view.n_bytes
            symbols, held = load_bytes(x + _packed(j) * 64), load_bytes(raws + j * 64)
            escaped = symbols == all_bytes(ESCAPE)
            if view.n_bytes != 1:
                mask = all_words(field_mask)
                a, b = (top_a - widen_low(symbols)) & mask, (top_b - widen_high(symbols)) & mask
                if bits_of_bytes(escaped):
                    escape = all_words(ESCAPE)
                    found_a, found_b = _load_uppers(view, row, some_a, some_b, wide)
                    a = choose_words(widen_low(symbols) == escape, (found_a >> low) & mask, a)
                    b = choose_words(widen_high(symbols) == escape, (found_b >> low) & mask, b)
                raw_a, raw_b = widen_low(held) << up, widen_high(held) << up
                if view.raw & 8:
                    lows = natural_to_packed(load_some_bytes(some, block + j * view.columns + c))
                    raw_a |= widen_low(lows)
                    raw_b |= widen_high(lows)
                a = (a << low) | (raw_a & all_words(keep))
                b = (b << low) | (raw_b & all_words(keep))
                a |= (raw_a & all_words(sign_bit)) << distance
                b |= (raw_b & all_words(sign_bit)) << distance
                if view.signed == 2:
                    a = _swap(a, all_words(low_bit), distance) ^ (widen_low(flips) << all_words(15))
                    b = _swap(b, all_words(low_bit), distance) ^ (widen_high(flips) << all_words(15))
                if view.n_bytes == 2:
                    store_some_words(some_a, row, a)
                    store_some_words(some_b, row + 64, b)
                else:
                    of_row = view.lows + ((row - view.words) >> 1)
                    low_a, low_b = load_some_words(some_a, of_row), load_some_words(some_b, of_row + 64)
                    store_some_words(wide[0], row, interleave_first(low_a, a))
                    store_some_words(wide[1], row + 64, interleave_last(low_a, a))
                    store_some_words(wide[2], row + 128, interleave_first(low_b, b))
                    store_some_words(wide[3], row + 192, interleave_last(low_b, b))
            else:
                mask = all_bytes(field_mask)
                y = (packed_to_natural(pack_words(top_a, top_b)) - symbols) & mask
                if bits_of_bytes(escaped):
                    y = choose_bytes(escaped, _byte_down(load_some_bytes(some, row), low) & mask, y)
                y = _byte_up(y, low) | (held & all_bytes(keep))
                y |= _byte_up(held & all_bytes(sign_bit), distance)
                if view.signed == 2:
                    flip = _byte_up(flips, all_words(7))
                    y = _swap_bytes(y, all_bytes(low_bit), distance) ^ flip
                store_some_bytes(some, row, y)


@inlined
def field_at(view: Any, row: Any, column: Any) -> Any:
    """Return the field of a word of the row at the address `row`."""
    if view.n_bytes == 2:
        word = load_word(row + 2 * column)
    else:
        word = load_byte(row + column)
    if view.signed == 2:
        # The lowest bit of the field is the sign.
        sign = (word >> (8 * view.n_bytes - 1)) ^ load_byte(view.flips + column)
        word = (word & ~(1 << view.low)) | (sign << view.low)
    return (word >> view.low) & _ones(view.field)


@inlined
def fetch_part(view: Any, rows: Any, block: Any, pair: Any, words_written: Any) -> None:
    """Ask for one of the ``columns / 2`` shares of a tile's words and of its block of raw bits.

    Of the words these are two rows of 64 columns, of the raw bits the next bytes. Words are read and raw bits
    written, or the other way round.
    """
    for j in range(2 * (pair & 31), 2 * (pair & 31) + 2):
        place = row_at(view, rows, j) + (pair & ~31) * 2 * view.n_bytes
        for line in range(view.n_bytes):
            if words_written:
                fetch_to_write(place + 64 * line)
            else:
                fetch_to_read(place + 64 * line)
        if view.n_bytes == 4:
            low = view.lows + ((place - view.words) >> 1)
            fetch_to_read(low)
            fetch_to_read(low + 64)
    share = 16 * view.raw
    for place in range(block + share * pair, block + share * (pair + 1), 64):
        if words_written:
            fetch_to_read(place)
        else:
            fetch_to_write(place)
