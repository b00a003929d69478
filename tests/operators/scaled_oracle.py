"""The encoding `scaled` written for reading: plain Python, one word and one lane at a time.

It is the meaning of the format; the fast kernels must give these bytes exactly. Nothing here imports a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.operators.oracle import canonical

LANES = 64
ROWS = 64
ESCAPE = 63
LOWEST = 1 << 16
"""A state lies from here to 2**32; every lane ends here plus its seed."""

Integers = NDArray[np.int64]
Table = tuple[int, ...]
"""Frequency of each of the 64 symbols, all zero for a table that no pair of columns takes."""


@dataclass(frozen=True)
class Geometry:
    """How the bits of a word are used; `groups` is that of the whole literal."""

    width_bits: int
    low_bits: int
    fraction_bits: int
    signed: int
    tables: int
    groups: int

    @property
    def field_bits(self) -> int:
        return self.width_bits - self.low_bits - (self.signed > 0)

    @property
    def raw_bits(self) -> int:
        return self.low_bits + (self.signed > 0)

    @property
    def n_tables(self) -> int:
        return (5 if self.signed == 2 else 1) << self.tables

    def array(self) -> Integers:
        """As the kernels take it."""
        return np.array([self.low_bits, self.fraction_bits, self.field_bits, self.signed, self.tables])


def groups_of(n_words: int) -> int:
    return 2 if n_words >= 1 << 17 else 1


@dataclass(frozen=True)
class Scales:
    """Of the literal: one number for each row of a whole tile, three for each column, one for the tail."""

    rows: Sequence[int]
    columns: Sequence[int]
    levels: Sequence[int]
    flips: Sequence[int]
    tail: int


@dataclass(frozen=True)
class Sections:
    """The payload after its scales and tables."""

    raw: bytes
    rest: bytes
    states: tuple[int, ...]
    escapes: tuple[int, ...]
    stream: tuple[int, ...]


# -- bits of a word -------------------------------------------------------------------------------------


def swapped(word: int, a: int, b: int) -> int:
    differ = (word >> a ^ word >> b) & 1
    return word ^ (differ << a | differ << b)


def split(word: int, flip: int, g: Geometry) -> tuple[int, int]:
    """Return the field and the raw field of a word."""
    top_bit = g.width_bits - 1
    if g.signed == 2:
        word = swapped(word ^ flip << top_bit, g.low_bits, top_bit)
    sign = word >> top_bit if g.signed else 0
    low = word & (1 << g.low_bits) - 1
    return word >> g.low_bits & (1 << g.field_bits) - 1, low | sign << g.low_bits


def merge(field: int, raw: int, flip: int, g: Geometry) -> int:
    top_bit = g.width_bits - 1
    low = raw & (1 << g.low_bits) - 1
    word = field << g.low_bits | low
    if g.signed:
        word |= raw >> g.low_bits << top_bit
    if g.signed == 2:
        word = swapped(word, g.low_bits, top_bit) ^ flip << top_bit
    return word


# -- order and context ----------------------------------------------------------------------------------


def row_order(row_scales: Sequence[int]) -> list[int]:
    return sorted(range(len(row_scales)), key=lambda row: row_scales[row])


def tile_scale(row_scales: Sequence[int]) -> int:
    """Return the mean, rounded to the nearest."""
    return (2 * sum(row_scales) + ROWS) // (2 * ROWS)


def column_order(levels: Sequence[int], column_scales: Sequence[int]) -> list[int]:
    return sorted(range(len(levels)), key=lambda column: (levels[column], column_scales[column]))


def context(scale: int, column_scale: int, level: int, g: Geometry) -> tuple[int, int]:
    """Return the table of a pair of columns, and the field that is symbol 0."""
    q = scale + column_scale
    table = (level << g.tables) + ((q & 7) >> (3 - g.tables))
    largest = (1 << (g.field_bits - g.fraction_bits)) - 1
    exponent = min(max(q >> 3, 0), largest)
    return table, exponent << g.fraction_bits | (1 << g.fraction_bits) - 1


def symbol_of(field: int, top: int, table: Table | None = None) -> int:
    """Return the symbol of a field; without slots in `table` it is the escape."""
    inside = 0 <= top - field < ESCAPE and (table is None or table[top - field] > 0)
    return top - field if inside else ESCAPE


@dataclass(frozen=True)
class Vector:
    """A column of a tile: where its words are in the literal, and all that codes them."""

    words: Integers
    flip: int
    table: int
    top: int
    group: int


@dataclass(frozen=True)
class Tile:
    words: Integers
    """Where they are in the literal, shape (64, columns); columns in natural order."""
    flips: Sequence[int]
    vectors: list[Vector]


def tile(
    words: Integers, scale: int, columns: Sequence[int], levels: Sequence[int], flips: Sequence[int], g: Geometry
) -> Tile:
    order = column_order(levels, columns)
    vectors = []
    for v, column in enumerate(order):
        first = order[v - v % 2]
        table, top = context(scale, columns[first], levels[first], g)
        vectors.append(Vector(words[:, column], flips[column], table, top, v % g.groups))
    return Tile(words, flips, vectors)


def tiles(n_words: int, scales: Scales, g: Geometry) -> Iterator[Tile]:
    """The tiles in coding order, that of the tail last."""
    n_columns, n_rows = len(scales.columns), len(scales.rows)
    order = row_order(scales.rows)
    for first in range(0, n_rows, ROWS):
        rows = order[first : first + ROWS]
        words = np.array(rows)[:, None] * n_columns + np.arange(n_columns)
        yield tile(words, tile_scale([scales.rows[r] for r in rows]), scales.columns, scales.levels, scales.flips, g)
    start, columns = n_rows * n_columns, tail_columns(n_words - n_rows * n_columns)
    if columns:
        words = start + np.arange(ROWS * columns).reshape(ROWS, columns)
        zeros = [0] * columns
        yield tile(words, scales.tail, zeros, zeros, zeros, g)


def tail_columns(n_words: int) -> int:
    return n_words // (2 * ROWS) * 2


# -- the raw section ------------------------------------------------------------------------------------


def parts(raw_bits: int) -> list[tuple[int, int]]:
    """Return the first bit and the width of each part of a raw field."""
    found, at = [], 0
    for width in (8, 4, 2, 1):
        while at + width <= raw_bits:
            found.append((at, width))
            at += width
    return found


def raw_block(raws: Integers, g: Geometry) -> bytes:
    """Pack the raw fields of a tile, shape (64, columns)."""
    out = bytearray()
    for at, width in parts(g.raw_bits):
        for i in range(8 * width):
            for column in range(raws.shape[1]):
                byte = 0
                for j in range(8 // width):
                    part = int(raws[i + 8 * width * j, column]) >> at & (1 << width) - 1
                    byte |= part << width * j
                out.append(byte)
    return bytes(out)


def raw_fields(block: bytes, columns: int, g: Geometry) -> Integers:
    raws = np.zeros((ROWS, columns), np.int64)
    unread = iter(block)
    for at, width in parts(g.raw_bits):
        for i in range(8 * width):
            for column in range(columns):
                byte = next(unread)
                for j in range(8 // width):
                    raws[i + 8 * width * j, column] |= (byte >> width * j & (1 << width) - 1) << at
    return raws


def seeded_bytes(last_block_bytes: int, g: Geometry) -> int:
    """Return how many bytes at the end of the last block are in the end states instead."""
    return min(2 * LANES * g.groups, last_block_bytes)


# -- rANS -----------------------------------------------------------------------------------------------


@functools.cache
def slots(table: Table) -> tuple[tuple[int, int], ...]:
    """Return for each slot its symbol and its place among the slots of the symbol."""
    live = sorted((symbol for symbol in range(64) if table[symbol]), key=lambda symbol: (-table[symbol], symbol))
    found = tuple((symbol, place) for symbol in live for place in range(table[symbol]))
    assert len(found) == 4096
    return found


@functools.cache
def first_slots(table: Table) -> dict[int, int]:
    return {symbol: slot for slot, (symbol, place) in enumerate(slots(table)) if place == 0}


def put(state: int, symbol: int, table: Table, stream: list[int]) -> int:
    """Return the state from which `take` finds `symbol`."""
    f, first = table[symbol], first_slots(table)[symbol]
    if state >= f << 20:
        stream.append(state & 0xFFFF)
        state >>= 16
    return (state // f << 12) + state % f + first


def take(state: int, table: Table, stream: Iterator[int]) -> tuple[int, int]:
    """Return the symbol of a state and the state after it."""
    symbol, place = slots(table)[state & 4095]
    state = table[symbol] * (state >> 12) + place
    if state < LOWEST:
        state = state << 16 | next(stream)
    return symbol, state


# -- the whole ------------------------------------------------------------------------------------------


def encode(words: Sequence[int], scales: Scales, frequencies: Sequence[Table], g: Geometry) -> Sections:
    """Encode `words`; `frequencies` has a table for each `Geometry.n_tables`."""
    blocks: list[bytes] = []
    vectors: list[Vector] = []
    for t in tiles(len(words), scales, g):
        raws = [[split(words[i], t.flips[c], g)[1] for c, i in enumerate(row)] for row in t.words]
        blocks.append(raw_block(np.array(raws), g))
        vectors += t.vectors
    n_seeded = seeded_bytes(len(blocks[-1]), g) if blocks else 0
    raw = b"".join(blocks)
    seeds = np.frombuffer(raw[len(raw) - n_seeded :], "<u2").tolist()
    states = [LOWEST + (seeds[lane] if lane < len(seeds) else 0) for lane in range(LANES * g.groups)]
    escapes: list[int] = []
    stream: list[int] = []
    for vector in reversed(vectors):
        for j in reversed(range(ROWS)):
            field, _ = split(words[vector.words[j]], vector.flip, g)
            symbol = symbol_of(field, vector.top, frequencies[vector.table])
            if symbol == ESCAPE:
                escapes.append(field)
            lane = LANES * vector.group + j
            states[lane] = put(states[lane], symbol, frequencies[vector.table], stream)
    n_rest = len(words) - LANES * len(vectors)
    rest = b"".join(int(word).to_bytes(g.width_bits // 8, "little") for word in words[len(words) - n_rest :])
    return Sections(raw[: len(raw) - n_seeded], rest, tuple(states), tuple(escapes[::-1]), tuple(stream[::-1]))


def decode(sections: Sections, n_words: int, scales: Scales, frequencies: Sequence[Table], g: Geometry) -> list[int]:
    """Inverse of `encode`; whatever does not fit fails an assertion or runs out of an iterator."""
    fields = [0] * n_words
    states, stream, escapes = list(sections.states), iter(sections.stream), iter(sections.escapes)
    coded = list(tiles(n_words, scales, g))
    for vector in (vector for t in coded for vector in t.vectors):
        for j in range(ROWS):
            lane = LANES * vector.group + j
            symbol, states[lane] = take(states[lane], frequencies[vector.table], stream)
            fields[vector.words[j]] = next(escapes) if symbol == ESCAPE else vector.top - symbol
    assert next(stream, None) is None
    assert next(escapes, None) is None
    n_seeded = seeded_bytes(8 * g.raw_bits * coded[-1].words.shape[1], g) if coded else 0
    assert all(LOWEST <= state < 2 * LOWEST for state in states)
    seeds = b"".join((state - LOWEST).to_bytes(2, "little") for state in states)
    assert not any(seeds[n_seeded:])
    raw = sections.raw + seeds[:n_seeded]
    words = [0] * n_words
    for t in coded:
        n_columns = t.words.shape[1]
        raws = raw_fields(raw[: 8 * g.raw_bits * n_columns], n_columns, g)
        raw = raw[8 * g.raw_bits * n_columns :]
        for row, column in np.ndindex(raws.shape):
            i = int(t.words[row, column])
            words[i] = merge(fields[i], int(raws[row, column]), t.flips[column], g)
    assert not raw
    n_rest = n_words - sum(t.words.size for t in coded)
    words[n_words - n_rest :] = np.frombuffer(sections.rest, f"<u{g.width_bits // 8}").tolist()
    return words


# -- the same with Huffman codes ------------------------------------------------------------------------

GROUP_COLUMNS = 8192
STREAMS = 4


@dataclass(frozen=True)
class HuffmanSections:
    """The payload after its scales and tables."""

    raw: bytes
    rest: bytes
    escapes: tuple[int, ...]
    groups: bytes


def groups_of_tiles(n_words: int, scales: Scales, g: Geometry) -> list[list[Tile]]:
    """Whole tiles in groups, then that of the tail alone."""
    every = list(tiles(n_words, scales, g))
    n_whole = len(scales.rows) // ROWS
    step = max(1, GROUP_COLUMNS // len(scales.columns))
    groups = [every[first : min(first + step, n_whole)] for first in range(0, n_whole, step)]
    return groups + [[tail] for tail in every[n_whole:]]


def encode_huffman(
    words: Sequence[int], scales: Scales, lengths: Sequence[dict[int, int]], g: Geometry
) -> HuffmanSections:
    """Encode `words`; `lengths` has those of the live symbols of each table."""
    codes = [canonical(table) for table in lengths]
    raw, escapes, out, n_coded = bytearray(), [], bytearray(), 0
    for group in groups_of_tiles(len(words), scales, g):
        digits: dict[int, list[str]] = {}
        for t in group:
            raws = [[split(words[i], t.flips[c], g)[1] for c, i in enumerate(row)] for row in t.words]
            raw += raw_block(np.array(raws), g)
            n_coded += t.words.size
            for vector in t.vectors:
                for i in vector.words:
                    field, _ = split(words[i], vector.flip, g)
                    symbol = symbol_of(field, vector.top)
                    if symbol == ESCAPE or symbol not in codes[vector.table]:
                        symbol = ESCAPE
                        escapes.append(field)
                    digits.setdefault(vector.table, []).append(codes[vector.table][symbol])
        streams = []
        for table in sorted(digits):
            quarter = len(digits[table]) // STREAMS
            for first in range(0, len(digits[table]), quarter):
                in_order = "".join(digits[table][first : first + quarter])
                streams.append(int(in_order[::-1], 2).to_bytes((len(in_order) + 7) // 8, "little"))
        out += b"".join(len(stream).to_bytes(3, "little") for stream in streams) + b"".join(streams)
    rest = b"".join(int(word).to_bytes(g.width_bits // 8, "little") for word in words[n_coded:])
    return HuffmanSections(bytes(raw), rest, tuple(escapes), bytes(out))
