"""What encodings of words in tiles share: the planner, the layout of a payload, and how it is read.

Words are seen as rows and columns, each with a scale. 64 rows of similar scale make a tile, and a symbol is coded in
the context of the scales of its tile and column. Encodings differ in how symbols are coded, and in their tables.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from operators.base import Conditioned, Stream, WholeSource
from operators.books import Books
from operators.errors import FormatError
from operators.kernels import scales as kernels
from operators.kernels import tile_payloads, tile_plans
from operators.kernels.bits import pack, packed_bytes
from operators.kernels.scales import LEVELS, ROW_CHUNKS, STEPS, SYMBOLS, TILE_ROWS
from operators.kernels.tile_payloads import COLUMNS, HEAD_BYTES, SLACK, TAIL_COLUMNS
from operators.literals.frames import check_frame
from operators.words import Words, aligned

MAX_COLUMNS = 1 << 16
_HEAD = Struct("<II")
MIN_TABLE_WORDS = 1 << 12
"""Words from which a table is made at least, where there are as many."""
FLAT_COLUMNS = 2048
MIN_ZSTD_ESCAPES, ZSTD_PART = 64, 1024
"""Escapes are compressed from so many on, and where they take one byte in so many: less is not worth the time."""
TABLE_BYTES = 160
"""Most bytes that a table takes in a payload."""

Array32: TypeAlias = NDArray[np.int32]
Array8: TypeAlias = NDArray[np.uint8]
Tables: TypeAlias = NDArray[Any]
"""A number for each symbol of each table, shape (n_tables, SYMBOLS): frequencies, or lengths of codes."""
Decoder: TypeAlias = tuple[Callable[..., tuple[int, int, int]], int, Callable[[int], int]]
TAIL_ROWS: Array32 = np.arange(TILE_ROWS, dtype=np.int32)
NO_LEVELS: Array8 = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Effort:
    """How many of the words a plan looks at, which no reader has to know.

    Attributes
    ----------
    row_chunks : int
        Runs of 64 columns from which the scale of a row is made: `ROW_CHUNKS`, or as many as there are.
    column_rows : int
        Rows from which the scales of columns are made.
    table_part, table_words : int
        One word in so many, and at most so many words, from which tables are made.
    """

    row_chunks: int
    column_rows: int
    table_part: int
    table_words: int


USUAL = Effort(ROW_CHUNKS, 128, 16, 1 << 16)
"""Costs an eighth of the coding; tables from a part of a large literal are as good, to one in 5,000."""
THOROUGH = Effort(MAX_COLUMNS, 1 << 16, 1, 1 << 30)
"""Everything: smaller by one part in 500, at more than the cost of the coding."""


class Buffers(threading.local):
    """Scratch of this thread, kept from literal to literal: fresh memory costs as much as the coding."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[Any]] = {}
        self.compressor = zstandard.ZstdCompressor(level=3)

    def take(self, name: str, n: int, dtype: Any = np.uint8) -> NDArray[Any]:
        held = self._held.get(name)
        if held is None or held.size < n:
            held = self._held[name] = aligned((n + n // 4) * np.dtype(dtype).itemsize).view(dtype)
        return held[:n]


BUFFERS = Buffers()


class Layout(NamedTuple):
    """Sizes that follow from the parameters and the stream.

    Attributes
    ----------
    tiles : int
        Whole tiles of 64 rows.
    tail_columns : int
        Columns of the tile made of what is left, 0 where there is none.
    rest_words : int
        Words stored as they are.
    raw_bytes, last_bytes : int
        Of all blocks of raw bits, and of the last one.
    """

    tiles: int
    tail_columns: int
    rest_words: int
    raw_bytes: int
    last_bytes: int


class Scales(NamedTuple):
    """Scales, as they are measured or with the window of symbols in them.

    Attributes
    ----------
    rows, columns : int32 arrays
    levels, flips : uint8 arrays, shape (columns,)
    tail : int
        Scale of what has no rows: that of all words together.
    """

    rows: Array32
    columns: Array32
    levels: Array8
    flips: Array8
    tail: int

    @staticmethod
    def empty(n_rows: int, columns: int) -> tuple[Array32, Array32, Array8, Array8]:
        """Return the arrays, to be filled."""
        signs = np.empty(2 * columns, np.uint8)
        return np.empty(n_rows, np.int32), np.empty(columns, np.int32), signs[:columns], signs[columns:]


class Contexts(NamedTuple):
    """What tiles and their columns are coded in.

    Attributes
    ----------
    rows : int32 array, shape (64 * tiles,)
        By scale.
    tiles : int32 array, shape (tiles,)
        Their scales.
    columns : int32 array, shape (columns,)
        By level and scale.
    used : uint8 array, shape (n_tables,)
        Whether columns of tiles take a table.
    """

    rows: Array32
    tiles: Array32
    columns: Array32
    used: Array8


class Run(NamedTuple):
    """Tiles that kernels take in one call: the whole ones, or the one made of what is left.

    Attributes
    ----------
    words : slice
        Those of the tiles, and what is left over where the tiles are whole.
    raw_at : int
        Where their first raw block is among all blocks.
    columns : int
    contexts : tuple
        Rows, scales of tiles, column order and scales, levels and flips, as kernels take them.
    """

    words: slice
    raw_at: int
    columns: int
    contexts: tuple[Array32, Array32, Array32, Array32, Array8, Array8]


class Coded(NamedTuple):
    """What an encoder leaves.

    Attributes
    ----------
    states, stream : uint8 arrays
    escapes : uint16 array
    """

    states: Array8
    escapes: NDArray[np.uint16]
    stream: Array8


def view_columns(n_words: int, columns: int) -> int:
    """Return the columns of the view of a stream whose rows have `columns` words, 0 where there are none.

    Rows are cut in equal parts, or joined in twos, until there are enough of them for tiles and their number of
    words is even. What has no rows is seen as 64 rows, or a multiple of that where they would be long.
    """
    if columns > 1:
        for parts in (1, 2, 4, 8, 16, 32, 64):
            if columns % (2 * parts) or columns // parts < 16:
                continue
            rows = n_words // (columns // parts)
            if columns // parts <= MAX_COLUMNS and rows >= TILE_ROWS and (rows % TILE_ROWS == 0 or rows >= 2048):
                return columns // parts
        if columns % 2 and n_words // (2 * columns) >= TILE_ROWS and 16 <= 2 * columns <= MAX_COLUMNS:
            return 2 * columns
    rows = TILE_ROWS * -(-n_words // (TILE_ROWS * FLAT_COLUMNS))
    return max(2, n_words // (2 * max(rows, TILE_ROWS)) * 2)


@dataclass(frozen=True, slots=True)
class Tiled(Conditioned):
    """Words of 8 or 16 bits, each in the context of the scales of its row and column.

    The words are seen as rows of `columns`. Rows of similar scale are coded together, 64 at a time. The field
    above `low_bits`, with the sign on top left out where `signed`, is coded as its distance below the top
    of a window that moves with the scale; the other bits are stored as they are. FORMAT.md specifies all of it.

    Parameters
    ----------
    columns : int
        Words of a row of the view: even, 2 to 65536.
    low_bits : int
    fraction_bits : int
        Low bits of the field that are not exponent.
    signed : int
        0 without a sign, 1 with one, 2 where the sign relative to its column's takes the place of the lowest
        bit of the field.
    scales : int
        0 none, 1 of rows, 2 of rows and columns.
    tables : int
        ``2**tables`` tables for an octave of scales.
    """

    max_length: ClassVar[int] = 0
    """Bits of the longest code of a symbol, 0 where a code needs no whole bits."""
    columns: int
    low_bits: int
    fraction_bits: int
    signed: int
    scales: int
    tables: int

    # -- what an encoding of tiles gives ------------------------------------------------------------------

    @abstractmethod
    def put_tables(self, counts: NDArray[np.int64], used: Array8, head: Array8, bit: int) -> tuple[Tables, int]:
        """Fit tables to the counts of those that are used, write them at `bit` of `head`; return them and the end."""

    @abstractmethod
    def encode(self, words: Words, runs: Sequence[Run], tables: Tables, raw: Array8, room: int) -> Coded | None:
        """Code the symbols of all tiles, and set their raw blocks; None where that takes more than `room` bytes."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """Return the kernel that decodes a literal, the bytes of a table of it, and those of tiles of some columns."""

    def seed_bytes(self, stream: Stream) -> int:
        """Return how many bytes of the last raw block the states carry."""
        return 0

    def state_bytes(self, stream: Stream) -> int:
        """Return the bytes of the states of the coder."""
        return 0

    def extra_bytes(self, stream: Stream, n_tables: int) -> int:
        """Return the bytes that coding with `n_tables` takes beside tables, raw blocks and codes."""
        return self.state_bytes(stream) - self.seed_bytes(stream)

    @abstractmethod
    def coder_bytes(self, columns: int) -> int:
        """Return the bytes of scratch and tables that a decoder of tiles of `columns` takes."""

    # -- sizes --------------------------------------------------------------------------------------------

    def field_bits(self, width_bits: int) -> int:
        """Return the bits of the field of words of `width_bits`."""
        return width_bits - self.low_bits - (self.signed > 0)

    def geometry(self, width_bits: int) -> NDArray[np.int64]:
        """Return what kernels know of the parameters: read only."""
        return _geometry(self, width_bits)

    @property
    def n_tables(self) -> int:
        """Tables that there may be."""
        return (LEVELS if self.signed == 2 else 1) << self.tables

    @property
    def column_bytes(self) -> int:
        """Raw bytes of a column of a tile."""
        return 8 * (self.low_bits + (self.signed > 0))

    def layout(self, stream: Stream) -> Layout:
        """Return the sizes for `stream`."""
        return _layout(self, stream.n_words)

    def runs(self, layout: Layout, scales: Scales, contexts: Contexts) -> list[Run]:
        """Return the tiles in the order in which they are decoded."""
        runs = []
        tiled = layout.tiles * TILE_ROWS * self.columns
        if layout.tiles:
            of_columns = contexts.columns, scales.columns, scales.levels, scales.flips
            runs.append(Run(slice(None), 0, self.columns, (contexts.rows, contexts.tiles, *of_columns)))
        if layout.tail_columns:
            raw_at = layout.raw_bytes - layout.last_bytes
            order, zeros, even = _tail_columns(layout.tail_columns)
            of_tile = TAIL_ROWS, np.array((scales.tail,), np.int32), order, zeros, even, even
            runs.append(Run(slice(tiled, None), raw_at, layout.tail_columns, of_tile))
        return runs

    def check(self, stream: Stream) -> None:
        width = stream.width_bits
        if width not in (8, 16):
            raise FormatError("words of 8 or 16 bits", str(stream))
        if self.columns % 2 or not 2 <= self.columns <= MAX_COLUMNS:
            raise FormatError(f"an even number of columns from 2 to {MAX_COLUMNS}", str(self.columns))
        if self.signed > 2 or self.scales > 2 or self.tables > 3:
            raise FormatError("signed and scales up to 2, tables up to 3", str(self.params))
        if not self.fraction_bits <= self.field_bits(width) or self.field_bits(width) < 1:
            raise FormatError(f"a field of 1 to {width} bits, its fraction in it", str(self.params))
        if self.signed == 2 and not (self.fraction_bits and self.low_bits < width - 1):
            raise FormatError("a fraction of which the sign takes a bit", str(self.params))

    def scratch_bytes(self, stream: Stream) -> int:
        # All words at once, their escapes, orders and scales of rows and columns, a tile, tables.
        rows = TILE_ROWS * self.layout(stream).tiles
        return stream.n_bytes + 2 * stream.n_words + 16 * rows + 32 * self.columns + self.coder_bytes(self.columns)

    # -- both ways ----------------------------------------------------------------------------------------

    def write(self, words: Words, out: Array8, *, thorough: bool = False, books: Books | None = None) -> int:
        stream = Stream(8 * words.itemsize, words.size)
        layout = self.layout(stream)
        if not layout.tiles and not layout.tail_columns:
            return -1
        scales, contexts, counts, head, bit = self.plan(words, THOROUGH if thorough else USUAL)
        if bit < 0:
            return -1
        tables, n_head = self.put_tables(counts, contexts.used, head, bit)
        n_raw = layout.raw_bytes - self.seed_bytes(stream)
        fixed = HEAD_BYTES + n_head + n_raw + layout.rest_words * words.itemsize + self.state_bytes(stream)
        room = min(words.nbytes, out.size) - fixed
        if room <= 0:
            return -1
        raw_at = HEAD_BYTES + n_head
        # Raw blocks are written in place where their seeded end and slack still lie in the caller's buffer.
        in_place = raw_at + layout.raw_bytes + SLACK <= out.size
        raw = out[raw_at:] if in_place else BUFFERS.take("raw", layout.raw_bytes + SLACK)
        coded = self.encode(words, self.runs(layout, scales, contexts), tables, raw, room)
        if coded is None:
            return -1
        escapes = _escape_section(coded.escapes, self.field_bits(stream.width_bits), words.nbytes)
        if coded.stream.size + escapes.size > room:
            return -1
        parts: tuple[Array8, ...] = (
            np.frombuffer(_HEAD.pack(coded.escapes.size, escapes.size), np.uint8),
            head[:n_head],
            raw[:n_raw],
            words[words.size - layout.rest_words :].view(np.uint8),
            coded.states,
            escapes,
            coded.stream,
        )
        n_bytes = 0
        for part in parts:
            if part is not parts[2] or not in_place:
                out[n_bytes : n_bytes + part.size] = part
            n_bytes += part.size
        return n_bytes

    def source(self, payload: memoryview, stream: Stream, books: Books | None = None) -> WholeSource:
        return _Source(self, np.frombuffer(payload, np.uint8), stream)

    # -- contexts -----------------------------------------------------------------------------------------

    def scales_of(self, words: Words, below: int = 0, step: int = 1, effort: Effort = USUAL) -> Scales:
        """Return the scales of every `step`-th row, and those of columns.

        Parameters
        ----------
        words : Words
        below : int
            Bits of `words` below the words of the literal, where these are their upper bits.
        step : int
        effort : Effort
        """
        n_rows = TILE_ROWS * (words.size // self.columns // TILE_ROWS)
        arrays = Scales.empty(-(-n_rows // step), self.columns)
        sums = BUFFERS.take("columns", self.columns, np.uint32)
        tail = tile_plans.measure_scales(
            words, self.columns, below, step, effort.row_chunks, effort.column_rows,
            self.geometry(8 * words.itemsize - below), *arrays, sums,
        )  # fmt: skip
        return Scales(*arrays, tail)

    def counts_of(
        self, words: Words, scales: Scales, rows: Array32, row_scales: Array32, n_words: int, below: int = 0
    ) -> NDArray[np.uint32]:
        """Count symbols by context (`operators.kernels.scales.count_symbols`) in a sample of about `n_words`."""
        geometry = self.geometry(8 * words.itemsize - below).copy()
        geometry[0] += below
        counts = self._sample()
        kernels.count_symbols(
            words, self.columns, rows, row_scales, scales.tail, scales.columns, scales.levels, scales.flips, geometry,
            n_words, counts,
        )  # fmt: skip
        return counts

    def _sample(self) -> NDArray[np.uint32]:
        """Return room for the counts of symbols by context."""
        contexts = (LEVELS if self.signed == 2 else 1) * STEPS
        return np.empty((contexts, kernels.HEADROOM + kernels.DEPTH << self.fraction_bits), np.uint32)

    def plan(self, words: Words, effort: Effort = USUAL) -> tuple[Scales, Contexts, NDArray[np.int64], Array8, int]:
        """Return what words are coded in, and the counts of symbols in each table from a sample.

        Returns
        -------
        scales : Scales
        contexts : Contexts
        counts : int64 array, shape (n_tables, SYMBOLS)
        head : uint8 array
            The scales as the payload holds them, and room for tables. As the arrays of scales and contexts, this
            thread's until its next literal in tiles.
        bit : int
            The one after them, or -1 where no payload holds them.
        """
        columns, n_tables = self.columns, self.n_tables
        tiles = words.size // columns // TILE_ROWS
        n_rows = TILE_ROWS * tiles
        numbers = BUFFERS.take("plan", 2 * (n_rows + columns) + tiles, np.int32)
        signs = BUFFERS.take("signs", 2 * columns + n_tables)
        at = 2 * n_rows + columns
        arrays = numbers[:n_rows], numbers[2 * n_rows : at], signs[:columns], signs[columns : 2 * columns]
        contexts = Contexts(
            numbers[n_rows : 2 * n_rows], numbers[at + columns :], numbers[at : at + columns], signs[2 * columns :]
        )
        head = BUFFERS.take("head", 6 * n_rows + 7 * columns + TABLE_BYTES * n_tables + SLACK)
        n_sampled = min(max(words.size // effort.table_part, MIN_TABLE_WORDS * n_tables), effort.table_words)
        counts = np.empty((n_tables, SYMBOLS), np.int64)
        bit, tail = tile_plans.plan_tiles(
            words, columns, effort.row_chunks, effort.column_rows, self.geometry(8 * words.itemsize), n_sampled,
            *arrays, *contexts, BUFFERS.take("columns", columns, np.uint32), self._sample(), counts, head,
        )  # fmt: skip
        return Scales(*arrays, tail), contexts, counts, head, bit


class _Source(WholeSource):
    takes_lows = True

    def __init__(self, tiled: Tiled, payload: Array8, stream: Stream) -> None:
        super().__init__(stream)
        self._tiled = tiled
        self._payload = payload

    def decode(self, out: Words) -> None:
        self.decode_above(NO_LEVELS, out)

    def decode_above(self, lows: Array8, out: Words) -> None:
        payload = self._payload
        if payload.size < HEAD_BYTES:
            raise self._error(f"{HEAD_BYTES} bytes", str(payload.size))
        n_escapes, _ = _HEAD.unpack_from(payload.data)
        if n_escapes > self.stream.n_words:
            raise self._error(f"at most {self.stream.n_words} escapes", str(n_escapes))
        numbers, fixed_bytes = _numbers(self._tiled, self.stream)
        decode, table_bytes, coder_bytes = self._tiled.decoder()
        columns = max(int(numbers[COLUMNS]), int(numbers[TAIL_COLUMNS]))
        n_bytes = fixed_bytes + 2 * n_escapes + table_bytes * self._tiled.n_tables + coder_bytes(columns)
        scratch = BUFFERS.take("scratch", n_bytes)
        status, start, stop = decode(payload, numbers, False, lows, scratch, out)
        if status == tile_payloads.COMPRESSED:
            self._decompress(payload[start:stop], n_escapes, scratch)
            status, start, stop = decode(payload, numbers, True, lows, scratch, out)
        if status == tile_payloads.TOO_SHORT:
            raise self._error(f"{start} bytes", str(payload.size))
        if status != tile_payloads.DONE:
            raise self._error(_WANTED[status], "something else")

    def _decompress(self, section: Array8, n_escapes: int, out: Array8) -> None:
        """Set the fields of escapes at the start of `out`."""
        check_frame(section.data, 2 * n_escapes)
        try:
            data = zstandard.ZstdDecompressor().decompress(section.data)
        except zstandard.ZstdError as error:
            raise self._error(f"{n_escapes} escapes", str(error)) from None
        out[: 2 * n_escapes] = np.frombuffer(data, np.uint8)

    def _error(self, expected: str, found: str) -> FormatError:
        return FormatError(expected, found, f"{self._tiled.name} literal")


_WANTED = {
    tile_payloads.NO_SCALES: "scales",
    tile_payloads.NO_TABLES: "the tables that contexts take, of complete codes",
    tile_payloads.OTHER_END: "a stream and escapes that end with the words",
}


@lru_cache(1 << 10)
def _geometry(tiled: Tiled, width_bits: int) -> NDArray[np.int64]:
    numbers = (
        tiled.low_bits, tiled.fraction_bits, tiled.field_bits(width_bits), tiled.signed, tiled.tables, tiled.scales
    )  # fmt: skip
    geometry = np.array(numbers, np.int64)
    geometry.setflags(write=False)
    return geometry


@lru_cache(1 << 10)
def _numbers(tiled: Tiled, stream: Stream) -> tuple[NDArray[np.int64], int]:
    """Return what a decoder knows of a literal (`operators.kernels.tile_payloads`), and the bytes of its scratch."""
    tiled.check(stream)
    layout = tiled.layout(stream)
    lanes = tiled.state_bytes(stream) // 4
    numbers = [
        *tiled.geometry(stream.width_bits).tolist(), tiled.columns, layout.tiles, layout.tail_columns,
        layout.rest_words, tiled.n_tables, tiled.seed_bytes(stream), lanes,
    ]  # fmt: skip
    return np.array(numbers, np.int64), tile_payloads.scratch_bytes(numbers)


@lru_cache(1 << 10)
def _layout(tiled: Tiled, n_words: int) -> Layout:
    tiles = n_words // tiled.columns // TILE_ROWS
    tail = n_words - tiles * TILE_ROWS * tiled.columns
    tail_columns = tail // (2 * TILE_ROWS) * 2
    return Layout(
        tiles,
        tail_columns,
        tail - TILE_ROWS * tail_columns,
        tiled.column_bytes * (tiles * tiled.columns + tail_columns),
        tiled.column_bytes * (tail_columns or (tiled.columns if tiles else 0)),
    )


@lru_cache(64)
def _tail_columns(columns: int) -> tuple[Array32, Array32, Array8]:
    """Return the order of columns of the tile made of what is left, and zeros, its scales and signs: read only."""
    zeros = np.zeros(columns, np.int32)
    return np.arange(columns, dtype=np.int32), zeros, zeros.view(np.uint8)[:columns]


def _escape_section(escapes: NDArray[np.uint16], field_bits: int, n_bytes: int) -> Array8:
    """Return the section of escapes of words of `n_bytes`: their bits, or compressed where it pays."""
    plain = np.zeros(packed_bytes(escapes.size, field_bits), np.uint8)
    pack(escapes, field_bits, plain)
    if escapes.size < MIN_ZSTD_ESCAPES or plain.size < n_bytes // ZSTD_PART:
        return plain
    compressed = BUFFERS.compressor.compress(escapes.data)
    # A reader tells them apart by the size: a frame as long as the plain bits is not taken.
    return np.frombuffer(compressed, np.uint8) if len(compressed) < plain.size else plain
