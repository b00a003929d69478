"""A literal in tiles as it is read (`operators.literals.tiled`): what all coders of tiles have in common.

Each of them reads a payload in one call, which takes as long as its words are many: sections, contexts and tables are
found in compiled code. What they need lies in the caller's scratch, one area after the other.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from operators.kernels.bits import unpack_any, unpack_u16
from operators.kernels.jit import inlined
from operators.kernels.memory import copy_bytes, item_bytes, load_u16, load_u64
from operators.kernels.scales import SYMBOLS, TILE_ROWS
from operators.kernels.tile_heads import take_frequencies
from operators.kernels.tile_plans import take_plan

COLUMNS, TILES, TAIL_COLUMNS, REST_WORDS, N_TABLES, SEED_BYTES, LANES = range(6, 13)
"""What the numbers of a literal have after its geometry (`operators.literals.tiled`)."""
HEAD_BYTES = 8
"""Escapes, and the bytes of their section."""
SLACK = 64
DONE, COMPRESSED, NO_SCALES, NO_TABLES, TOO_SHORT, OTHER_END = range(6)
"""What a decoder says, with two numbers: of `COMPRESSED` where the escapes are, of `TOO_SHORT` the bytes missed."""
_ALIGN = 64


class Contexts(NamedTuple):
    """What tiles and their columns are coded in.

    Attributes
    ----------
    rows, tiles, column_order, column_scales : int32 arrays
        Numbers of the rows of tiles, scales of tiles, numbers and scales of columns.
    levels, flips, used : uint8 arrays
        Of columns, and whether a table is taken.
    tail : int
        Scale of what has no rows.
    bit : int
        The one of the payload's head after it, or -1 where there is no such head.
    end : int
        Byte of the scratch behind all this.
    """

    rows: Any
    tiles: Any
    column_order: Any
    column_scales: Any
    levels: Any
    flips: Any
    used: Any
    tail: Any
    bit: Any
    end: Any


class Sections(NamedTuple):
    """Where the sections of a payload start, in their order."""

    raw_at: Any
    rest_at: Any
    states_at: Any
    escapes_at: Any
    stream_at: Any


def scratch_bytes(numbers: list[int]) -> int:
    """Return the bytes of scratch that a literal without escapes takes beside tables and tiles."""
    rows, columns = TILE_ROWS * numbers[TILES], numbers[COLUMNS] + numbers[TAIL_COLUMNS]
    of_tables = (2 * SYMBOLS + 1) * numbers[N_TABLES] + 4 * numbers[LANES]
    return 2 * SLACK + 9 * rows + 10 * columns + of_tables + 4 * TILE_ROWS + 16 * _ALIGN


@inlined
def after(at: Any, n_bytes: Any) -> Any:
    """Return where the area after one of `n_bytes` begins."""
    return (at + n_bytes + _ALIGN - 1) & ~(_ALIGN - 1)


@inlined
def _numbers(scratch: Any, at: Any, n: Any) -> Any:
    return scratch[at : at + 4 * n].view(np.int32)


@inlined
def n_escapes_of(payload: Any) -> Any:
    """Return the number of escapes of a payload of `HEAD_BYTES` at least."""
    return np.int64(load_u64(payload, np.uint64(0)) & np.uint64(0xFFFFFFFF))


@inlined
def contexts_of(payload: Any, numbers: Any, scratch: Any) -> Any:
    """Read scales and signs; return them and what follows from them."""
    columns, tiles, n_tables = numbers[COLUMNS], numbers[TILES], numbers[N_TABLES]
    n_rows = TILE_ROWS * tiles
    scales_at = after(np.int64(0), 2 * (n_escapes_of(payload) + SLACK))
    rows_at = after(scales_at, 4 * n_rows)
    tiles_at = after(rows_at, 4 * n_rows)
    order_at = after(tiles_at, 4 * tiles)
    columns_at = after(order_at, 4 * columns)
    levels_at = after(columns_at, 4 * columns)
    flips_at = levels_at + columns
    used_at = flips_at + columns
    scales, rows = _numbers(scratch, scales_at, n_rows), _numbers(scratch, rows_at, n_rows)
    tile_scales, order = _numbers(scratch, tiles_at, tiles), _numbers(scratch, order_at, columns)
    column_scales = _numbers(scratch, columns_at, columns)
    levels, flips = scratch[levels_at:flips_at], scratch[flips_at:used_at]
    used = scratch[used_at : used_at + n_tables]
    bit, tail = take_plan(
        payload[HEAD_BYTES:], numbers, scales, column_scales, levels, flips, rows, tile_scales, order, used
    )  # fmt: skip
    end = after(used_at, n_tables)
    return Contexts(rows, tile_scales, order, column_scales, levels, flips, used, tail, bit, end)


@inlined
def tail_contexts(numbers: Any, contexts: Any, scratch: Any, at: Any) -> Any:
    """Return the contexts of the tile made of what is left: of one scale, in the order of the columns."""
    columns = numbers[TAIL_COLUMNS]
    rows, tiles = _numbers(scratch, at, TILE_ROWS), _numbers(scratch, at + 4 * TILE_ROWS, 1)
    order_at = after(at, 4 * TILE_ROWS + 4)
    zeros_at = after(order_at, 4 * columns)
    end = after(zeros_at, 4 * columns)
    order, zeros = _numbers(scratch, order_at, columns), _numbers(scratch, zeros_at, columns)
    for i in range(TILE_ROWS):
        rows[i] = i
    tiles[0] = contexts.tail
    for c in range(columns):
        order[c] = c
        zeros[c] = 0
    even = scratch[zeros_at : zeros_at + columns]
    return Contexts(rows, tiles, order, zeros, even, even, contexts.used, contexts.tail, contexts.bit, end)


@inlined
def block_bytes(numbers: Any) -> Any:
    """Return the raw bytes of a column of a tile."""
    return 8 * (numbers[0] + (1 if numbers[3] else 0))


@inlined
def sections_of(payload: Any, numbers: Any, n_head: Any, word_bytes: Any) -> Any:
    """Return where sections start of a literal whose contexts and tables take `n_head` bytes."""
    raw_at = HEAD_BYTES + n_head
    n_columns = numbers[TILES] * numbers[COLUMNS] + numbers[TAIL_COLUMNS]
    rest_at = raw_at + block_bytes(numbers) * n_columns - numbers[SEED_BYTES]
    states_at = rest_at + numbers[REST_WORDS] * word_bytes
    escapes_at = states_at + 4 * numbers[LANES]
    escape_bytes = np.int64(load_u64(payload, np.uint64(0)) >> np.uint64(32))
    return Sections(raw_at, rest_at, states_at, escapes_at, escapes_at + escape_bytes)


@inlined
def take_escapes(payload: Any, sections: Any, numbers: Any, scratch: Any) -> Any:
    """Set the fields of escapes at the start of the scratch where they are not compressed; return whether they are."""
    n, field_bits = n_escapes_of(payload), numbers[2]
    n_bytes = (n * field_bits + 7) >> 3
    if sections.stream_at - sections.escapes_at != n_bytes:
        return False
    if field_bits == 16:
        copy_bytes(scratch, 0, payload, sections.escapes_at, n_bytes)
        return True
    section = payload[sections.escapes_at : sections.stream_at]
    done = unpack_u16(section, field_bits, scratch[: 2 * n])
    unpack_any(section, field_bits, done, scratch[: 2 * n].view(np.uint16))
    return True


@inlined
def put_rest(payload: Any, at: Any, numbers: Any, lows: Any, words: Any) -> None:
    """Set the last words, which are stored as they are from byte `at` on."""
    n = numbers[REST_WORDS]
    for i in range(words.size - n, words.size):
        if item_bytes(words) == 1:
            words[i] = payload[at]
            at += 1
        else:
            word = np.uint32(load_u16(payload, np.uint64(at)))
            if item_bytes(words) == 4:
                word = np.uint32(np.uint32(word << np.uint32(16)) | np.uint32(load_u16(lows, np.uint64(2 * i))))
            words[i] = words.dtype.type(word)
            at += 2


@inlined
def lane_tables(decoder_tables: Any, table_bytes: Any, section: Any, contexts: Any, n_tables: Any, scratch: Any) -> Any:
    """Read tables of frequencies and prepare those of a decoder; see `decode_payload`."""
    at = after(contexts.end, 2 * SYMBOLS * n_tables)
    end = after(at, table_bytes * n_tables)
    frequencies = scratch[contexts.end : contexts.end + 2 * SYMBOLS * n_tables].view(np.uint16)
    frequencies = frequencies.reshape((n_tables, SYMBOLS))
    tables = scratch[at : at + table_bytes * n_tables].reshape((n_tables, table_bytes))
    n_head = take_frequencies(section, contexts.bit, contexts.used, frequencies)
    if n_head >= 0:
        decoder_tables(frequencies, tables)
    return n_head, tables, end


@inlined
def decode_payload(
    take_tables: Any,
    decode_tiles: Any,
    payload: Any,
    numbers: Any,
    has_escapes: Any,
    lows: Any,
    scratch: Any,
    words: Any,
) -> Any:
    """Decode a literal.

    Parameters
    ----------
    take_tables : callable
        Takes the payload behind its first bytes, contexts, the number of tables, and the scratch. Returns how many
        bytes contexts and tables take or -1, the tables as `decode_tiles` wants them, and where the scratch is free.
    decode_tiles : callable
        As `operators.kernels.tiles.decode_tiles`.
    payload : uint8 array
        `HEAD_BYTES` at least; any bytes, of which the number of escapes is at most that of words.
    numbers : int64 array
        Of the literal: low_bits, fraction_bits, field_bits, signed, tables, scales; then as said at `COLUMNS`.
    has_escapes : bool
        Whether the fields of escapes are at the start of the scratch already.
    lows, words : arrays
        As for `decode_tiles`.
    scratch : uint8 array
        `scratch_bytes`, and behind them what tables and `decode_tiles` take.

    Returns
    -------
    tuple of int
        `DONE`, or what is wrong. With `COMPRESSED` the escapes of bytes ``[start, stop)`` are the caller's to
        decompress: nothing is decoded then, and it is to call again.
    """
    contexts = contexts_of(payload, numbers, scratch)
    if contexts.bit < 0:
        return NO_SCALES, np.int64(0), np.int64(0)
    n_head, tables, states_at = take_tables(payload[HEAD_BYTES:], contexts, numbers[N_TABLES], scratch)
    if n_head < 0:
        return NO_TABLES, np.int64(0), np.int64(0)
    sections = sections_of(payload, numbers, n_head, 1 if item_bytes(words) == 1 else 2)
    if sections.stream_at > payload.size:
        return TOO_SHORT, sections.stream_at, np.int64(0)
    if not has_escapes and not take_escapes(payload, sections, numbers, scratch):
        return COMPRESSED, sections.escapes_at, sections.stream_at
    n_escapes = n_escapes_of(payload)
    escapes = scratch[: 2 * (n_escapes + SLACK)].view(np.uint16)
    states_end = states_at + 4 * numbers[LANES]
    copy_bytes(scratch, states_at, payload, sections.states_at, 4 * numbers[LANES])
    states = scratch[states_at:states_end].view(np.uint32)
    tail = tail_contexts(numbers, contexts, scratch, after(states_end, 0))
    of_coder = scratch[tail.end :]
    at, n_used, raw_at, first = sections.stream_at, np.int64(0), sections.raw_at, np.int64(0)
    columns, following = numbers[COLUMNS], numbers[TAIL_COLUMNS]
    for _ in range(2):  # whole tiles, and the one made of what is left
        if contexts.tiles.size and columns and at >= 0:
            at, n_used = decode_tiles(
                payload, columns, contexts.rows, contexts.tiles, contexts.column_order, contexts.column_scales,
                contexts.levels, contexts.flips, numbers, tables, raw_at, at, payload.size, states, escapes, n_used,
                of_coder, lows[2 * first :], words[first:], following == 0,
            )  # fmt: skip
        n_columns = contexts.tiles.size * columns
        raw_at += block_bytes(numbers) * n_columns
        first += TILE_ROWS * n_columns
        contexts, columns, following = tail, following, np.int64(0)
    if at != payload.size or n_used != n_escapes:
        return OTHER_END, np.int64(0), np.int64(0)
    put_rest(payload, sections.rest_at, numbers, lows, words)
    return DONE, np.int64(0), np.int64(0)
