"""Words in the context of the scales of their rows and columns, by Huffman codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import Stream
from operators.kernels import tile_heads, tiles_huffman
from operators.kernels.huffman import STREAMS
from operators.kernels.scales import TILE_ROWS
from operators.kernels.tile_payloads import SLACK
from operators.literals.tiled import BUFFERS, NO_LEVELS, Array8, Coded, Decoder, Run, Tables, Tiled
from operators.words import Words


@dataclass(frozen=True, slots=True)
class ScaledHuffman(Tiled):
    """Symbols by Huffman codes of at most 12 bits: a little larger than by rANS, and fast on any CPU."""

    code = 70
    name = "scaled_huffman"
    max_length = tile_heads.MAX_LENGTH

    def extra_bytes(self, stream: Stream, n_tables: int) -> int:
        layout = self.layout(stream)
        groups = -(-layout.tiles // max(1, tiles_huffman.GROUP_COLUMNS // self.columns))
        # A stream has its size in the directory, and half a byte of padding.
        of_table = STREAMS * (2 * tiles_huffman.SIZE_BYTES + 1) // 2
        return (groups * n_tables + (layout.tail_columns > 0)) * of_table

    def coder_bytes(self, columns: int) -> int:
        return tiles_huffman.DECODER_BYTES * self.n_tables + _scratch_bytes(columns)

    def put_tables(self, counts: NDArray[np.int64], used: Array8, head: Array8, bit: int) -> tuple[Tables, int]:
        lengths = np.empty(counts.shape, np.uint8)
        tile_heads.fit_lengths(counts, used, lengths)
        return lengths, tile_heads.put_lengths(lengths, head, bit)

    def encode(self, words: Words, runs: Sequence[Run], tables: Tables, raw: Array8, room: int) -> Coded | None:
        prepared = BUFFERS.take("tables", self.n_tables * tiles_huffman.ENCODER_BYTES).reshape(self.n_tables, -1)
        tiles_huffman.encoder_tables(tables, prepared)
        columns = max(run.columns for run in runs)
        # Kernels ask for two bytes for each symbol of a group.
        group_words = TILE_ROWS * max(columns, tiles_huffman.GROUP_COLUMNS)
        stream = BUFFERS.take("stream", room + 2 * group_words + SLACK)
        escapes = BUFFERS.take("escapes", words.size // 2 + 1024, np.uint16)
        scratch = BUFFERS.take("scratch", _scratch_bytes(columns))
        geometry = self.geometry(8 * words.itemsize)
        at, n_escapes = 0, 0
        for run in runs:
            at, n_escapes = tiles_huffman.encode_tiles(
                words[run.words], run.columns, *run.contexts, geometry, prepared, raw[run.raw_at :],
                stream[: stream.size - SLACK], at, escapes, n_escapes, scratch,
            )  # fmt: skip
            if at < 0:
                return None
        return Coded(NO_LEVELS, escapes[:n_escapes], stream[:at])

    def decoder(self) -> Decoder:
        return tiles_huffman.decode_literal, tiles_huffman.DECODER_BYTES, _scratch_bytes


def _scratch_bytes(columns: int) -> int:
    return tiles_huffman.SCRATCH_BYTES + tiles_huffman.SCRATCH_BYTES_PER_COLUMN * columns
