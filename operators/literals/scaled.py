"""Words in the context of the scales of their rows and columns, by rANS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.base import Stream
from operators.kernels import tile_heads
from operators.kernels.scales import SYMBOLS
from operators.kernels.tile_coder import TileCoder, tile_coder
from operators.literals.tiled import BUFFERS, SLACK, Array8, Coded, Run, Tables, Tiled
from operators.words import Words

WIDE_WORDS = 1 << 17
"""Streams of so many words have two groups of 64 lanes."""
_STATE = np.dtype("<u4")
LOWEST = 1 << 16
"""Every lane ends in this state, plus its seed."""


@dataclass(frozen=True, slots=True)
class Scaled(Tiled):
    """Symbols by rANS, a lane for each row of a tile. The states carry the end of the raw blocks."""

    code = 69
    name = "scaled"

    def seed_bytes(self, stream: Stream) -> int:
        return min(2 * _lanes(stream.n_words), self.layout(stream).last_bytes)

    def state_bytes(self, stream: Stream) -> int:
        return 4 * _lanes(stream.n_words)

    def coder_bytes(self, columns: int) -> int:
        return 370 * columns + (1 << 20)  # of either family of kernels

    @property
    def takes_lows(self) -> bool:
        return tile_coder().decode_upper_tiles is not None

    def put_tables(self, counts: NDArray[np.int64], used: Array8, head: Array8, bit: int) -> tuple[Tables, int]:
        frequencies, spare = np.empty(counts.shape, np.uint16), np.empty(self.n_tables, np.int64)
        tile_heads.fit_frequencies(counts, used, frequencies, spare)
        return frequencies, tile_heads.put_frequencies(frequencies, spare, head, bit)

    def take_tables(self, payload: Array8, bit: int, used: Array8) -> tuple[Tables, int]:
        frequencies = BUFFERS.take("frequencies", self.n_tables * SYMBOLS, np.uint16).reshape(-1, SYMBOLS)
        return frequencies, tile_heads.take_frequencies(payload, bit, used, frequencies)

    def encode(self, words: Words, runs: Sequence[Run], tables: Tables, raw: Array8, room: int) -> Coded | None:
        coder: TileCoder = tile_coder()
        prepared = BUFFERS.take("tables", self.n_tables * coder.encoder_bytes).reshape(self.n_tables, -1)
        coder.encoder_tables(tables, prepared)
        stream = BUFFERS.take("stream", room + 2 * SLACK)
        escapes = BUFFERS.take("escapes", words.size // 2 + 1024, np.uint16)
        states = np.full(_lanes(words.size), LOWEST, np.uint32)
        scratch = BUFFERS.take("scratch", coder.scratch_bytes(max(run.columns for run in runs)))
        geometry = self.geometry(8 * words.itemsize)
        end, last_escape = stream.size - SLACK, escapes.size - SLACK
        at, n_escapes = end, last_escape
        for run in reversed(runs):  # rANS gives back last what was coded first
            at, n_escapes = coder.encode_tiles(
                words[run.words], run.columns, *run.contexts, geometry, prepared, raw[run.raw_at :], stream, at,
                states, escapes, n_escapes, scratch, run is runs[-1],
            )  # fmt: skip
            if at < 0:
                return None
        return Coded(states.astype(_STATE, copy=False).view(np.uint8), escapes[n_escapes:last_escape], stream[at:end])

    def decode(
        self, payload: Array8, runs: Sequence[Run], tables: Tables, at: tuple[int, int, int],
        escapes: NDArray[np.uint16], out: Words, lows: Array8 | None = None,
    ) -> tuple[int, int]:  # fmt: skip
        raw_at, states_at, stream_at = at
        states = np.frombuffer(payload, _STATE, _lanes(out.size), states_at).astype(np.uint32)
        coder: TileCoder = tile_coder()
        prepared = BUFFERS.take("tables", self.n_tables * coder.decoder_bytes).reshape(self.n_tables, -1)
        coder.decoder_tables(tables, prepared)
        scratch = BUFFERS.take("scratch", coder.scratch_bytes(max([run.columns for run in runs], default=0)))
        geometry = self.geometry(8 * out.itemsize if lows is None else 16)
        used = 0
        for run in runs:
            words: tuple[Words, ...] = (out[run.words],)
            decode: Any = coder.decode_tiles
            if lows is not None:
                words, decode = (lows[2 * (run.words.start or 0) :], *words), coder.decode_upper_tiles
            stream_at, used = decode(
                payload, run.columns, *run.contexts, geometry, prepared, raw_at + run.raw_at, stream_at, payload.size,
                states, escapes, used, scratch, *words, run is runs[-1],
            )  # fmt: skip
            if stream_at < 0:
                break
        return stream_at, used


def _lanes(n_words: int) -> int:
    return 128 if n_words >= WIDE_WORDS else 64
