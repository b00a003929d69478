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
    STREAMS,
    canonical_codes,
    decode_block,
    decoding_tables,
    encoding_table,
)
from operators.kernels.jit import inlined, kernel
from operators.kernels.memory import copy_bytes, item_bytes, load_u64, store_u64
from operators.kernels.tile_heads import take_lengths
from operators.kernels.tile_payloads import after, decode_payload
from operators.kernels.tile_planes import (
    BIT_7,
    COLUMN_BYTES,
    EACH,
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

MAX_LENGTH = 12
"""Bits of the longest code."""
GROUP_COLUMNS = 1 << 13
"""Columns of the tiles of a group, unless one tile has more: its symbols stay in the cache."""
SIZE_BYTES = 3
"""Of a stream, in the directory of its group."""
ENCODER_BYTES = 8 * (64 * 64 + 2)
"""Of a table: an entry as of `operators.kernels.huffman` for each two symbols, then the range of those with a code."""
LOOK_UP_BITS = 11
"""Bits that index the look-ups of a decoder: tables take turns, and smaller ones stay in the cache."""
DECODER_BYTES = (8 << LOOK_UP_BITS) + (4 << MAX_LENGTH)
_ENTRIES = ENCODER_BYTES // 8
_BIT_6 = np.uint64(ESCAPE + 1) * EACH
_LOW_6, _LENGTH, _WHOLE_BYTES = np.uint64(63), np.uint64(0xFFFFFFFF), ~np.uint64(7)
_FIRSTS, _SECONDS = np.uint64(0x003F003F003F003F), np.uint64(0x0FC00FC00FC00FC0)
_MANY_BYTES = 8 << LOOK_UP_BITS
_MAX_TABLES = 40
_GROUP_BYTES = ROWS * GROUP_COLUMNS
SCRATCH_BYTES = FIXED_BYTES + 3 * _GROUP_BYTES + 256
SCRATCH_BYTES_PER_COLUMN = COLUMN_BYTES + 3 * ROWS
# Symbols by table, and then either streams of one table, up to two bytes a symbol, or a raw block.


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
    single = np.empty(64, np.uint64)
    for table in range(lengths.shape[0]):
        live = np.flatnonzero(lengths[table])
        if live.size:
            lengths_of = lengths[table][live].astype(np.int64)
            codes = np.empty_like(lengths_of)
            canonical_codes(lengths_of, codes)
            single[:] = 0  # also of an escape without a code, which no symbol has
            encoding_table(live, lengths_of, codes, single)
            for symbol in range(ESCAPE):
                if lengths[table, symbol] == 0:
                    single[symbol] = single[ESCAPE]
            of_table = entries[_ENTRIES * table : _ENTRIES * (table + 1)]
            for second in range(64):
                above = single[second]
                for first in range(64):
                    code = ((single[first] & ~_LOW_6) >> (above & _LOW_6)) | (above & ~_LOW_6)
                    of_table[64 * second + first] = code | ((single[first] & _LOW_6) + (above & _LOW_6))
            of_table[64 * 64], of_table[64 * 64 + 1] = range_of(lengths[table], live[np.argmin(lengths_of)])


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
def _set_places(column_order: Any, pair_tables: Any, by_table: Any, following: Any, places: Any) -> None:
    """Give each column of a tile the next place of its table; `following` says which that is."""
    for v in range(column_order.size):
        table = np.int64(pair_tables[v >> 1])
        places[column_order[v]] = by_table + following[table]
        following[table] += ROWS


@inlined
def _is_outside(scratch: Any, place: Any, low: Any, high: Any) -> Any:
    """Return whether one of the 64 symbols at `place` is outside a range."""
    bits = np.uint64(0)
    for g in range(8):
        bits |= outside(load_u64(scratch, np.uint64(place + 8 * g)), low, high)
    return (bits & BIT_7) != np.uint64(0)


@inlined
def _escaped(scratch: Any, place: Any) -> Any:
    """Return bit 6 of those of the eight symbols at `place` that are escapes, and other bits below."""
    return load_u64(scratch, np.uint64(place)) + EACH


@inlined
def _has_escape(scratch: Any, place: Any) -> Any:
    """Return whether one of the 64 symbols at `place` is an escape."""
    bits = np.uint64(0)
    for g in range(8):
        bits |= _escaped(scratch, place + 8 * g)
    return (bits & _BIT_6) != np.uint64(0)


@inlined
def _make_pairs(scratch: Any, start: Any, end: Any) -> None:
    """Make ``first | second << 6`` of each two symbols."""
    for at in range(start, end, 8):
        eight = load_u64(scratch, np.uint64(at))
        store_u64(scratch, np.uint64(at), (eight & _FIRSTS) | ((eight >> np.uint64(2)) & _SECONDS))


@inlined
def _append(pairs: Any, i: Any, table: Any, held: Any, n: Any, out: Any, at: Any) -> Any:
    """Append the codes of two pairs, at most 48 bits, to the `n` bits of a stream that starts at byte `at`.

    The last ones are at the top of `held`, and those that make no whole byte are stored again with the next. The
    length in the low bits of an entry falls out when what is held is moved down.
    """
    whole = n & _WHOLE_BYTES
    entry = table[pairs[i]]
    held = (held >> (entry & _LOW_6)) | entry
    n += entry & _LENGTH
    entry = table[pairs[i + np.uint64(1)]]
    held = (held >> (entry & _LOW_6)) | entry
    n += entry & _LENGTH
    store_u64(out, at + (whole >> np.uint64(3)), held >> ((whole - n) & _LOW_6))
    return held, n


@inlined
def _encode_streams(pairs: Any, table: Any, out: Any, at: Any, workspace: Any, sizes: Any) -> Any:
    """Write the streams of pairs from byte `at` of `out` on, two at a time; return the byte after them.

    Parameters
    ----------
    pairs : uint16 array
        A multiple of eight.
    table : uint64 array
        Of `encoder_tables`.
    out, workspace : uint8 arrays
        With room for two bytes a symbol.
    sizes : int64 array, shape (STREAMS,)
        Set to the bytes of the streams.
    """
    quarter = pairs.size // STREAMS
    for k in range(0, STREAMS, 2):
        a, b = pairs[k * quarter : (k + 1) * quarter], pairs[(k + 1) * quarter : (k + 2) * quarter]
        held_a, held_b, n_a, n_b = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        for i in range(np.uint64(0), np.uint64(quarter), np.uint64(2)):
            held_a, n_a = _append(a, i, table, held_a, n_a, out, np.uint64(at))
            held_b, n_b = _append(b, i, table, held_b, n_b, workspace, np.uint64(0))
        sizes[k], sizes[k + 1] = (np.int64(n_a) + 7) >> 3, (np.int64(n_b) + 7) >> 3
        at += sizes[k]
        copy_bytes(out, at, workspace, 0, sizes[k + 1])
        at += sizes[k + 1]
    return at


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
    tops, flipped, places, _, pair_tables, by_table = areas(scratch, columns)
    top_bit = 8 * item_bytes(words) - 1
    set_flips(flips, top_bit + 1, flipped)
    codes = tables.reshape(-1).view(np.uint64)
    starts, following = np.empty(_MAX_TABLES + 1, np.int64), np.empty(_MAX_TABLES + 1, np.int64)
    sizes = np.empty(STREAMS, np.int64)
    step = max(1, GROUP_COLUMNS // columns)
    for group in range(0, tile_scales.size, step):
        of_group = tile_scales[group : group + step]
        _set_starts(of_group, column_order, column_scales, levels, geometry, pair_tables, tops, starts)
        following[:] = starts
        for i in range(group, group + of_group.size):
            set_contexts(tile_scales[i], column_order, column_scales, levels, geometry, tops, pair_tables)
            _set_places(column_order, pair_tables, by_table, following, places)
            split_tile(words, columns, rows, i, geometry, scratch, places, raw)
            for v in range(columns):
                column, first = np.int64(column_order[v]), _ENTRIES * np.int64(pair_tables[v >> 1])
                place = np.int64(places[column])
                if _is_outside(scratch, place, codes[first + 64 * 64], codes[first + 64 * 64 + 1]):
                    if n_escapes + ROWS > escapes.size:
                        return -1, n_escapes
                    for j in range(ROWS):
                        symbol = np.int64(scratch[place + j])
                        if codes[first + symbol] == codes[first + ESCAPE]:
                            word = words[np.int64(rows[ROWS * i + j]) * columns + column]
                            escapes[n_escapes] = np.uint16(field_of(word, flipped[column], geometry, top_bit))
                            n_escapes += 1
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
                _make_pairs(scratch, by_table + starts[table], by_table + starts[table + 1])
                pairs = scratch[by_table + starts[table] : by_table + starts[table + 1]].view(np.uint16)
                of_table = codes[_ENTRIES * table : _ENTRIES * (table + 1)]
                at = _encode_streams(pairs, of_table, stream, at, workspace, sizes)
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
    lows: NDArray[np.uint8],
    words: NDArray[Any],
) -> tuple[int, int]:
    """Decode tiles; return the byte after their groups, and the next escape.

    Parameters
    ----------
    payload, raw_at, escapes, n_escapes, scratch, lows, words
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
    tops, flipped, places, _, pair_tables, by_table = areas(scratch, columns)
    top_bit = top_bit_of(words)
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
            set_contexts(tile_scales[i], column_order, column_scales, levels, geometry, tops, pair_tables)
            _set_places(column_order, pair_tables, by_table, starts, places)
            # A copy, as memory far away is read faster in one go than by rows of its blocks.
            copy_bytes(scratch, block_at, payload, raw_at + i * block_bytes, block_bytes)
            merge_tile(words, lows, columns, rows, i, geometry, scratch, places, block_at)
            for v in range(columns):
                column = np.int64(column_order[v])
                place = np.int64(places[column])
                if not _has_escape(scratch, place):
                    continue
                for g in range(0, ROWS, 8):
                    if not _escaped(scratch, place + g) & _BIT_6:
                        continue
                    for j in range(g, g + 8):
                        if scratch[place + j] == ESCAPE:
                            if n_escapes == escapes.size:
                                return -1, n_escapes
                            here = np.int64(rows[ROWS * i + j]) * columns + column
                            coded, flip = coded_of(words, here), flipped[column]
                            word = with_field(coded, escapes[n_escapes], flip, geometry, top_bit)
                            put_coded(words, lows, here, word)
                            n_escapes += 1
    return at, n_escapes


@inlined
def _take_tables(section: Any, contexts: Any, n_tables: Any, scratch: Any) -> Any:
    at = after(contexts.end, 64 * n_tables)
    end = after(at, DECODER_BYTES * n_tables)
    lengths = scratch[contexts.end : contexts.end + 64 * n_tables].reshape((n_tables, 64))
    tables = scratch[at : at + DECODER_BYTES * n_tables].reshape((n_tables, DECODER_BYTES))
    n_head = take_lengths(section, contexts.bit, contexts.used, lengths)
    if n_head >= 0 and decoder_tables(lengths, tables) < 0:
        n_head = np.int64(-1)
    return n_head, tables, end


@inlined
def _decode_tiles(
    payload: Any, columns: Any, rows: Any, tile_scales: Any, column_order: Any, column_scales: Any, levels: Any,
    flips: Any, geometry: Any, tables: Any, raw_at: Any, at: Any, end: Any, _: Any, escapes: Any, n_escapes: Any,
    scratch: Any, lows: Any, words: Any, __: Any,
) -> Any:  # fmt: skip
    """Decode tiles: there are no states, and the last tile is as the others."""
    return decode_tiles(
        payload, columns, rows, tile_scales, column_order, column_scales, levels, flips, geometry, tables, raw_at, at,
        end, escapes, n_escapes, scratch, lows, words,
    )  # fmt: skip


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
    return decode_payload(_take_tables, _decode_tiles, payload, numbers, has_escapes, lows, scratch, words)
