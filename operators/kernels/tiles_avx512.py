"""Tiles of words coded in the context of row and column scale, with AVX-512 (`scaled` of `operators/FORMAT.md`).

The bytes are those of `operators.kernels.tiles`. The 64 symbols of a column of a tile are one vector, a lane to a
row. The rANS states of 64 lanes are two vectors of high halves and two of low halves; frequencies have 12 bits,
and a state takes in or gives up at most one half at a time. No step gathers from memory:

- a symbol's frequency, start and reciprocal are permuted out of two registers each, of low and of high bytes;
- a slot finds its symbol by its bucket of 16 slots: the symbol of the bucket's first slot, or the next one beyond
  a limit. The last 128 slots, where rare symbols may crowd a bucket, have a table of their own;
- words of the stream are expanded to the lanes that lack one, or compressed from the lanes that are full.

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
from operators.kernels.tile_payloads import decode_payload, lane_tables
from operators.kernels.tile_planes_avx512 import (
    COLUMN_BYTES,
    ESCAPE,
    FIXED_BYTES,
    fetch_part,
    field_at,
    merge_tile,
    row_at,
    split_tile,
    view_of,
)
from operators.kernels.vectors import (
    address,
    all_bytes,
    all_dwords,
    all_quads,
    all_words,
    bits_of_bytes,
    bits_of_words,
    choose_bytes,
    choose_words,
    compress_words,
    count_bits,
    count_leading_zeros,
    count_trailing_zeros,
    even_words,
    expand_words,
    high_product,
    interleave_first,
    interleave_last,
    join_high,
    join_low,
    load_bytes,
    load_word,
    load_words,
    odd_of_second,
    odd_words,
    pack_dwords,
    pack_words,
    pick_byte,
    pick_byte_of_two,
    quads_as_dwords,
    shift_pair,
    store_byte,
    store_bytes,
    store_some_words,
    store_word,
    store_words,
    unpack_high_words,
    unpack_low_words,
    word_mask,
    words_as_quads,
)

LANES = 64
START = 1 << 16
"""State of a lane after its last symbol is decoded, but for its seed."""
PAIR_BYTES, PAIR_ESCAPES = 4 * LANES, 2 * LANES
"""Room that the words of a pair of columns may take: without it the encoder gives up."""
_SLOTS, _OWN_SLOTS = 4096, 128
"""Slots, and those at their end whose symbols have a table of their own."""

# A table of the encoder, by symbol: four tables of u16, the low bytes before the high ones, and one of bytes that maps
# symbols without slots to escapes.
_E_START, _E_LOW, _E_HIGH, _E_SYMBOLS = 128, 256, 384, 512
ENCODER_BYTES = 576
# A table of the decoder. By bucket: the rank of the symbol of the first slot, and the last slot that it has there.
# By slot at the end: rank. By rank: symbol, frequency, start, as in the encoder's.
_D_LIMIT, _D_OWN, _D_SYMBOL, _D_FREQUENCY, _D_START = 256, 512, 640, 704, 832
DECODER_BYTES = 960

# Scratch: whatever its alignment, the end of the stream and what a tile takes; then the scales of pairs by column
# and the last block of raw bits.
_END_BYTES, _STREAM_BYTES = PAIR_BYTES + 64, 1024
SCRATCH_BYTES = 64 + _STREAM_BYTES + FIXED_BYTES + 64
SCRATCH_BYTES_PER_COLUMN = COLUMN_BYTES + 4 + 8 * 15
"""What the kernels need of scratch: `SCRATCH_BYTES` and so much more for each column."""


# -- tables -------------------------------------------------------------------------------------


@inlined
def _canonical(frequencies: Any, t: Any, order: Any) -> None:
    """Set all symbols of a table in canonical order: frequent ones first, of equals the smallest."""
    for symbol in range(64):
        i = np.int64(symbol)
        while i > 0 and frequencies[t, order[i - 1]] < frequencies[t, symbol]:
            order[i] = order[i - 1]
            i -= 1
        order[i] = symbol


@inlined
def _put_u16(out: Any, t: Any, at: Any, value: Any) -> None:
    out[t, at] = np.uint8(value & 255)
    out[t, at + 64] = np.uint8(value >> 8)


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
    order = np.empty(64, np.int64)
    for t in range(frequencies.shape[0]):
        _canonical(frequencies, t, order)
        start = np.int64(0)
        for s in order:
            frequency = np.int64(frequencies[t, s])
            reciprocal = np.int64(0)
            if frequency != 0:
                reciprocal = min((np.int64(1) << 32) // frequency, np.int64(0xFFFFFFFF))
            _put_u16(out, t, s, frequency)
            _put_u16(out, t, _E_START + s, start)
            _put_u16(out, t, _E_LOW + s, reciprocal & 0xFFFF)
            _put_u16(out, t, _E_HIGH + s, reciprocal >> 16)
            out[t, _E_SYMBOLS + s] = np.uint8(s if frequency != 0 and s != ESCAPE else 0x80 | ESCAPE)
            start += frequency


@kernel("out")
def decoder_tables(frequencies: NDArray[np.uint16], out: NDArray[np.uint8]) -> None:
    """Set the tables that `decode_tiles` looks slots up in.

    Parameters
    ----------
    frequencies : uint16 array, shape (n_tables, 64)
        As in `encoder_tables`; symbols of frequency below 16 have at most 128 slots together.
    out : uint8 array, shape (n_tables, DECODER_BYTES)
    """
    order = np.empty(64, np.int64)
    for t in range(frequencies.shape[0]):
        _canonical(frequencies, t, order)
        start = np.int64(0)
        for bucket in range(256):
            out[t, bucket] = 0
            out[t, _D_LIMIT + bucket] = np.uint8((bucket & 15) << 4 | 15)
        for slot in range(_OWN_SLOTS):
            out[t, _D_OWN + slot] = 0
        for rank in range(64):
            s = order[rank]
            frequency = np.int64(frequencies[t, s])
            end = start + frequency
            out[t, _D_SYMBOL + rank] = np.uint8(s)
            _put_u16(out, t, _D_FREQUENCY + rank, frequency)
            _put_u16(out, t, _D_START + rank, start)
            for bucket in range((start + 15) >> 4, (end + 15) >> 4):
                out[t, bucket] = np.uint8(rank)
            if frequency != 0 and end & 15:
                out[t, _D_LIMIT + (end >> 4)] = np.uint8((end - 1) & 255)
            for slot in range(max(start, np.int64(_SLOTS - _OWN_SLOTS)), end):
                out[t, _D_OWN + slot - (_SLOTS - _OWN_SLOTS)] = np.uint8(rank)
            start = end


# -- contexts -------------------------------------------------------------------------------------


@inlined
def _columns_of(scratch: Any, view: Any, columns: Any) -> Any:
    """Return the top and the scale of each column, and the byte of the scratch where the last block goes."""
    tops = view.tops - address(scratch)
    scales = view.scratch - address(scratch) + FIXED_BYTES + COLUMN_BYTES * columns
    return (
        scratch[tops : tops + 2 * columns].view(np.uint16),
        scratch[scales : scales + 4 * columns].view(np.int32),
        scales + 4 * columns,
    )


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
def _lanes(bits: Any) -> Any:
    """Return the lanes of bits in packed order."""
    low = gather_bits(bits, np.uint64(0x00FF00FF00FF00FF))
    return low | (gather_bits(bits, np.uint64(0xFF00FF00FF00FF00)) << np.uint64(32))


# -- states ---------------------------------------------------------------------------------------


@inlined
def _load_states(states: Any) -> Any:
    """Return high and low halves of 64 states: of lanes 0 to 31, then of the others."""
    a, b = load_words(states), load_words(states + 64)
    c, d = load_words(states + 128), load_words(states + 192)
    return odd_words(a, b), even_words(a, b), odd_words(c, d), even_words(c, d)


@inlined
def _store_states(states: Any, high: Any, low: Any, high_b: Any, low_b: Any) -> None:
    store_words(states, interleave_first(low, high))
    store_words(states + 64, interleave_last(low, high))
    store_words(states + 128, interleave_first(low_b, high_b))
    store_words(states + 192, interleave_last(low_b, high_b))


@inlined
def _take_seeds(states: Any, n_seeded: Any, seeds: Any) -> None:
    """Start from the seeds, ``n_seeded / 2`` words at the address `seeds`."""
    for lane in range(states.size):
        states[lane] = np.uint32(START + (load_word(seeds + 2 * lane) if 2 * lane < n_seeded else 0))


@inlined
def _put_seeds(states: Any, n_seeded: Any, seeds: Any) -> Any:
    """Write the seeds in the last states; return whether these are those of a writer."""
    for lane in range(states.size):
        seed = np.int64(states[lane]) ^ START
        if 2 * lane < n_seeded:
            store_word(seeds + 2 * lane, np.uint16(seed & 0xFFFF))
            seed >>= 16
        if seed != 0:
            return False
    return True


@inlined
def _pick_words(table: Any, places: Any) -> Any:
    """Return the words at 64 places of a table: a permutation of bytes is a third of the work of one of words."""
    low, high = pick_byte(load_bytes(table), places), pick_byte(load_bytes(table + 64), places)
    return join_low(low, high), join_high(low, high)


# -- encoding -------------------------------------------------------------------------------------


@inlined
def _quotients(x: Any, r: Any) -> Any:
    """Return ``x * r >> 32`` of 16 numbers of 32 bits each."""
    half, low = all_quads(32), all_quads(0xFFFFFFFF)
    even = (words_as_quads(x) & low) * (words_as_quads(r) & low)
    odd = (words_as_quads(x) >> half) * (words_as_quads(r) >> half)
    return odd_of_second(quads_as_dwords(even >> half), quads_as_dwords(odd))


@inlined
def _encode_half(high: Any, low: Any, frequency: Any, start: Any, r_low: Any, r_high: Any, at: Any) -> Any:
    """Encode a symbol in each of 32 lanes; return their states and the stream's new start."""
    # A state of f << 20 or more gives up its low half.
    full = high >= (frequency << all_words(4))
    n = count_bits(bits_of_words(full))
    at -= 2 * np.int64(n)
    store_some_words(word_mask((np.uint64(1) << n) - np.uint64(1)), at, compress_words(low, all_words(0), full))
    low, high = choose_words(full, high, low), choose_words(full, all_words(0), high)
    q = _quotients(unpack_low_words(low, high), unpack_low_words(r_low, r_high))
    q_b = _quotients(unpack_high_words(low, high), unpack_high_words(r_low, r_high))
    # The quotient is below 2**20, and right or one too small: then the remainder is f or more.
    q_low = pack_dwords(q & all_dwords(0xFFFF), q_b & all_dwords(0xFFFF))
    high = pack_dwords(q >> all_dwords(4), q_b >> all_dwords(4))
    remainder = low - q_low * frequency
    slot = remainder + start
    slot = choose_words(remainder >= frequency, slot + (all_words(_SLOTS) - frequency), slot)
    low = (q_low << all_words(12)) + slot
    return choose_words(low < slot, high + all_words(1), high), low, at


