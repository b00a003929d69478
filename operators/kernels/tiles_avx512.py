"""Tiles of words coded in the context of row and column scale, with AVX-512 (`scaled` of `operators/FORMAT.md`).

A tile is 64 rows of the view. Its words are split into symbols and raw bits 64 columns at a time, and the symbols
transposed in cache, so that a column of a tile is one vector of 64 symbols, a lane to a row. The rANS states of 64
lanes are two vectors of high halves and two of low halves; frequencies have 12 bits, and a state takes in or gives
up at most one half at a time. No step gathers from memory:

- a symbol's frequency, start and reciprocal are permuted out of two registers each;
- a slot finds its symbol by its bucket of 16 slots: the symbol of the bucket's first slot, or the next one beyond
  a limit. The last 128 slots, where rare symbols may crowd a bucket, have a table of their own;
- words of the stream are expanded to the lanes that lack one, or compressed from the lanes that are full.

Two vectors of 16-bit lanes that are packed into one of bytes lie in turns of 8 lanes. The rows of a column and the
columns of a row are kept in this **packed** order between the steps.

Source: Giesen, Interleaved entropy coders, 2014, for states in lanes of a vector.
"""

# mypy: disable-error-code="no-any-return, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import gather_bits
from operators.kernels.memory import copy_bytes
from operators.kernels.vectors import (
    address,
    all_bytes,
    all_dwords,
    all_quads,
    all_words,
    bits_of_bytes,
    bits_of_words,
    byte_mask,
    bytes_as_words,
    choose_bytes,
    choose_words,
    compress_words,
    count_bits,
    count_leading_zeros,
    count_trailing_zeros,
    even_words,
    expand_words,
    fetch_to_read,
    fetch_to_write,
    high_product,
    interleave_first,
    interleave_last,
    item_bytes,
    least_bytes,
    least_words,
    load_bytes,
    load_some_bytes,
    load_some_words,
    load_word,
    load_words,
    natural_to_packed,
    odd_of_second,
    odd_words,
    pack_dwords,
    pack_words,
    packed_to_natural,
    pick_byte,
    pick_byte_of_two,
    pick_word_of_two,
    quads_as_dwords,
    shift_pair,
    store_bytes,
    store_some_bytes,
    store_some_words,
    store_word,
    store_words,
    transpose,
    unpack_high_words,
    unpack_low_words,
    widen_high,
    widen_low,
    word_mask,
    words_as_bytes,
    words_as_quads,
)

LANES = 64
PAIR_BYTES, PAIR_ESCAPES = 4 * LANES, 2 * LANES
"""Room that the words of a pair of columns may take: without it the encoder gives up."""
_ESCAPE = 63
_SLOTS = 4096
_OWN_SLOTS = 128
"""Slots at the end of the range whose symbols have a table of their own."""

# A table of the encoder, by symbol: four tables of u16, and one of bytes that maps symbols without slots to escapes.
_E_START, _E_LOW, _E_HIGH, _E_SYMBOLS = 128, 256, 384, 512
ENCODER_BYTES = 576
# A table of the decoder. By bucket: the rank of the symbol of the first slot, and the last slot that it has there.
# By slot at the end: rank. By rank: symbol, frequency, start.
_D_LIMIT, _D_OWN, _D_SYMBOL, _D_FREQUENCY, _D_START = 256, 512, 640, 704, 832
DECODER_BYTES = 960

# Scratch: whatever its alignment, then 64 x 64 symbols, as many raw fields, the end of the stream; by column,
# vectors of symbols, top values, scales of pairs, and the last block of raw bits with its seeds.
_X, _U, _STREAM_END, _BY_COLUMN = 0, 4096, 8192, 8192 + 1024
_STREAM_END_BYTES = 320
SCRATCH_BYTES = 64 + _BY_COLUMN + 64 * 64 + 64
SCRATCH_BYTES_PER_COLUMN = 64 + 2 + 4 + 120
"""What the kernels need of scratch: `SCRATCH_BYTES` and so much more for each column."""


@inlined
def _u64(value: Any) -> Any:
    return np.uint64(value)


# -- tables -------------------------------------------------------------------------------------


@inlined
def _rank(frequencies: Any, t: Any, symbol: Any) -> Any:
    """Return how many symbols come before one in canonical order, and how many slots they have."""
    rank, start = np.int64(0), np.int64(0)
    key = np.int64(frequencies[t, symbol]) * 64 - symbol
    for other in range(64):
        frequency = np.int64(frequencies[t, other])
        before = frequency * 64 - other > key
        rank += before
        start += frequency if before else 0
    return rank, start


@inlined
def _put_u16(out: Any, t: Any, at: Any, value: Any) -> None:
    out[t, at] = np.uint8(value & 255)
    out[t, at + 1] = np.uint8(value >> 8)


