"""Words in the context of the scales of their rows and columns, by rANS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import Stream
from operators.kernels import tile_heads
from operators.kernels.tile_coder import TileCoder, tile_coder
from operators.kernels.tile_payloads import SLACK
from operators.literals.tiled import BUFFERS, Array8, Coded, Decoder, Run, Tables, Tiled
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

    def put_tables(self, counts: NDArray[np.int64], used: Array8, head: Array8, bit: int) -> tuple[Tables, int]:
        frequencies = np.empty(counts.shape, np.uint16)
        return frequencies, tile_heads.make_frequencies(counts, used, frequencies, head, bit)

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

    def decoder(self) -> Decoder:
        coder = tile_coder()
        return coder.decode_literal, coder.decoder_bytes, coder.scratch_bytes


def _lanes(n_words: int) -> int:
    return 128 if n_words >= WIDE_WORDS else 64
