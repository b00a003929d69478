"""Canonical Huffman codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, BlockSource, Encoding, Plan, Profile, Stream, Writer
from operators.errors import FormatError
from operators.kernels.huffman import (
    MAX_LENGTH,
    PRIMARY_BITS,
    SPLIT_WORDS,
    STREAMS,
    canonical_codes,
    code_lengths,
    decode_block,
    decoding_tables,
    encode_block,
    encoding_table,
)
from operators.literals.tables import Integers, table_bytes, take_alphabet
from operators.words import Bytes, Words, container


def streams_of(n_words: int) -> int:
    """Return the streams of a block of `n_words`."""
    return STREAMS if n_words >= SPLIT_WORDS else 1


def all_streams_of(stream: Stream) -> int:
    """Return the streams of all blocks of a literal."""
    whole, rest = divmod(stream.n_words, BLOCK_WORDS)
    return whole * STREAMS + (streams_of(rest) if rest else 0)


class _Writer(Writer):
    def __init__(self, plan: _Plan, out: NDArray[np.uint8]) -> None:
        stream = plan.stream
        self._coded = plan.symbols.size > 1
        n_streams = all_streams_of(stream) if self._coded else 0
        self._sizes = np.zeros(n_streams, np.uint16)
        self._first = 0
        directory_bytes = 2 * max(n_streams - 1, 0)
        self._out = out
        self._directory = self._out[len(plan.table) : len(plan.table) + directory_bytes]
        self._end = len(plan.table) + directory_bytes
        self._out[: len(plan.table)] = np.frombuffer(plan.table, np.uint8)
        if self._coded:
            codes = np.empty_like(plan.lengths)
            canonical_codes(plan.lengths, codes)
            self._table = np.zeros(1 << stream.width_bits, np.uint64)
            encoding_table(plan.symbols, plan.lengths, codes, self._table)
            block_words = min(BLOCK_WORDS, stream.n_words)
            self._scratch = np.empty(2 * block_words + 18 * STREAMS, np.uint8)

    def add(self, words: Words) -> None:
        if self._coded and words.size:
            sizes = self._sizes[self._first : self._first + streams_of(words.size)]
            self._end += encode_block(words, self._table, self._out[self._end :], self._scratch, sizes)
            self._first += sizes.size

    def finish(self) -> Bytes:
        self._directory.view("<u2")[:] = self._sizes[: self._directory.size // 2]
        return self._out[: self._end].data


@dataclass(frozen=True, slots=True, eq=False)
class _Plan(Plan):
    stream: Stream
    symbols: Integers
    lengths: Integers
    table: bytes
    n_bytes: int

    def writer(self, out: NDArray[np.uint8] | None = None) -> Writer:
        return _Writer(self, np.empty(self.room, np.uint8) if out is None else out)


class _Source(BlockSource):
    def __init__(
        self,
        stream: Stream,
        payload: NDArray[np.uint8],
        starts: Integers,
        symbols: Integers,
        lengths: Integers,
        codes: Integers,
    ) -> None:
        super().__init__(stream)
        self._payload = payload
        self._starts = starts
        self._many = np.empty(1 << PRIMARY_BITS, np.uint64)
        self._single = np.empty(1 << max(PRIMARY_BITS, int(lengths.max())), np.uint32)
        decoding_tables(symbols, lengths, codes, container(stream.width_bits).itemsize, self._single, self._many)

    def decode_block(self, index: int, out: Words) -> None:
        first = index * STREAMS
        starts = self._starts[first : first + streams_of(out.size) + 1]
        if decode_block(self._payload, starts, self._many, self._single, out.view(np.uint8), out):
            raise FormatError("Huffman streams that end where they should", "damaged ones", f"block {index}")


class _Constant(BlockSource):
    def __init__(self, stream: Stream, word: int) -> None:
        super().__init__(stream)
        self._word = word

    def decode_block(self, index: int, out: Words) -> None:
        out.fill(self._word)


class Huffman(Encoding):
    """Words of up to 16 bits, at most 16384 different ones, by canonical codes of 1 to 14 bits.

    Payload: table, directory, streams.

    - Table: that of `operators.kernels.alphabet`, levels are code lengths, no values. Codes are canonical:
      in the order of (length, word), each the one before plus one, shifted left where the length grows. The
      lengths must make a complete code. A single word has length 0, and then the payload ends here.
    - The words are cut into blocks of 131072, the last one shorter. A block of n >= 4096 words has four
      streams, of ``q = ceil(n / 4)`` words each and the last of what is left; a smaller one has one stream.
    - Directory: the bytes of every stream but the very last, in order, two bytes each, little-endian.
    - Streams: the codes of the words in order, each with its most significant bit first; bits fill bytes from
      the least significant one. The bits left in the last byte of a stream are zero. Streams follow one
      another and the last ends with the payload.
    """

    code = 66
    name = "huffman"

    def plan(self, profile: Profile) -> Plan | None:
        stream = profile.stream
        if profile.counts is None or not stream.n_words:
            return None
        symbols = np.flatnonzero(profile.counts) if profile.live is None else profile.live
        if symbols.size > 1 << MAX_LENGTH:
            return None
        counts = profile.counts[symbols]
        lengths = np.empty_like(counts)
        n_bits = code_lengths(counts, lengths)
        table = table_bytes(symbols, lengths)
        n_streams = all_streams_of(stream) if symbols.size > 1 else 0
        # Every stream may leave up to 7 bits of its last byte.
        n_bytes = len(table) + 2 * max(n_streams - 1, 0) + (n_bits + 7 * n_streams >> 3)
        return _Plan(stream, symbols, lengths, table, n_bytes)

    def source(self, payload: memoryview, stream: Stream) -> BlockSource:
        symbols, lengths, _, table_end = take_alphabet(payload, stream.width_bits, with_values=False)
        codes = np.empty_like(lengths)
        if canonical_codes(lengths, codes):
            raise FormatError("a complete Huffman code", "other lengths", "literal")
        n_streams = all_streams_of(stream) if symbols.size > 1 else 0
        start = table_end + 2 * max(n_streams - 1, 0)
        if start > len(payload) or not stream.n_words:
            raise FormatError(f"{n_streams} streams of {stream}", f"{len(payload)} bytes", "literal")
        sizes = np.frombuffer(payload[table_end:start], "<u2")
        if start + int(sizes.sum(dtype=np.int64)) > len(payload):
            raise FormatError(f"streams of {len(payload) - start} bytes", f"{sizes.sum()}", "literal")
        if symbols.size == 1:
            if start != len(payload):
                raise FormatError("no streams for a single word", f"{len(payload) - start} bytes", "literal")
            return _Constant(stream, int(symbols[0]))
        starts = np.empty(n_streams + 1, np.int64)
        starts[0] = start
        starts[1:-1] = start + np.cumsum(sizes, dtype=np.int64)
        starts[-1] = len(payload)
        return _Source(stream, np.frombuffer(payload, np.uint8), starts, symbols, lengths, codes)
