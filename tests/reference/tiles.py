"""Literals of `scaled` and `scaled_huffman`, decoded slowly; names are those of `operators/FORMAT.md`."""

from __future__ import annotations

from collections.abc import Sequence

import zstandard

from tests.reference.bits import Bits, Bytes, Words, canonical, decode_stream, need, numbers


class Scaled:
    """A literal of `scaled` or, with codes, of `scaled_huffman`; names as on the page."""

    def __init__(self, b: int, n: int, data: bytes, params: Words, *, codes: bool) -> None:
        self.b, self.n, self.codes = b, n, codes
        self.C, self.l, self.k, self.s, self.d, self.t = params
        self.F = b - self.l - (self.s > 0)
        self.r = self.l + (self.s > 0)
        need(b in (8, 16) and self.F >= 1 and 0 <= self.k <= self.F and self.C % 2 == 0, "parameters")
        self.T = n // self.C // 64
        rest = n - 64 * self.T * self.C
        self.tail_columns = 2 * (rest // 128)
        self.left = rest - 64 * self.tail_columns
        self.source = Bytes(data)

    def decode(self) -> Words:
        source = self.source
        n_escapes, escape_bytes = source.number(4), source.number(4)
        self.read_header()
        # Tiles: (scale, columns in their order, place of the first word of each row in its order).
        row_order = sorted(range(64 * self.T), key=lambda row: self.rows[row])
        self.columns_order = sorted(range(self.C), key=lambda column: (self.levels[column], self.columns[column]))
        tiles = []
        for number in range(self.T):
            mine = row_order[64 * number : 64 * number + 64]
            scale = (2 * sum(self.rows[row] for row in mine) + 64) // 128
            tiles.append((scale, self.columns_order, [row * self.C for row in mine]))
        start = 64 * self.T * self.C
        if self.tail_columns:
            places = [start + row * self.tail_columns for row in range(64)]
            tiles.append((self.tail, list(range(self.tail_columns)), places))
        self.has_tail = bool(self.tail_columns)
        lanes = 128 if self.n >= 1 << 17 else 64
        sizes = [8 * self.r * len(columns) for _, columns, _ in tiles]
        seeded = min(2 * lanes, sizes[-1]) if sizes and not self.codes else 0
        blocks = [bytearray(source.take(size - (seeded if i == len(sizes) - 1 else 0))) for i, size in enumerate(sizes)]
        last = numbers(source.take(self.left * self.b // 8), self.b // 8)
        if self.codes:
            escapes = self.escapes(n_escapes, source.take(escape_bytes))
            symbols = self.symbols_of_groups(tiles)
        else:
            states = [source.number(4) for _ in range(lanes)]
            escapes = self.escapes(n_escapes, source.take(escape_bytes))
            symbols = self.symbols_of_states(tiles, states)
            end = b"".join((x - (1 << 16)).to_bytes(2, "little") for x in states if 0 <= x - (1 << 16) < 1 << 16)
            need(len(end) == 2 * lanes and not any(end[seeded:]), "states that are left")
            if blocks:
                blocks[-1] += end[:seeded]
        source.end()
        words = [0] * (self.n - self.left) + last
        taken = iter(escapes)
        for number, (scale, columns, places) in enumerate(tiles):
            raw = self.raw_parts(bytes(blocks[number]), len(columns))
            for v, column in enumerate(columns):
                _, top = self.context(scale, columns, v, tail=number == self.T)
                for j in range(64):
                    symbol = symbols[number][v][j]
                    field = next(taken) if symbol == 63 else top - symbol
                    need(0 <= field < 1 << self.F, "a field")
                    flip = self.flips[column] if number < self.T else 0
                    words[places[j] + column] = self.word(raw[j][column], field, flip)
        need(next(taken, None) is None, "escapes that are left")
        return words

    def word(self, raw: int, field: int, flip: int) -> int:
        low, sign = raw & ((1 << self.l) - 1), raw >> self.l
        word = low | field << self.l | sign << (self.b - 1)
        if self.s == 2:
            top, bit = word >> (self.b - 1) & 1, word >> self.l & 1
            if top != bit:
                word ^= 1 << (self.b - 1) | 1 << self.l
            word ^= flip << (self.b - 1)
        return word

    def read_header(self) -> None:
        bits = Bits(self.source.data[self.source.place :])
        self.tail = bits.number(15) - 16_384
        self.rows = self.scales(bits, 64 * self.T) if self.d >= 1 else [self.tail] * (64 * self.T)
        self.columns = self.scales(bits, self.C) if self.d == 2 else [0] * self.C
        self.levels, self.flips = [0] * self.C, [0] * self.C
        if self.s == 2:
            for column in range(self.C):
                both = bits.number(4)
                self.levels[column], self.flips[column] = both & 7, both >> 3
                need(self.levels[column] <= 4, "a level")
        n_tables = (5 if self.s == 2 else 1) << self.t
        take = self.lengths if self.codes else self.frequencies
        self.tables = [take(bits) if bits.bit() else None for _ in range(n_tables)]
        self.source.take(bits.to_the_byte())

    @staticmethod
    def scales(bits: Bits, count: int) -> Words:
        if not count:
            return []
        base, order = bits.number(15) - 16_384, bits.number(4)
        return [base + bits.signed(order) for _ in range(count)]

    @staticmethod
    def frequencies(bits: Bits) -> Words:
        rest = bits.number(6)
        found = [0] * 64
        before = 0
        for symbol in range(64):
            if symbol == rest:
                continue
            before += bits.signed(0)
            if before:
                more = min(4, before - 1)
                found[symbol] = ((1 << more) + bits.number(more)) << (before - 1 - more)
        found[rest] = 4096 - sum(found)
        need(found[rest] >= 0 and found[63] > 0, "frequencies that do not sum up")
        return found

    @staticmethod
    def lengths(bits: Bits) -> Words:
        found: Words = []
        for _ in range(64):
            found.append((found[-1] if found else 0) + bits.signed(0))
        need(all(0 <= length <= 12 for length in found) and found[63] > 0, "a length")
        return found

    def context(self, scale: int, columns: Words, v: int, *, tail: bool) -> tuple[int, int]:
        """Return the table and the top of vector v of a tile: those of the first of its pair."""
        first = columns[v - v % 2]
        q = scale + (0 if tail else self.columns[first])
        level = 0 if tail else self.levels[first]
        table = (level << self.t) + (q % 8 >> (3 - self.t))
        exponent = min(max(q >> 3, 0), (1 << (self.F - self.k)) - 1)
        return table, (exponent << self.k) + (1 << self.k) - 1

    def escapes(self, count: int, data: bytes) -> Words:
        if len(data) != -(-count * self.F // 8):
            return numbers(zstandard.ZstdDecompressor().decompress(data, 2 * count), 2)
        bits = Bits(data)
        found = [bits.number(self.F) for _ in range(count)]
        bits.to_the_byte()
        return found

    def raw_parts(self, data: bytes, c: int) -> list[Words]:
        """Return the raw part of each word of a tile, by row and column."""
        found = [[0] * c for _ in range(64)]
        source, shift = Bytes(data), 0
        for p in [8] * (self.r // 8) + [p for p in (4, 2, 1) if self.r % 8 & p]:
            for i in range(8 * p):
                for column in range(c):
                    byte = source.number(1)
                    for j in range(8 // p):
                        found[i + 8 * p * j][column] |= (byte >> (p * j) & ((1 << p) - 1)) << shift
            shift += p
        source.end()
        return found

    def table(self, number: int) -> Words:
        found = self.tables[number]
        need(found is not None, "a table that is not there")
        assert found is not None
        return found

    def symbols_of_states(self, tiles: Sequence[tuple[int, Words, Words]], states: Words) -> list[list[Words]]:
        """Run the states over all vectors; they are changed in place."""
        slots: dict[int, list[tuple[int, int]]] = {}
        found = []
        for number, (scale, columns, _) in enumerate(tiles):
            vectors = []
            for v in range(len(columns)):
                which, _ = self.context(scale, columns, v, tail=number == self.T)
                frequencies = self.table(which)
                if which not in slots:
                    order = sorted(range(64), key=lambda symbol: (-frequencies[symbol], symbol))  # used at once
                    slots[which] = [(symbol, slot) for symbol in order for slot in range(frequencies[symbol])]
                vector = []
                first = 64 * (v % 2) if len(states) == 128 else 0
                for lane in range(first, first + 64):
                    x = states[lane]
                    symbol, slot = slots[which][x % 4096]
                    vector.append(symbol)
                    x = frequencies[symbol] * (x >> 12) + slot
                    states[lane] = x << 16 | self.source.number(2) if x < 1 << 16 else x
                vectors.append(vector)
            found.append(vectors)
        return found

    def symbols_of_groups(self, tiles: Sequence[tuple[int, Words, Words]]) -> list[list[Words]]:
        step = max(1, 8192 // self.C)
        groups = [list(range(start, min(start + step, self.T))) for start in range(0, self.T, step)]
        if len(tiles) > self.T:
            groups.append([self.T])
        found: list[list[Words]] = [[[] for _ in columns] for _, columns, _ in tiles]
        for group in groups:
            places: dict[int, list[tuple[int, int]]] = {}
            for number in group:
                scale, columns, _ = tiles[number]
                for v in range(len(columns)):
                    which, _ = self.context(scale, columns, v, tail=number == self.T)
                    places.setdefault(which, []).append((number, v))
            sizes = {which: [self.source.number(3) for _ in range(4)] for which in sorted(places)}
            for which in sorted(places):
                codes = canonical({symbol: length for symbol, length in enumerate(self.table(which)) if length})
                count = 16 * len(places[which])
                streams = [self.source.take(size) for size in sizes[which]]
                symbols = [word for stream in streams for word in decode_stream(stream, count, codes)]
                for i, (number, v) in enumerate(places[which]):
                    found[number][v] = symbols[64 * i : 64 * i + 64]
        return found
