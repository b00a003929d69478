"""Words in the context of the scales of their rows and columns."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from operators.base import Conditioned, Stream, WholeSource
from operators.errors import FormatError
from operators.kernels import scales as kernels
from operators.kernels.bits import pack, packed_bytes, unpack
from operators.kernels.scales import ESCAPE, LEVELS, STEPS, SYMBOLS
from operators.kernels.tile_coder import TileCoder, tile_coder
from operators.words import Words

MAX_COLUMNS = 1 << 16
TILE_ROWS = 64
WIDE_WORDS = 1 << 17
"""Streams of so many words have two groups of lanes."""
HEAD_BYTES = 8
MIN_SAMPLED_WORDS, MAX_SAMPLED_WORDS, SAMPLED_PART = 1 << 15, 3 << 16, 8
"""Words from which the tables of a literal are made: of large ones a part is as good, to one in 5,000."""
SAMPLED_ROWS = 128
"""Rows from which the scales of columns are made."""
ROW_CHUNKS = 4
"""Runs of 64 columns from which the scale of a row is made."""
FLOOR_OCTAVES = 12
"""Exponents so far below the mean count no further: zeros say nothing of a scale."""
FLAT_COLUMNS = 2048
MIN_ZSTD_ESCAPES = 64
SLACK = 64

Array32: TypeAlias = NDArray[np.int32]
Array8: TypeAlias = NDArray[np.uint8]
NO_SCALES: Array32 = np.empty(0, np.int32)
NO_LEVELS: Array8 = np.empty(0, np.uint8)


class _Buffers(threading.local):
    """Scratch of this thread, kept from literal to literal: fresh memory costs as much as the coding."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[Any]] = {}
        self.compressor = zstandard.ZstdCompressor(level=3)

    def take(self, name: str, n: int, dtype: Any = np.uint8) -> NDArray[Any]:
        held = self._held.get(name)
        if held is None or held.size < n:
            held = self._held[name] = np.empty(n + n // 4, dtype)
        return held[:n]


_BUFFERS = _Buffers()


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes that follow from the parameters and the stream.

    Attributes
    ----------
    tiles : int
        Whole tiles of 64 rows.
    tail_columns : int
        Columns of the tile made of what is left, 0 where there is none.
    rest_words : int
        Words stored as they are.
    raw_bytes, seed_bytes : int
        Of all blocks of raw bits, and how many of them the states carry.
    lanes : int
    """

    tiles: int
    tail_columns: int
    rest_words: int
    raw_bytes: int
    seed_bytes: int
    lanes: int


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """Scales as they are measured.

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


@dataclass(frozen=True, slots=True, eq=False)
class ScalePlan:
    """Contexts of a literal.

    Attributes
    ----------
    row_scales : int32 array, shape (64 * tiles,)
    order : int32 array, shape (64 * tiles,)
        Rows by scale.
    tiles : int32 array, shape (tiles,)
    column_scales, column_order : int32 arrays, shape (columns,)
    levels, flips : uint8 arrays, shape (columns,)
    tail_scale : int
    """

    row_scales: Array32
    order: Array32
    tiles: Array32
    column_scales: Array32
    column_order: Array32
    levels: Array8
    flips: Array8
    tail_scale: int


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
class Scaled(Conditioned):
    """Words of 8 or 16 bits by rANS, each in the context of the scales of its row and column.

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

    code = 69
    name = "scaled"
    columns: int
    low_bits: int
    fraction_bits: int
    signed: int
    scales: int
    tables: int

    def field_bits(self, width_bits: int) -> int:
        """Return the bits of the field of words of `width_bits`."""
        return width_bits - self.low_bits - (self.signed > 0)

    def geometry(self, width_bits: int) -> NDArray[np.int64]:
        """Return what kernels know of the parameters."""
        return np.array(
            (self.low_bits, self.fraction_bits, self.field_bits(width_bits), self.signed, self.tables), np.int64
        )

    @property
    def n_tables(self) -> int:
        """Tables that there may be."""
        return (LEVELS if self.signed == 2 else 1) << self.tables

    def layout(self, stream: Stream) -> Layout:
        """Return the sizes for `stream`."""
        tiles = stream.n_words // self.columns // TILE_ROWS
        tail = stream.n_words - tiles * TILE_ROWS * self.columns
        tail_columns = tail // (2 * TILE_ROWS) * 2
        block = 8 * (self.low_bits + (self.signed > 0))
        lanes = 128 if stream.n_words >= WIDE_WORDS else 64
        last = tail_columns or (self.columns if tiles else 0)
        return Layout(
            tiles,
            tail_columns,
            tail - TILE_ROWS * tail_columns,
            block * (tiles * self.columns + tail_columns),
            min(2 * lanes, block * last),
            lanes,
        )

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
        columns = max(self.columns, 2)
        return stream.n_bytes + 2 * stream.n_words + 16 * rows + 400 * columns + (1 << 20)

    def write(self, words: Words, out: Array8) -> int:
        stream = Stream(8 * words.itemsize, words.size)
        layout = self.layout(stream)
        if not layout.tiles and not layout.tail_columns:
            return -1
        geometry = self.geometry(stream.width_bits)
        plan, counts = self.plan(words)
        frequencies, spare = self._tables(plan, counts)
        by_rows, by_columns, by_signs = self._sections(plan)
        scale_bytes = 6 * (by_rows.size + by_columns.size) + by_signs.size
        head = _BUFFERS.take("head", scale_bytes + 160 * self.n_tables + SLACK)
        head[:] = 0
        n_head = kernels.put_head(
            by_rows, by_columns, plan.tail_scale, by_signs, plan.flips[: by_signs.size], frequencies, spare, head
        )
        raw_at = HEAD_BYTES + n_head
        fixed = raw_at + layout.raw_bytes - layout.seed_bytes + layout.rest_words * words.itemsize + 4 * layout.lanes
        room = min(words.nbytes, out.size) - fixed
        if room <= 0:
            return -1
        coder = tile_coder()
        tables = _BUFFERS.take("tables", self.n_tables * coder.encoder_bytes).reshape(self.n_tables, -1)
        coder.encoder_tables(frequencies, tables)
        raw = _BUFFERS.take("raw", layout.raw_bytes + SLACK)
        stream_out = _BUFFERS.take("stream", room + 2 * SLACK)
        escapes = _BUFFERS.take("escapes", words.size // 2 + 1024, np.uint16)
        states = np.empty(layout.lanes, np.uint32)
        scratch = _BUFFERS.take("scratch", coder.scratch_bytes(max(self.columns, layout.tail_columns)))
        states[:] = 1 << 16
        at, n_escapes = stream_out.size - SLACK, escapes.size - SLACK
        end, last_escape = at, n_escapes
        tiled = layout.tiles * TILE_ROWS * self.columns
        is_last = 1
        if layout.tail_columns:
            block = raw[layout.raw_bytes - _block_bytes(geometry) * layout.tail_columns :]
            at, n_escapes = coder.encode_tiles(
                words[tiled:], layout.tail_columns, *_tail_contexts(plan.tail_scale, layout.tail_columns), geometry,
                tables, block, stream_out, at, states, escapes, n_escapes, scratch, is_last,
            )  # fmt: skip
            is_last = 0
        if layout.tiles and at >= 0:
            at, n_escapes = coder.encode_tiles(
                words, self.columns, plan.order, plan.tiles, plan.column_order, plan.column_scales, plan.levels,
                plan.flips, geometry, tables, raw, stream_out, at, states, escapes, n_escapes, scratch, is_last,
            )  # fmt: skip
        if at < 0:
            return -1
        escape_bytes = _escape_bytes(escapes[n_escapes:last_escape], self.field_bits(stream.width_bits))
        if end - at + len(escape_bytes) > room:
            return -1
        numbers = np.array((last_escape - n_escapes, len(escape_bytes)), "<u4")
        parts: tuple[Array8, ...] = (
            numbers.view(np.uint8),
            head[:n_head],
            raw[: layout.raw_bytes - layout.seed_bytes],
            words[words.size - layout.rest_words :].view(np.uint8),
            states.astype("<u4").view(np.uint8),
            np.frombuffer(escape_bytes, np.uint8),
            stream_out[at:end],
        )
        n_bytes = 0
        for part in parts:
            out[n_bytes : n_bytes + part.size] = part
            n_bytes += part.size
        return n_bytes

    def source(self, payload: memoryview, stream: Stream) -> WholeSource:
        self.check(stream)
        return _Source(self, np.frombuffer(payload, np.uint8), stream)

    # -- contexts -----------------------------------------------------------------------------------------

    def scales_of(self, words: Words, below: int = 0, step: int = 1) -> Scales:
        """Return the scales of every `step`-th row, and those of columns.

        Parameters
        ----------
        words : Words
        below : int
            Bits of `words` below the words of the literal, where these are their upper bits.
        step : int
        """
        width = 8 * words.itemsize
        n_rows = TILE_ROWS * (words.size // self.columns // TILE_ROWS)
        shift = below + self.low_bits + self.fraction_bits
        mask = (1 << self.field_bits(width - below) - self.fraction_bits) - 1
        sums = np.empty(2, np.int64)
        kernels.exponent_sums(words, shift, mask, words.size // 4096 | 1, sums)
        mean = int(sums[0]) // max(1, int(sums[1]))
        floor = max(0, mean - FLOOR_OCTAVES)
        row_scales = np.full(-(-n_rows // step), STEPS * mean + STEPS // 2, np.int32)
        column_scales = np.zeros(self.columns, np.int32)
        levels, flips = np.zeros(self.columns, np.uint8), np.zeros(self.columns, np.uint8)
        if n_rows:
            column_step = max(1, n_rows // SAMPLED_ROWS)
            column_sums = _BUFFERS.take("columns", self.columns, np.uint32)
            if self.scales:
                kernels.row_scales(words, self.columns, step, shift, mask, floor, ROW_CHUNKS, row_scales)
            if self.scales == 2:
                kernels.column_scales(
                    words, self.columns, n_rows, column_step, shift, mask, floor, column_sums, column_scales
                )
            if self.signed == 2:
                kernels.column_signs(words, self.columns, n_rows, column_step, column_sums, levels, flips)
        return Scales(row_scales, column_scales, levels, flips, STEPS * mean + STEPS // 2)

    def counts_of(
        self, words: Words, scales: Scales, rows: Array32, row_scales: Array32, n_words: int, below: int = 0
    ) -> NDArray[np.uint32]:
        """Count symbols by context (`operators.kernels.scales.count_symbols`) in a sample of about `n_words`."""
        counts = np.zeros((LEVELS * STEPS, kernels.HEADROOM + kernels.DEPTH << self.fraction_bits), np.uint32)
        geometry = self.geometry(8 * words.itemsize - below)
        geometry[0] += below
        if rows.size:
            kernels.count_symbols(
                words, self.columns, rows, row_scales, scales.columns, scales.levels, scales.flips, geometry, n_words,
                counts,
            )  # fmt: skip
            return counts
        columns = words.size // (2 * TILE_ROWS) * 2
        tail_rows, _, _, tail_columns, levels, flips = _tail_contexts(scales.tail, columns)
        tail_scales = np.full(TILE_ROWS, scales.tail, np.int32)
        kernels.count_symbols(
            words, columns, tail_rows, tail_scales, tail_columns, levels, flips, geometry, n_words, counts
        )
        return counts

    def plan(self, words: Words) -> tuple[ScalePlan, NDArray[np.int64]]:
        """Return the contexts of all words, and the counts of symbols in each table from a sample.

        The window is chosen here, and moves the scales of rows.
        """
        scales = self.scales_of(words)
        n_rows = scales.rows.size
        order, column_order = np.arange(n_rows, dtype=np.int32), np.arange(self.columns, dtype=np.int32)
        tiles = np.full(n_rows // TILE_ROWS, scales.tail, np.int32)
        if n_rows and self.scales:
            kernels.order_by(scales.rows, NO_LEVELS, order)
            kernels.tile_scales(scales.rows, order, tiles)
        if self.scales == 2 or self.signed == 2:
            kernels.order_by(scales.columns, scales.levels, column_order)
        n_sampled = min(max(words.size // SAMPLED_PART, MIN_SAMPLED_WORDS), MAX_SAMPLED_WORDS)
        sampled = self.counts_of(words, scales, order, np.repeat(tiles, TILE_ROWS), n_sampled)
        counts = np.empty((self.n_tables, SYMBOLS), np.int64)
        head = STEPS * kernels.window_counts(sampled, self.fraction_bits, self.tables, counts)
        plan = ScalePlan(
            scales.rows + np.int32(head), order, tiles + np.int32(head), scales.columns, column_order, scales.levels,
            scales.flips, scales.tail + head,
        )  # fmt: skip
        return plan, counts

    def _tables(self, plan: ScalePlan, counts: NDArray[np.int64]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        """Return the tables that contexts take, and the symbol of each whose frequency is what the others leave."""
        used = np.zeros(self.n_tables, np.uint8)
        kernels.mark_used(
            plan.tiles, plan.tail_scale, plan.column_order, plan.column_scales, plan.levels, self.tables, used
        )
        frequencies = np.zeros((self.n_tables, SYMBOLS), np.uint16)
        spare = np.zeros(self.n_tables, np.int64)
        pool = counts.sum(axis=0)
        for table in np.flatnonzero(used):
            spare[table] = kernels.fit_table(counts[table], pool, frequencies[table])
        return frequencies, spare

    def _sections(self, plan: ScalePlan) -> tuple[Array32, Array32, Array8]:
        """Return the scales of rows and of columns and the levels that the payload holds."""
        return (
            plan.row_scales if self.scales else NO_SCALES,
            plan.column_scales if self.scales == 2 else NO_SCALES,
            plan.levels if self.signed == 2 else NO_LEVELS,
        )


class _Source(WholeSource):
    def __init__(self, scaled: Scaled, payload: Array8, stream: Stream) -> None:
        super().__init__(stream)
        self._scaled = scaled
        self._payload = payload

    def decode(self, out: Words) -> None:
        scaled, payload = self._scaled, self._payload
        layout = scaled.layout(self.stream)
        if payload.size < HEAD_BYTES:
            raise FormatError(f"{HEAD_BYTES} bytes", str(payload.size), "scaled literal")
        n_escapes, escape_bytes = map(int, payload[:HEAD_BYTES].view("<u4"))
        plan, frequencies, n_head = self._contexts(layout)
        raw_at = HEAD_BYTES + n_head
        rest_at = raw_at + layout.raw_bytes - layout.seed_bytes
        states_at = rest_at + layout.rest_words * out.itemsize
        escapes_at = states_at + 4 * layout.lanes
        at = escapes_at + escape_bytes
        if at > payload.size:
            raise FormatError(f"{at} bytes", str(payload.size), "scaled literal")
        escapes = self._escapes(payload[escapes_at:at], n_escapes)
        states = payload[states_at:escapes_at].view("<u4").astype(np.uint32)
        coder: TileCoder = tile_coder()
        tables = _BUFFERS.take("tables", scaled.n_tables * coder.decoder_bytes).reshape(scaled.n_tables, -1)
        coder.decoder_tables(frequencies, tables)
        scratch = _BUFFERS.take("scratch", coder.scratch_bytes(max(scaled.columns, layout.tail_columns)))
        geometry = scaled.geometry(self.stream.width_bits)
        tiled = layout.tiles * TILE_ROWS * scaled.columns
        used = 0
        if layout.tiles:
            at, used = coder.decode_tiles(
                payload, scaled.columns, plan.order, plan.tiles, plan.column_order, plan.column_scales, plan.levels,
                plan.flips, geometry, tables, raw_at, at, payload.size, states, escapes, used, scratch, out,
                not layout.tail_columns,
            )  # fmt: skip
        if layout.tail_columns and at >= 0:
            at, used = coder.decode_tiles(
                payload, layout.tail_columns, *_tail_contexts(plan.tail_scale, layout.tail_columns), geometry, tables,
                raw_at + _block_bytes(geometry) * layout.tiles * scaled.columns, at, payload.size, states, escapes,
                used, scratch, out[tiled:], 1,
            )  # fmt: skip
        if at != payload.size or used != n_escapes:
            raise FormatError("a stream and escapes that end with the words", "others", "scaled literal")
        if layout.rest_words:
            out[out.size - layout.rest_words :].view(np.uint8)[:] = payload[rest_at:states_at]

    def _contexts(self, layout: Layout) -> tuple[ScalePlan, NDArray[np.uint16], int]:
        """Read scales and tables; return the contexts, frequencies and bytes that they take."""
        scaled = self._scaled
        n_rows, columns = TILE_ROWS * layout.tiles, scaled.columns
        row_scales = np.zeros(n_rows if scaled.scales else 0, np.int32)
        column_scales = np.zeros(columns, np.int32)
        levels, flips = np.zeros(columns, np.uint8), np.zeros(columns, np.uint8)
        frequencies = np.empty((scaled.n_tables, SYMBOLS), np.uint16)
        numbers = np.empty(1, np.int64)
        n_head = kernels.take_head(
            self._payload[HEAD_BYTES:],
            row_scales,
            column_scales if scaled.scales == 2 else NO_SCALES,
            levels if scaled.signed == 2 else NO_LEVELS,
            flips if scaled.signed == 2 else NO_LEVELS,
            frequencies,
            numbers,
        )
        if n_head < 0:
            raise FormatError("scales and tables", "something else", "scaled literal")
        tail_scale = int(numbers[0])
        order = np.arange(n_rows, dtype=np.int32)
        column_order = np.arange(columns, dtype=np.int32)
        tiles = np.full(layout.tiles, tail_scale, np.int32)
        if row_scales.size:
            kernels.order_by(row_scales, NO_LEVELS, order)
            kernels.tile_scales(row_scales, order, tiles)
        if scaled.scales == 2 or scaled.signed == 2:
            kernels.order_by(column_scales, levels, column_order)
        used = np.zeros(scaled.n_tables, np.uint8)
        kernels.mark_used(tiles, tail_scale, column_order, column_scales, levels, scaled.tables, used)
        if (frequencies[used > 0, ESCAPE] == 0).any():
            raise FormatError("the tables that contexts take", "some of them", "scaled literal")
        plan = ScalePlan(row_scales, order, tiles, column_scales, column_order, levels, flips, tail_scale)
        return plan, frequencies, n_head

    def _escapes(self, section: Array8, n_escapes: int) -> NDArray[np.uint16]:
        """Return the fields of escapes, with room behind them that kernels may look at."""
        field_bits = self._scaled.field_bits(self.stream.width_bits)
        if n_escapes > self.stream.n_words:
            raise FormatError(f"at most {self.stream.n_words} escapes", str(n_escapes), "scaled literal")
        escapes = np.zeros(n_escapes + SLACK, np.uint16)
        if section.size == packed_bytes(n_escapes, field_bits):
            unpack(section, field_bits, escapes[:n_escapes])
            return escapes
        try:
            data = zstandard.ZstdDecompressor().decompress(section.data, max_output_size=2 * n_escapes)
        except zstandard.ZstdError as error:
            raise FormatError(f"{n_escapes} escapes", str(error), "scaled literal") from None
        if len(data) != 2 * n_escapes:
            raise FormatError(f"{n_escapes} escapes", f"{len(data)} bytes", "scaled literal")
        escapes[:n_escapes] = np.frombuffer(data, "<u2")
        return escapes


def _block_bytes(geometry: NDArray[np.int64]) -> int:
    """Return the raw bytes of a column of a tile."""
    return 8 * int(geometry[0] + (geometry[3] > 0))


def _tail_contexts(
    tail_scale: int, columns: int
) -> tuple[Array32, Array32, Array32, Array32, Array8, Array8]:
    """Return rows, tile scales, column order and scales, levels and flips of the tile made of what is left."""
    zeros = np.zeros(columns, np.uint8)
    return (
        np.arange(TILE_ROWS, dtype=np.int32),
        np.array((tail_scale,), np.int32),
        np.arange(columns, dtype=np.int32),
        np.zeros(columns, np.int32),
        zeros,
        zeros,
    )


def _escape_bytes(escapes: NDArray[np.uint16], field_bits: int) -> bytes:
    """Return the section of escapes: their bits side by side, or compressed where that is smaller."""
    plain = np.zeros(packed_bytes(escapes.size, field_bits), np.uint8)
    pack(escapes, field_bits, plain)
    if escapes.size < MIN_ZSTD_ESCAPES:
        return plain.tobytes()
    # A reader tells them apart by the size: a frame as long as the plain bits is not taken.
    return min(plain.tobytes(), _BUFFERS.compressor.compress(escapes.data), key=len)