@inlined
def _encode_column(
    view: Any,
    rows: Any,
    column: Any,
    table: Any,
    high: Any,
    low: Any,
    high_b: Any,
    low_b: Any,
    at: Any,
    escapes: Any,
) -> Any:
    """Encode a column of a tile in 64 lanes; return their states, and the new starts of stream and escapes."""
    symbols = pick_byte(load_bytes(table + _E_SYMBOLS), load_bytes(view.symbols + 64 * column))
    lanes = bits_of_bytes(symbols >= all_bytes(0x80))
    if lanes:
        lanes = _lanes(lanes)
        while lanes:
            j = np.int64(63) - np.int64(count_leading_zeros(lanes))
            lanes ^= np.uint64(1) << np.uint64(j)
            escapes -= 2
            store_word(escapes, np.uint16(field_at(view, row_at(view, rows, j), column)))
    frequency, frequency_b = _pick_words(table, symbols)
    start, start_b = _pick_words(table + _E_START, symbols)
    r_low, r_low_b = _pick_words(table + _E_LOW, symbols)
    r_high, r_high_b = _pick_words(table + _E_HIGH, symbols)
    high_b, low_b, at = _encode_half(high_b, low_b, frequency_b, start_b, r_low_b, r_high_b, at)
    high, low, at = _encode_half(high, low, frequency, start, r_low, r_high, at)
    return high, low, high_b, low_b, at, escapes


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
        `at` is -1 where there may be too little room for a pair of columns.
    """
    two = states.size == 2 * LANES
    base = (address(scratch) + 63) & ~63
    view = view_of(words, 0, flips, columns, geometry, base + _STREAM_BYTES)
    tops, scales, _ = _columns_of(scratch, view, columns)
    _pair_scales(column_order, column_scales, scales)
    block = 8 * view.raw * columns
    if is_last:
        _take_seeds(states, 0, 0)
    start, unused = address(stream), address(escapes)
    p, e = start + at, unused + 2 * n_escapes
    group = address(states)
    odd_group = group + 4 * (states.size - LANES)
    for tile in range(tile_scales.size - 1, -1, -1):
        scale = np.int64(tile_scales[tile])
        its_rows, out = address(rows) + 4 * LANES * tile, address(raw) + block * tile
        _set_tops(scale, scales, geometry, tops)
        split_tile(view, its_rows, out)
        if is_last and tile == tile_scales.size - 1:
            n_seeded = min(2 * states.size, block)
            _take_seeds(states, n_seeded, out + block - n_seeded)
        high, low, high_b, low_b = _load_states(group)
        odd_high, odd_low, odd_high_b, odd_low_b = _load_states(odd_group)
        for pair in range((columns >> 1) - 1, -1, -1):
            if p < start + PAIR_BYTES or e < unused + 2 * PAIR_ESCAPES:
                return np.int64(-1), (e - unused) >> 1
            if tile != 0:
                fetch_part(view, its_rows - 4 * LANES, out - block, pair, False)
            column = np.int64(column_order[2 * pair])
            table = address(tables) + ENCODER_BYTES * _table(scale, column, column_scales, levels, geometry[4])
            if not two:
                odd_high, odd_low, odd_high_b, odd_low_b = high, low, high_b, low_b
            second = np.int64(column_order[2 * pair + 1])
            odd_high, odd_low, odd_high_b, odd_low_b, p, e = _encode_column(
                view, its_rows, second, table, odd_high, odd_low, odd_high_b, odd_low_b, p, e
            )
            if not two:
                high, low, high_b, low_b = odd_high, odd_low, odd_high_b, odd_low_b
            high, low, high_b, low_b, p, e = _encode_column(
                view, its_rows, column, table, high, low, high_b, low_b, p, e
            )
        if two:
            _store_states(odd_group, odd_high, odd_low, odd_high_b, odd_low_b)
        _store_states(group, high, low, high_b, low_b)
    return p - start, (e - unused) >> 1


# -- decoding -------------------------------------------------------------------------------------


@inlined
def _decode_half(high: Any, low: Any, frequency: Any, start: Any, at: Any) -> Any:
    """Take a symbol from each of 32 lanes, and words for those that run empty."""
    remainder = (low & all_words(_SLOTS - 1)) - start
    q_low = shift_pair(high, low, all_words(4))
    high = high_product(frequency, q_low) + frequency * (high >> all_words(12))
    low = frequency * q_low + remainder
    high = choose_words(low < remainder, high + all_words(1), high)
    empty = high == all_words(0)
    return (
        choose_words(empty, low, high),
        expand_words(load_words(at), low, empty),
        at + 2 * np.int64(count_bits(bits_of_words(empty))),
    )


@inlined
def _by_bucket(table: Any, buckets: Any) -> Any:
    """Return the bytes of a table of 256."""
    return choose_bytes(
        buckets >= all_bytes(128),
        pick_byte_of_two(load_bytes(table + 128), buckets, load_bytes(table + 192)),
        pick_byte_of_two(load_bytes(table), buckets, load_bytes(table + 64)),
    )


@inlined
def _decode_column(view: Any, column: Any, table: Any, high: Any, low: Any, high_b: Any, low_b: Any, at: Any) -> Any:
    """Decode a column of a tile from 64 lanes; return their states, the stream's place, and bits of escapes."""
    # A slot has 12 bits: its bucket is the upper 8, which have 4 in common with the lower 8.
    slots = pack_words(low & all_words(255), low_b & all_words(255))
    buckets = pack_words((low >> all_words(4)) & all_words(255), (low_b >> all_words(4)) & all_words(255))
    ranks = _by_bucket(table, buckets)
    ranks = choose_bytes(slots > _by_bucket(table + _D_LIMIT, buckets), ranks + all_bytes(1), ranks)
    own = pick_byte_of_two(load_bytes(table + _D_OWN), slots, load_bytes(table + _D_OWN + 64))
    ranks = choose_bytes(buckets >= all_bytes((_SLOTS - _OWN_SLOTS) >> 4), own, ranks)
    symbols = pick_byte(load_bytes(table + _D_SYMBOL), ranks)
    store_bytes(view.symbols + 64 * column, symbols)
    frequency, frequency_b = _pick_words(table + _D_FREQUENCY, ranks)
    start, start_b = _pick_words(table + _D_START, ranks)
    high, low, at = _decode_half(high, low, frequency, start, at)
    high_b, low_b, at = _decode_half(high_b, low_b, frequency_b, start_b, at)
    return high, low, high_b, low_b, at, bits_of_bytes(symbols == all_bytes(ESCAPE))