@kernel("out")
def encoder_tables(frequencies: NDArray[np.uint16], out: NDArray[np.uint8]) -> None:
    """Set the tables that `encode_tiles` looks symbols up in.

    Parameters
    ----------
    frequencies : uint16 array, shape (n_tables, 64)
        By symbol; they add up to 4096, or to nothing where there is no table.
    out : uint8 array, shape (n_tables, ENCODER_BYTES)

    Notes
    -----
    With ``r = floor(2**32 / f)``, ``x * r >> 32`` is ``x // f`` or one less for every state x (tested for every
    frequency): ``x / f`` exceeds ``x * r / 2**32`` by less than ``x / 2**32 < 1``.
    """
    for t in range(frequencies.shape[0]):
        for s in range(64):
            frequency = np.int64(frequencies[t, s])
            _, start = _rank(frequencies, t, s)
            reciprocal = np.int64(0)
            if frequency != 0:
                reciprocal = min((np.int64(1) << 32) // frequency, np.int64(0xFFFFFFFF))
            _put_u16(out, t, 2 * s, frequency)
            _put_u16(out, t, _E_START + 2 * s, start)
            _put_u16(out, t, _E_LOW + 2 * s, reciprocal & 0xFFFF)
            _put_u16(out, t, _E_HIGH + 2 * s, reciprocal >> 16)
            out[t, _E_SYMBOLS + s] = np.uint8(s if frequency != 0 and s != _ESCAPE else 0x80 | _ESCAPE)


@kernel("out")
def decoder_tables(frequencies: NDArray[np.uint16], out: NDArray[np.uint8]) -> None:
    """Set the tables that `decode_tiles` looks slots up in.

    Parameters
    ----------
    frequencies : uint16 array, shape (n_tables, 64)
        As in `encoder_tables`; symbols of frequency below 16 have at most 128 slots together.
    out : uint8 array, shape (n_tables, DECODER_BYTES)
    """
    for t in range(frequencies.shape[0]):
        for bucket in range(256):
            out[t, bucket] = 0
            out[t, _D_LIMIT + bucket] = np.uint8((bucket & 15) << 4 | 15)
        for slot in range(_OWN_SLOTS):
            out[t, _D_OWN + slot] = 0
        for s in range(64):
            frequency = np.int64(frequencies[t, s])
            rank, start = _rank(frequencies, t, s)
            end = start + frequency
            out[t, _D_SYMBOL + rank] = np.uint8(s)
            _put_u16(out, t, _D_FREQUENCY + 2 * rank, frequency)
            _put_u16(out, t, _D_START + 2 * rank, start)
            for bucket in range((start + 15) >> 4, (end + 15) >> 4):
                out[t, bucket] = np.uint8(rank)
            if frequency != 0 and end & 15:
                out[t, _D_LIMIT + (end >> 4)] = np.uint8((end - 1) & 255)
            for slot in range(max(start, _SLOTS - _OWN_SLOTS), end):
                out[t, _D_OWN + slot - (_SLOTS - _OWN_SLOTS)] = np.uint8(rank)


# -- words, symbols and raw bits ------------------------------------------------------------------


@inlined
def _byte_shift(x: Any, n: Any) -> Any:
    """Return bytes shifted right by the lanes of `n`; what comes in from the neighbour is for the caller to mask."""
    return words_as_bytes(bytes_as_words(x) >> n)


@inlined
def _byte_shift_up(x: Any, n: Any) -> Any:
    return words_as_bytes(bytes_as_words(x) << n)


@inlined
def _swap(x: Any, low_bit: Any, distance: Any) -> Any:
    """Exchange bit `low_bit`, a mask, with the one `distance` above it."""
    t = ((x >> distance) ^ x) & low_bit
    return x ^ t ^ (t << distance)


@inlined
def _swap_bytes(x: Any, low_bit: Any, distance: Any) -> Any:
    t = (_byte_shift(x, distance) ^ x) & low_bit
    return x ^ t ^ _byte_shift_up(t, distance)


@inlined
def _symbols(x: Any, top: Any, low: Any, field_mask: Any) -> Any:
    """Return symbols of words."""
    field = (x >> low) & field_mask
    escape = all_words(np.uint16(_ESCAPE))
    return choose_words(field <= top, least_words(top - field, escape), escape)


@inlined
def _byte_symbols(x: Any, top: Any, low: Any, field_mask: Any) -> Any:
    field = _byte_shift(x, low) & field_mask
    escape = all_bytes(np.uint8(_ESCAPE))
    return choose_bytes(field <= top, least_bytes(top - field, escape), escape)


@inlined
def _packed_row(j: Any) -> Any:
    """Return the place of row `j` of a tile in packed order."""
    return ((j & _u64(24)) << _u64(1)) | ((j >> _u64(5)) << _u64(3)) | (j & _u64(7))


@inlined
def _flip_bits(flips: Any, c: Any, some: Any, wide: Any) -> Any:
    """Return the flips of 64 columns as bytes, in the order of their symbols."""
    x = load_some_bytes(some, flips + c)
    return natural_to_packed(x) if wide else x


@inlined
def _turn(x: Any, n: Any) -> Any:
    """Return bytes whose bits are moved up by `n` (or down), which those that the caller masks out may cross."""
    pair = bytes_as_words(x)
    return words_as_bytes(shift_pair(pair, pair, all_words(np.uint16(n & 15))))


@inlined
def _pack_part(u: Any, raw: Any, columns: Any, width: Any, offset: Any, some: Any, wide: Any) -> None:
    """Pack `width` bits of each of the 64 x 64 bytes at `u`, from bit `offset` on, into byte rows at `raw`."""
    n_rows = 8 * width
    for i in range(n_rows):
        held = all_bytes(np.uint8(0))
        for j in range(8 // width):
            mask = all_bytes(np.uint8(((1 << width) - 1) << width * j))
            held |= _turn(load_bytes(u + _u64(64 * (i + n_rows * j))), width * j - offset) & mask
        store_some_bytes(some, raw + _u64(i) * columns, packed_to_natural(held) if wide else held)


@inlined
def _unpack_part(u: Any, raw: Any, columns: Any, width: Any, offset: Any, some: Any, wide: Any) -> None:
    """Inverse of `_pack_part`; other bits at `u` are kept, but for a part of 4 bits."""
    n_rows = 8 * width
    mask = all_bytes(np.uint8(((1 << width) - 1) << offset))
    for i in range(n_rows):
        held = load_some_bytes(some, raw + _u64(i) * columns)
        if wide:
            held = natural_to_packed(held)
        for j in range(8 // width):
            place = u + _u64(64 * (i + n_rows * j))
            part = _turn(held, offset - width * j) & mask
            store_bytes(place, part if width == 4 else part | load_bytes(place))


@inlined
def _pack_parts(u: Any, raw: Any, columns: Any, n_bits: Any, some: Any, wide: Any) -> None:
    """Pack 64 x 64 fields of fewer than 8 bits at `u` into byte rows of `columns` bytes: parts of 4, 2 and 1."""
    if n_bits & 4:
        _pack_part(u, raw, columns, 4, 0, some, wide)
    if n_bits & 2:
        _pack_part(u, raw + _u64(8 * (n_bits & 4)) * columns, columns, 2, n_bits & 4, some, wide)
    if n_bits & 1:
        _pack_part(u, raw + _u64(8 * (n_bits & 6)) * columns, columns, 1, n_bits & 6, some, wide)


@inlined
def _unpack_parts(u: Any, raw: Any, columns: Any, n_bits: Any, some: Any, wide: Any) -> None:
    """Inverse of `_pack_parts`."""
    if n_bits & 4:
        _unpack_part(u, raw, columns, 4, 0, some, wide)
    else:
        for j in range(64):
            store_bytes(u + _u64(64 * j), all_bytes(np.uint8(0)))
    if n_bits & 2:
        _unpack_part(u, raw + _u64(8 * (n_bits & 4)) * columns, columns, 2, n_bits & 4, some, wide)
    if n_bits & 1:
        _unpack_part(u, raw + _u64(8 * (n_bits & 6)) * columns, columns, 1, n_bits & 6, some, wide)


@inlined
def _fetch_words(words: Any, rows: Any, first: Any, columns: Any, pair: Any, to_write: Any) -> None:
    """Prefetch, as one of the ``columns / 2`` parts of a tile's words, two rows of 64 columns."""
    n_bytes = item_bytes(words)
    for j in range(2 * (pair & 31), 2 * (pair & 31) + 2):
        place = (np.int64(rows[first + j]) * columns + 2 * (pair & ~31)) * n_bytes
        for line in range(n_bytes):
            if to_write:
                fetch_to_write(address(words) + _u64(place + 64 * line))
            else:
                fetch_to_read(address(words) + _u64(place + 64 * line))


@inlined
def _fetch_raw(block: Any, n_raw: Any, pair: Any, to_write: Any) -> None:
    """Prefetch, as one of the ``columns / 2`` parts of a block of raw bits, its share."""
    for place in range(16 * n_raw * pair, 16 * n_raw * (pair + 1), 64):
        if to_write:
            fetch_to_write(block + _u64(place))
        else:
            fetch_to_read(block + _u64(place))


@inlined
def _split(
    words: Any, rows: Any, first: Any, columns: Any, geometry: Any, flips: Any, tops: Any, base: Any, raw: Any, xt: Any
) -> None:
    """Split the 64 rows from `first` on into vectors of symbols at `xt` and a block of raw bits at `raw`."""
    wide = item_bytes(words) == 2
    n_bytes = _u64(item_bytes(words))
    low, n_field, signed = np.uint16(geometry[0]), _u64(geometry[2]), geometry[3]
    n_raw = _u64(geometry[0] + (1 if signed else 0))
    distance = all_words(np.uint16(_u64(8) * n_bytes - _u64(1) - _u64(low)))
    sign_bit = np.uint16(_u64(1 if signed else 0) << _u64(low))
    low_mask = np.uint16((_u64(1) << _u64(low)) - _u64(1))
    field_mask = np.uint16((_u64(1) << n_field) - _u64(1))
    low_bit = np.uint16(_u64(1) << _u64(low))
    down = all_words(low)
    rest = _u64(8) if n_raw >= _u64(8) else _u64(0)
    x, u = base + _u64(_X), base + _u64(_U)
    for c in range(_u64(0), columns, _u64(64)):
        n = min(columns - c, _u64(64))
        some_bits = ~_u64(0) >> (_u64(64) - n)
        some = byte_mask(some_bits)
        some_a, some_b = word_mask(some_bits), word_mask(some_bits >> _u64(32))
        flipped = load_some_bytes(some, flips + c)
        if wide:
            flipped = natural_to_packed(flipped)
        top = load_words(tops + c * _u64(2))
        top_b = load_words(tops + c * _u64(2) + _u64(64))
        byte_top = packed_to_natural(pack_words(top, top_b))
        fifteen = all_words(np.uint16(15))
        flip, flip_b = widen_low(flipped) << fifteen, widen_high(flipped) << fifteen
        byte_flip = _byte_shift_up(flipped, all_words(np.uint16(7)))
        for j in range(_u64(64)):
            row = address(words) + (_u64(rows[first + j]) * columns + c) * n_bytes
            if wide:
                a, b = load_some_words(some_a, row), load_some_words(some_b, row + _u64(64))
                if signed == 2:
                    a = _swap(a ^ flip, all_words(low_bit), distance)
                    b = _swap(b ^ flip_b, all_words(low_bit), distance)
                mask = all_words(field_mask)
                symbols = pack_words(_symbols(a, top, down, mask), _symbols(b, top_b, down, mask))
                keep, sign = all_words(low_mask), all_words(sign_bit)
                a = (a & keep) | ((a >> distance) & sign)
                b = (b & keep) | ((b >> distance) & sign)
                if rest:
                    byte = all_words(np.uint16(255))
                    lows = packed_to_natural(pack_words(a & byte, b & byte))
                    store_some_bytes(some, raw + j * columns + c, lows)
                up = all_words(np.uint16(rest))
                raws = pack_words(a >> up, b >> up)
            else:
                y = load_some_bytes(some, row)
                if signed == 2:
                    y = _swap_bytes(y ^ byte_flip, all_bytes(np.uint8(low_bit)), distance)
                symbols = _byte_symbols(y, byte_top, down, all_bytes(np.uint8(field_mask)))
                raws = (y & all_bytes(np.uint8(low_mask))) | (_byte_shift(y, distance) & all_bytes(np.uint8(sign_bit)))
            store_bytes(x + _packed_row(j) * _u64(64), symbols)
            store_bytes(u + j * _u64(64), raws)
        _pack_parts(u, raw + rest * _u64(8) * columns + c, columns, np.int64(n_raw - rest), some, wide)
        # Byte 16 q + i of a row is column 8 q + i, or 32 + 8 q + i - 8, in packed order.
        part, high = (_u64(8), _u64(32)) if wide else (_u64(16), _u64(8))
        for q in range(_u64(4)):
            source, to = x + q * _u64(16), xt + (c + q * part) * _u64(64)
            transpose(source, source + _u64(512), _u64(1024), to, to + high * _u64(64))


@inlined
def _merge(
    words: Any, rows: Any, first: Any, columns: Any, geometry: Any, flips: Any, tops: Any, base: Any, raw: Any, xt: Any
) -> None:
    """Inverse of `_split`; fields of escapes are in the words already, where they belong."""
    wide = item_bytes(words) == 2
    n_bytes = _u64(item_bytes(words))
    low, n_field, signed = np.uint16(geometry[0]), _u64(geometry[2]), geometry[3]
    n_raw = _u64(geometry[0] + (1 if signed else 0))
    distance = all_words(np.uint16(_u64(8) * n_bytes - _u64(1) - _u64(low)))
    sign_bit = np.uint16(_u64(1 if signed else 0) << _u64(low))
    low_mask = np.uint16((_u64(1) << _u64(low)) - _u64(1))
    field_mask = np.uint16((_u64(1) << n_field) - _u64(1))
    low_bit = np.uint16(_u64(1) << _u64(low))
    up = all_words(low)
    rest = _u64(8) if n_raw >= _u64(8) else _u64(0)
    x, u = base + _u64(_X), base + _u64(_U)
    part, high = (_u64(8), _u64(32)) if wide else (_u64(16), _u64(8))
    for c in range(_u64(0), columns, _u64(64)):
        n = min(columns - c, _u64(64))
        some_bits = ~_u64(0) >> (_u64(64) - n)
        some = byte_mask(some_bits)
        some_a, some_b = word_mask(some_bits), word_mask(some_bits >> _u64(32))
        for q in range(_u64(4)):
            source = xt + c * _u64(64) + q * _u64(16)
            to = x + q * _u64(1024)
            transpose(source, source + high * _u64(64), part * _u64(64), to, to + _u64(512))
        _unpack_parts(u, raw + rest * _u64(8) * columns + c, columns, np.int64(n_raw - rest), some, wide)
        flipped = load_some_bytes(some, flips + c)
        if wide:
            flipped = natural_to_packed(flipped)
        top = load_words(tops + c * _u64(2))
        top_b = load_words(tops + c * _u64(2) + _u64(64))
        byte_top = packed_to_natural(pack_words(top, top_b))
        fifteen = all_words(np.uint16(15))
        flip, flip_b = widen_low(flipped) << fifteen, widen_high(flipped) << fifteen
        byte_flip = _byte_shift_up(flipped, all_words(np.uint16(7)))
        for j in range(_u64(64)):
            row = address(words) + (_u64(rows[first + j]) * columns + c) * n_bytes
            symbols = load_bytes(x + _packed_row(j) * _u64(64))
            raws = load_bytes(u + j * _u64(64))
            escaped = symbols == all_bytes(np.uint8(_ESCAPE))
            if wide:
                mask = all_words(field_mask)
                a = ((top - widen_low(symbols)) & mask) << up
                b = ((top_b - widen_high(symbols)) & mask) << up
                if bits_of_bytes(escaped):
                    escape = all_words(np.uint16(_ESCAPE))
                    held = load_some_words(some_a, row) & (mask << up)
                    a = choose_words(widen_low(symbols) == escape, held, a)
                    held = load_some_words(some_b, row + _u64(64)) & (mask << up)
                    b = choose_words(widen_high(symbols) == escape, held, b)
                above = all_words(np.uint16(rest))
                raw_a, raw_b = widen_low(raws) << above, widen_high(raws) << above
                if rest:
                    lows = natural_to_packed(load_some_bytes(some, raw + j * columns + c))
                    raw_a |= widen_low(lows)
                    raw_b |= widen_high(lows)
                keep, sign = all_words(low_mask), all_words(sign_bit)
                a |= (raw_a & keep) | ((raw_a & sign) << distance)
                b |= (raw_b & keep) | ((raw_b & sign) << distance)
                if signed == 2:
                    a = _swap(a, all_words(low_bit), distance) ^ flip
                    b = _swap(b, all_words(low_bit), distance) ^ flip_b
                store_some_words(some_a, row, a)
                store_some_words(some_b, row + _u64(64), b)
            else:
                byte_field = all_bytes(np.uint8(field_mask))
                y = _byte_shift_up((byte_top - symbols) & byte_field, up)
                if bits_of_bytes(escaped):
                    y = choose_bytes(escaped, load_some_bytes(some, row) & _byte_shift_up(byte_field, up), y)
                y |= (raws & all_bytes(np.uint8(low_mask))) | _byte_shift_up(
                    raws & all_bytes(np.uint8(sign_bit)), distance
                )
                if signed == 2:
                    y = _swap_bytes(y, all_bytes(np.uint8(low_bit)), distance) ^ byte_flip
                store_some_bytes(some, row, y)


# -- contexts -------------------------------------------------------------------------------------


@inlined
def _pair_scales(column_order: Any, column_scales: Any, scales: Any) -> None:
    """Set the scale that each column is coded with: that of the first of its pair."""
    for p in range(column_order.size >> 1):
        first, second = column_order[2 * p], column_order[2 * p + 1]
        scales[first] = column_scales[first]
        scales[second] = column_scales[first]


@inlined
def _set_tops(scale: Any, scales: Any, geometry: Any, tops: Any) -> None:
    """Set the field of symbol 0 of each column of a tile."""
    k = geometry[1]
    last, low = (np.int64(1) << (geometry[2] - k)) - 1, (np.int64(1) << k) - 1
    for c in range(scales.size):
        octave = (np.int64(scales[c]) + scale) >> 3
        tops[c] = np.uint16((min(max(octave, np.int64(0)), last) << k) | low)


@inlined
def _table(scale: Any, column: Any, column_scales: Any, levels: Any, tables: Any) -> Any:
    """Return the number of the table of a pair by its first column."""
    q = np.int64(column_scales[column]) + scale
    return (np.int64(levels[column]) << tables) + ((q & 7) >> (3 - tables))


@inlined
def _lane_bits(bits: Any) -> Any:
    """Return bits of the lanes of a vector in packed order as two numbers of 32 lanes each."""
    return gather_bits(bits, _u64(0x00FF00FF00FF00FF)), gather_bits(bits, _u64(0xFF00FF00FF00FF00))


# -- states ---------------------------------------------------------------------------------------


@inlined
def _load_states(states: Any) -> Any:
    """Return high and low halves of 64 states: of lanes 0..31, then of the others."""
    a, b = load_words(states), load_words(states + _u64(64))
    c, d = load_words(states + _u64(128)), load_words(states + _u64(192))
    return odd_words(a, b), even_words(a, b), odd_words(c, d), even_words(c, d)


@inlined
def _store_states(states: Any, high: Any, low: Any, high_b: Any, low_b: Any) -> None:
    store_words(states, interleave_first(low, high))
    store_words(states + _u64(64), interleave_last(low, high))
    store_words(states + _u64(128), interleave_first(low_b, high_b))
    store_words(states + _u64(192), interleave_last(low_b, high_b))


# -- encoding -------------------------------------------------------------------------------------


@inlined
def _quotient_pair(x: Any, r: Any) -> Any:
    """Return ``x * r >> 32`` of 16 numbers of 32 bits each."""
    half, mask = all_quads(_u64(32)), all_quads(_u64(0xFFFFFFFF))
    even = (words_as_quads(x) & mask) * (words_as_quads(r) & mask)
    odd = (words_as_quads(x) >> half) * (words_as_quads(r) >> half)
    return odd_of_second(quads_as_dwords(even >> half), quads_as_dwords(odd))


@inlined
def _encode_half(high: Any, low: Any, places: Any, table: Any, at: Any) -> Any:
    """Encode a symbol in each of 32 lanes; return their states and the stream's new start."""
    zero, one, twelve = all_words(np.uint16(0)), all_words(np.uint16(1)), all_words(np.uint16(12))
    frequency = pick_word_of_two(load_words(table), places, load_words(table + _u64(64)))
    start = pick_word_of_two(load_words(table + _u64(_E_START)), places, load_words(table + _u64(_E_START + 64)))
    r_low = pick_word_of_two(load_words(table + _u64(_E_LOW)), places, load_words(table + _u64(_E_LOW + 64)))
    r_high = pick_word_of_two(load_words(table + _u64(_E_HIGH)), places, load_words(table + _u64(_E_HIGH + 64)))
    # A state of f << 20 or more gives up its low half.
    full = high >= (frequency << all_words(np.uint16(4)))
    n = count_bits(bits_of_words(full))
    at -= n + n
    store_some_words(word_mask((_u64(1) << n) - _u64(1)), at, compress_words(low, zero, full))
    low, high = choose_words(full, high, low), choose_words(full, zero, high)
    q = _quotient_pair(unpack_low_words(low, high), unpack_low_words(r_low, r_high))
    q_b = _quotient_pair(unpack_high_words(low, high), unpack_high_words(r_low, r_high))
    # The quotient is below 2**20 and right or one too small, which a remainder of f or more tells.
    keep, four = all_dwords(np.uint32(0xFFFF)), all_dwords(np.uint32(4))
    q_low, high = pack_dwords(q & keep, q_b & keep), pack_dwords(q >> four, q_b >> four)
    remainder = low - q_low * frequency
    slot = remainder + start
    slot = choose_words(remainder >= frequency, slot + (all_words(np.uint16(_SLOTS)) - frequency), slot)
    low = (q_low << twelve) + slot
    return choose_words(low < slot, high + one, high), low, at


@inlined
def _encode_vector(symbols: Any, table: Any, high: Any, low: Any, high_b: Any, low_b: Any, at: Any) -> Any:
    """Encode a symbol, bytes in packed order, in each of 64 lanes."""
    high_b, low_b, at = _encode_half(high_b, low_b, widen_high(symbols), table, at)
    high, low, at = _encode_half(high, low, widen_low(symbols), table, at)
    return high, low, high_b, low_b, at


@inlined
def _field(words: Any, row: Any, column: Any, columns: Any, flips: Any, geometry: Any) -> Any:
    """Return the field of a word."""
    place = row * columns + column
    width = item_bytes(words) << 3
    low, n_field = _u64(geometry[0]), _u64(geometry[2])
    word = _u64(words[place])
    if geometry[3] == 2:
        top = _u64(width - 1)
        word ^= _u64(flips[column]) << top
        t = ((word >> (top - low)) ^ word) & (_u64(1) << low)
        word ^= t
    return (word >> low) & ((_u64(1) << n_field) - _u64(1))


@inlined
def _put_escapes(
    bits: Any,
    words: Any,
    rows: Any,
    first: Any,
    column: Any,
    columns: Any,
    flips: Any,
    geometry: Any,
    escapes: Any,
    n_escapes: Any,
) -> Any:
    """Write the fields of the lanes of `bits` (packed order) before `n_escapes`; return where they start."""
    half_a, half_b = _lane_bits(bits)
    lanes = half_a | (half_b << _u64(32))
    while lanes != _u64(0):
        lane = _u64(63) - count_leading_zeros(lanes)
        lanes ^= _u64(1) << lane
        n_escapes -= 1
        row = _u64(rows[first + lane])
        escapes[n_escapes] = np.uint16(_field(words, row, column, columns, flips, geometry))
    return n_escapes


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
    """Encode tiles, the last first; return the byte where the stream now starts, and the first escape.

    Parameters
    ----------
    words : uint8 or uint16 array, shape (n,)
    columns : int
        Words of a row, even.
    rows : int32 array, shape (64 * T,)
        Numbers of the rows of the tiles.
    tile_scales : int32 array, shape (T,)
    column_order : int32 array, shape (columns,)
        Columns in the order of coding; two in turn are a pair.
    column_scales : int32 array, shape (columns,)
    levels, flips : uint8 arrays, shape (columns,)
    geometry : int64 array, shape (5,)
        Low bits, fraction bits, field bits, signed, tables.
    tables : uint8 array, shape (n_tables, ENCODER_BYTES)
    raw : uint8 array
        Set to the blocks of raw bits of the tiles.
    stream : uint8 array
        Written below byte `at`.
    states : uint32 array, shape (64,) or (128,)
        Advanced; set from the seeds first with `is_last`.
    escapes : uint16 array
        Written below `n_escapes`.
    scratch : uint8 array
        `SCRATCH_BYTES` and `SCRATCH_BYTES_PER_COLUMN` for each column.
    is_last : bool
        Whether the last tile is the last to be decoded.

    Returns
    -------
    at, n_escapes : int
        `at` is -1 where there is too little room, or an escape has no slots.
    """
    n_columns = _u64(columns)
    n_tables = geometry[4]
    n_raw = geometry[0] + (1 if geometry[3] else 0)
    block = 8 * n_raw * columns
    two = states.size == 2 * LANES
    base = (address(scratch) + _u64(63)) & ~_u64(63)
    xt = base + _u64(_BY_COLUMN)
    here = np.int64(base - address(scratch)) + _BY_COLUMN + 64 * columns + 4096
    scales = scratch[here : here + 4 * columns].view(np.int32)
    tops = scratch[here + 4 * columns : here + 6 * columns].view(np.uint16)
    _pair_scales(column_order, column_scales, scales)
    start = address(stream)
    p = start + _u64(at)
    group, group_b = address(states), address(states) + (_u64(4 * LANES) if two else _u64(0))
    if is_last:
        states[:] = np.uint32(1 << 16)
    for tile in range(tile_scales.size - 1, -1, -1):
        scale = np.int64(tile_scales[tile])
        first = _u64(tile * LANES)
        _set_tops(scale, scales, geometry, tops)
        to = address(raw) + _u64(tile * block)
        _split(words, rows, first, n_columns, geometry, address(flips), address(tops), base, to, xt)
        if is_last and tile == tile_scales.size - 1:
            n_seeded = min(2 * states.size, block)
            for lane in range(n_seeded >> 1):
                seed = _u64(load_word(to + _u64(block - n_seeded + 2 * lane)))
                states[lane] = np.uint32(seed | _u64(1 << 16))
        high, low, high_b, low_b = _load_states(group)
        odd_high, odd_low, odd_high_b, odd_low_b = _load_states(group_b)
        for pair in range((columns >> 1) - 1, -1, -1):
            if p < start + _u64(PAIR_BYTES) or n_escapes < PAIR_ESCAPES:
                return np.int64(-1), n_escapes
            table = address(tables) + _u64(
                _table(scale, column_order[2 * pair], column_scales, levels, n_tables) * ENCODER_BYTES
            )
            if tile != 0:
                _fetch_words(words, rows, (tile - 1) * LANES, columns, pair, False)
                _fetch_raw(to - _u64(block), n_raw, pair, True)
            live = load_bytes(table + _u64(_E_SYMBOLS))
            column = _u64(column_order[2 * pair + 1])
            symbols = pick_byte(live, load_bytes(xt + column * _u64(64)))
            bits = bits_of_bytes(symbols >= all_bytes(np.uint8(128)))
            if bits:
                n_escapes = _put_escapes(
                    bits, words, rows, first, column, n_columns, flips, geometry, escapes, n_escapes
                )
            if not two:
                odd_high, odd_low, odd_high_b, odd_low_b = high, low, high_b, low_b
            odd_high, odd_low, odd_high_b, odd_low_b, p = _encode_vector(
                symbols, table, odd_high, odd_low, odd_high_b, odd_low_b, p
            )
            column = _u64(column_order[2 * pair])
            symbols = pick_byte(live, load_bytes(xt + column * _u64(64)))
            bits = bits_of_bytes(symbols >= all_bytes(np.uint8(128)))
            if bits:
                n_escapes = _put_escapes(
                    bits, words, rows, first, column, n_columns, flips, geometry, escapes, n_escapes
                )
            if not two:
                high, low, high_b, low_b = odd_high, odd_low, odd_high_b, odd_low_b
            high, low, high_b, low_b, p = _encode_vector(symbols, table, high, low, high_b, low_b, p)
        if two:
            _store_states(group_b, odd_high, odd_low, odd_high_b, odd_low_b)
        _store_states(group, high, low, high_b, low_b)
    return np.int64(p - start), n_escapes


# -- decoding -------------------------------------------------------------------------------------


@inlined
def _decode_half(high: Any, low: Any, ranks: Any, table: Any, at: Any) -> Any:
    """Take a symbol from each of 32 lanes by its rank, and words for those that run empty."""
    zero, one, four = all_words(np.uint16(0)), all_words(np.uint16(1)), all_words(np.uint16(4))
    frequencies, starts = table + _u64(_D_FREQUENCY), table + _u64(_D_START)
    frequency = pick_word_of_two(load_words(frequencies), ranks, load_words(frequencies + _u64(64)))
    start = pick_word_of_two(load_words(starts), ranks, load_words(starts + _u64(64)))
    remainder = (low & all_words(np.uint16(_SLOTS - 1))) - start
    q_low, q_high = shift_pair(high, low, four), high >> all_words(np.uint16(12))
    product = frequency * q_low
    high = high_product(frequency, q_low) + frequency * q_high
    low = product + remainder
    high = choose_words(low < remainder, high + one, high)
    empty = high == zero
    return (
        choose_words(empty, low, high),
        expand_words(load_words(at), low, empty),
        at + (count_bits(bits_of_words(empty)) << _u64(1)),
    )


@inlined
def _decode_vector(table: Any, high: Any, low: Any, high_b: Any, low_b: Any, at: Any) -> Any:
    """Take a symbol from each of 64 lanes; return states, the stream's place and symbols in packed order."""
    byte, four = all_words(np.uint16(255)), all_words(np.uint16(4))
    # A slot is a bucket of 8 bits and 4 more; both halves are taken as bytes, with what they have in common.
    lows = pack_words(low & byte, low_b & byte)
    buckets = pack_words((low >> four) & byte, (low_b >> four) & byte)
    upper = buckets >= all_bytes(np.uint8(128))
    limits = table + _u64(_D_LIMIT)
    ranks = choose_bytes(
        upper,
        pick_byte_of_two(load_bytes(table + _u64(128)), buckets, load_bytes(table + _u64(192))),
        pick_byte_of_two(load_bytes(table), buckets, load_bytes(table + _u64(64))),
    )
    limit = choose_bytes(
        upper,
        pick_byte_of_two(load_bytes(limits + _u64(128)), buckets, load_bytes(limits + _u64(192))),
        pick_byte_of_two(load_bytes(limits), buckets, load_bytes(limits + _u64(64))),
    )
    ranks = choose_bytes(lows > limit, ranks + all_bytes(np.uint8(1)), ranks)
    own = table + _u64(_D_OWN)
    ranks = choose_bytes(
        buckets >= all_bytes(np.uint8((_SLOTS - _OWN_SLOTS) >> 4)),
        pick_byte_of_two(load_bytes(own), lows, load_bytes(own + _u64(64))),
        ranks,
    )
    symbols = pick_byte(load_bytes(table + _u64(_D_SYMBOL)), ranks)
    high, low, at = _decode_half(high, low, widen_low(ranks), table, at)
    high_b, low_b, at = _decode_half(high_b, low_b, widen_high(ranks), table, at)
    return high, low, high_b, low_b, at, symbols


@inlined
def _take_escapes(
    bits: Any,
    words: Any,
    rows: Any,
    first: Any,
    column: Any,
    columns: Any,
    low_bits: Any,
    escapes: Any,
    n_escapes: Any,
) -> Any:
    """Put the next escapes into the words of the lanes of `bits` (packed order); return the number of the one after."""
    half_a, half_b = _lane_bits(bits)
    lanes = half_a | (half_b << _u64(32))
    while lanes != _u64(0):
        lane = count_trailing_zeros(lanes)
        lanes &= lanes - _u64(1)
        place = _u64(rows[first + lane]) * columns + column
        words[place] = _u64(escapes[n_escapes]) << _u64(low_bits)
        n_escapes += 1
    return n_escapes


@inlined
def _put_seeds(states: Any, n_seeded: Any, to: Any) -> Any:
    """Write the seeds in the last states; return whether these are those of a writer."""
    for lane in range(states.size):
        state = _u64(states[lane])
        seed = state & _u64(0xFFFF)
        if 2 * lane < n_seeded:
            store_word(to + _u64(2 * lane), np.uint16(seed))
            seed = _u64(0)
        if state >> _u64(16) != _u64(1) or seed != _u64(0):
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
    words: NDArray[Any],
    is_last: bool,
) -> tuple[int, int]:
    """Inverse of `encode_tiles`, in the order of the tiles.

    Parameters
    ----------
    payload : uint8 array
        Blocks of raw bits from `raw_at` on, the stream in ``[at, end)``.
    columns, rows, tile_scales, column_order, column_scales, levels, flips, geometry, states, scratch
        As in `encode_tiles`.
    tables : uint8 array, shape (n_tables, DECODER_BYTES)
    raw_at, at, end : int
        Bytes of `payload`.
    escapes : uint16 array
    n_escapes : int
        The next of `escapes`.
    words : uint8 or uint16 array, shape (n,)
        All words of the rows are written.
    is_last : bool
        Whether the last tile is the last of all: the end of its block is taken from the states.

    Returns
    -------
    at, n_escapes : int
        `at` is -1 where the stream or the escapes end too soon, or the last states are not those of a writer.
    """
    n_columns = _u64(columns)
    n_tables = geometry[4]
    n_raw = geometry[0] + (1 if geometry[3] else 0)
    block = 8 * n_raw * columns
    two = states.size == 2 * LANES
    base = (address(scratch) + _u64(63)) & ~_u64(63)
    xt = base + _u64(_BY_COLUMN)
    here = np.int64(base - address(scratch)) + _BY_COLUMN + 64 * columns + 4096
    scales = scratch[here : here + 4 * columns].view(np.int32)
    tops = scratch[here + 4 * columns : here + 6 * columns].view(np.uint16)
    last_block = address(scratch) + _u64(here + 6 * columns)
    _pair_scales(column_order, column_scales, scales)
    p = address(payload) + _u64(at)
    finish = address(payload) + _u64(end)
    # A pair takes at most 256 bytes and looks at 64 more: what is too near the end moves to scratch, once.
    safe = finish - _u64(_STREAM_END_BYTES)
    moved = False
    group, group_b = address(states), address(states) + (_u64(4 * LANES) if two else _u64(0))
    for tile in range(tile_scales.size):
        scale = np.int64(tile_scales[tile])
        first = _u64(tile * LANES)
        source = address(payload) + _u64(raw_at + tile * block)
        high, low, high_b, low_b = _load_states(group)
        odd_high, odd_low, odd_high_b, odd_low_b = _load_states(group_b)
        for pair in range(columns >> 1):
            if p > safe:
                if moved:
                    return np.int64(-1), n_escapes
                moved = True
                to = base + _u64(_STREAM_END)
                n = np.int64(finish - p)
                copy_bytes(scratch, np.int64(to - address(scratch)), payload, end - n, n)
                p, safe = to, to + _u64(n)
            table = address(tables) + _u64(
                _table(scale, column_order[2 * pair], column_scales, levels, n_tables) * DECODER_BYTES
            )
            _fetch_words(words, rows, tile * LANES, columns, pair, True)
            _fetch_raw(source, n_raw, pair, False)
            if not two:
                high, low, high_b, low_b = odd_high, odd_low, odd_high_b, odd_low_b
            column = _u64(column_order[2 * pair])
            high, low, high_b, low_b, p, symbols = _decode_vector(table, high, low, high_b, low_b, p)
            store_bytes(xt + column * _u64(64), symbols)
            bits = bits_of_bytes(symbols == all_bytes(np.uint8(_ESCAPE)))
            if bits:
                if n_escapes + np.int64(count_bits(bits)) > escapes.size:
                    return np.int64(-1), n_escapes
                n_escapes = _take_escapes(bits, words, rows, first, column, n_columns, geometry[0], escapes, n_escapes)
            if not two:
                odd_high, odd_low, odd_high_b, odd_low_b = high, low, high_b, low_b
            column = _u64(column_order[2 * pair + 1])
            odd_high, odd_low, odd_high_b, odd_low_b, p, symbols = _decode_vector(
                table, odd_high, odd_low, odd_high_b, odd_low_b, p
            )
            store_bytes(xt + column * _u64(64), symbols)
            bits = bits_of_bytes(symbols == all_bytes(np.uint8(_ESCAPE)))
            if bits:
                if n_escapes + np.int64(count_bits(bits)) > escapes.size:
                    return np.int64(-1), n_escapes
                n_escapes = _take_escapes(bits, words, rows, first, column, n_columns, geometry[0], escapes, n_escapes)
        if two:
            _store_states(group, high, low, high_b, low_b)
        _store_states(group_b, odd_high, odd_low, odd_high_b, odd_low_b)
        if moved and p > safe:
            return np.int64(-1), n_escapes
        if is_last and tile == tile_scales.size - 1:
            n_seeded = min(2 * states.size, block)
            if not _put_seeds(states, n_seeded, last_block + _u64(block - n_seeded)):
                return np.int64(-1), n_escapes
            copy_bytes(scratch, here + 6 * columns, payload, raw_at + tile * block, block - n_seeded)
            source = last_block
        _set_tops(scale, scales, geometry, tops)
        _merge(words, rows, first, n_columns, geometry, address(flips), address(tops), base, source, xt)
    if is_last and tile_scales.size == 0 and not _put_seeds(states, np.int64(0), last_block):
        return np.int64(-1), n_escapes
    left = safe - p if moved else finish - p
    return end - np.int64(left), n_escapes