@inlined
def _take_escapes(view: Any, rows: Any, column: Any, bits: Any, escapes: Any) -> Any:
    """Put the next escapes where `merge_tile` looks for them; return the address of the one after."""
    lanes = _lanes(bits)
    while lanes:
        j = np.int64(count_trailing_zeros(lanes))
        lanes &= lanes - np.uint64(1)
        row = row_at(view, rows, j)
        field = np.int64(load_word(escapes)) << view.low
        if view.n_bytes == 1:
            store_byte(row + column, np.uint8(field))
        else:  # above the lower half of a word of 4 bytes
            store_word(row + (column + 1) * view.n_bytes - 2, np.uint16(field))
        escapes += 2
    return escapes


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
    lows : uint8 array
        The bytes of the lower halves of words of 32 bits; not looked at where words are smaller.
    words : uint8, uint16 or uint32 array, shape (n,)
        All words of the rows are written; of 32 bits what is decoded is the upper half.
    is_last : bool
        Whether the last tile is the last of all: the end of its block is taken from the states.

    Returns
    -------
    at, n_escapes : int
        `at` is -1 where the stream or the escapes end too soon, or the last states are not those of a writer.
    """
    two = states.size == 2 * LANES
    base = (address(scratch) + 63) & ~63
    view = view_of(words, address(lows), flips, columns, geometry, base + _STREAM_BYTES)
    tops, scales, last_at = _columns_of(scratch, view, columns)
    _pair_scales(column_order, column_scales, scales)
    block = 8 * view.raw * columns
    if is_last and tile_scales.size == 0 and not _put_seeds(states, 0, 0):
        return np.int64(-1), n_escapes
    p, e = address(payload) + at, address(escapes) + 2 * n_escapes
    no_more = address(escapes) + 2 * escapes.size
    # A pair takes at most 256 bytes and looks at 64 more: what is too near the end moves to the scratch, once.
    safe, moved = address(payload) + end - _END_BYTES, False
    group = address(states)
    odd_group = group + 4 * (states.size - LANES)
    for tile in range(tile_scales.size):
        scale = np.int64(tile_scales[tile])
        its_rows, source = address(rows) + 4 * LANES * tile, address(payload) + raw_at + block * tile
        high, low, high_b, low_b = _load_states(group)
        odd_high, odd_low, odd_high_b, odd_low_b = _load_states(odd_group)
        for pair in range(columns >> 1):
            if p > safe:
                if moved:
                    return np.int64(-1), n_escapes
                moved = True
                n = address(payload) + end - p
                copy_bytes(scratch, base - address(scratch), payload, end - n, n)
                p, safe = base, base + n
            fetch_part(view, its_rows, source, pair, True)
            column, second = np.int64(column_order[2 * pair]), np.int64(column_order[2 * pair + 1])
            table = address(tables) + DECODER_BYTES * _table(scale, column, column_scales, levels, geometry[4])
            if not two:
                high, low, high_b, low_b = odd_high, odd_low, odd_high_b, odd_low_b
            high, low, high_b, low_b, p, escaped = _decode_column(view, column, table, high, low, high_b, low_b, p)
            if not two:
                odd_high, odd_low, odd_high_b, odd_low_b = high, low, high_b, low_b
            odd_high, odd_low, odd_high_b, odd_low_b, p, odd_escaped = _decode_column(
                view, second, table, odd_high, odd_low, odd_high_b, odd_low_b, p
            )
            if escaped | odd_escaped:
                if e + 2 * np.int64(count_bits(escaped) + count_bits(odd_escaped)) > no_more:
                    return np.int64(-1), n_escapes
                e = _take_escapes(view, its_rows, column, escaped, e)
                e = _take_escapes(view, its_rows, second, odd_escaped, e)
        if two:
            _store_states(group, high, low, high_b, low_b)
        _store_states(odd_group, odd_high, odd_low, odd_high_b, odd_low_b)
        if moved and p > safe:
            return np.int64(-1), n_escapes
        if is_last and tile == tile_scales.size - 1:
            n_seeded, source = min(2 * states.size, block), address(scratch) + last_at
            if not _put_seeds(states, n_seeded, source + block - n_seeded):
                return np.int64(-1), n_escapes
            copy_bytes(scratch, last_at, payload, raw_at + block * tile, block - n_seeded)
        _set_tops(scale, scales, geometry, tops)
        merge_tile(view, its_rows, source)
    left = safe - p if moved else address(payload) + end - p
    return end - left, (e - address(escapes)) >> 1


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
