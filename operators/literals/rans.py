"""Range asymmetric numeral systems: codes of fractions of a bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, BlockSource, Encoding, Plan, Profile, Stream, Writer
from operators.errors import FormatError
from operators.kernels.rans import (
    MAX_BITS,
    MIN_BITS,
    START,
    best_frequencies,
    decode_words,
    decoding_table,
    encode_run,
    encoding_table,
)
from operators.literals.tables import Integers, table_bytes, take_alphabet
from operators.words import Bytes, Words, container

RUN_BLOCKS = 32
"""Blocks that share their states, so that these cost a ten-thousandth of the payload."""
RUN_WORDS = RUN_BLOCKS * BLOCK_WORDS
DIRECTORY_BYTES = 4
"""Bytes of the size of a run."""


def lanes_of(n_words: int) -> int:
    """Return the lanes of a run of `n_words`."""
    if n_words >= 1 << 16:
        return 64
    return 8 if n_words >= 1 << 11 else 1


def _runs(stream: Stream) -> list[int]:
    """Return the words of each run."""
    whole, rest = divmod(stream.n_words, RUN_WORDS)
    return [RUN_WORDS] * whole + [rest] * (rest > 0)


class _Writer(Writer):
    def __init__(self, plan: _Plan, out: NDArray[np.uint8]) -> None:
        stream = plan.stream
        self._bits = plan.bits
        self._runs = _runs(stream)
        self._reciprocals = np.zeros(1 << stream.width_bits, np.uint64)
        self._rows = np.zeros(1 << stream.width_bits, np.uint64)
        encoding_table(plan.symbols, plan.frequencies, plan.bits, self._reciprocals, self._rows)
        longest = max(self._runs)
        self._kept = np.empty(longest, container(stream.width_bits))
        self._n_kept = 0
        self._scratch = np.empty(2 * longest + 2, np.uint8)
        self._out = out
        self._sizes: list[int] = []
        self._directory = len(plan.head)
        self._end = self._directory + DIRECTORY_BYTES * (len(self._runs) - 1)
        out[: self._directory] = np.frombuffer(plan.head, np.uint8)

    def add(self, words: Words) -> None:
        self._kept[self._n_kept : self._n_kept + words.size] = words
        self._n_kept += words.size
        if self._n_kept == self._runs[len(self._sizes)]:
            states = np.full(lanes_of(self._n_kept), START, np.uint64)
            run = self._kept[: self._n_kept]
            start = encode_run(run, self._bits, self._reciprocals, self._rows, states, self._scratch)
            first = self._end
            for part in (states.astype("<u4").view(np.uint8), self._scratch[start:]):
                self._out[self._end : self._end + part.size] = part
                self._end += part.size
            self._sizes.append(self._end - first)
            self._n_kept = 0

    def finish(self) -> Bytes:
        directory = np.array(self._sizes[:-1], "<u4").view(np.uint8)
        self._out[self._directory : self._directory + directory.size] = directory
        return self._out[: self._end].data


@dataclass(frozen=True, slots=True, eq=False)
class _Plan(Plan):
    stream: Stream
    bits: int
    symbols: Integers
    frequencies: Integers
    head: bytes
    n_bytes: int

    @property
    def room(self) -> int:
        # `n_bytes` holds for words in an order that has nothing to do with the states; this bound for all.
        return self.n_bytes + (self.stream.n_words >> 4)

    def writer(self, out: NDArray[np.uint8] | None = None) -> Writer:
        return _Writer(self, np.empty(self.room, np.uint8) if out is None else out)


class _Source(BlockSource):
    def __init__(self, stream: Stream, payload: NDArray[np.uint8], starts: Integers, bits: int, table: Words) -> None:
        super().__init__(stream)
        self._payload = payload
        self._starts = starts
        self._bits = bits
        self._table = table
        self._states = np.empty(0, np.uint64)
        self._at = 0

    def decode_block(self, index: int, out: Words) -> None:
        run, block = divmod(index, RUN_BLOCKS)
        run_words = min(RUN_WORDS, self.stream.n_words - run * RUN_WORDS)
        end = int(self._starts[run + 1])
        if block == 0:
            start = int(self._starts[run])
            self._at = start + 4 * lanes_of(run_words)
            if self._at > end:
                raise FormatError(f"{lanes_of(run_words)} states", f"{end - start} bytes", f"run {run}")
            self._states = self._payload[start : self._at].view("<u4").astype(np.uint64)
        self._at = decode_words(self._payload, self._at, end, self._bits, self._table, self._states, out)
        is_last = block * BLOCK_WORDS + out.size == run_words
        if self._at < 0 or (is_last and (self._at != end or (self._states != START).any())):
            raise FormatError("a rANS run that ends in its start states", "a damaged one", f"block {index}")


class Rans(Encoding):
    """Words of up to 16 bits, 2 to 16384 different ones, by rANS.

    Payload: one byte, table, directory, runs.

    - The byte is ``bits``, 12 to 14.
    - Table: that of `operators.kernels.alphabet`, values are frequencies, which add up to ``2**bits``; a
      level is the bit length of the frequency less one. Words take their slots in increasing order.
    - The words are cut into runs of 2**22, the last one shorter.
    - Directory: the bytes of every run but the last, four bytes each, little-endian.
    - A run: the states of its lanes, four bytes each, little-endian, then the stream of two-byte words,
      little-endian, as in `operators.kernels.rans`. A run of 65536 words and more has 64 lanes, one of 2048
      and more has 8, a shorter one has 1. After the last word every state is 2**16 and the stream is used up.
    """

    code = 67
    name = "rans"

    def plan(self, profile: Profile) -> Plan | None:
        stream = profile.stream
        if profile.counts is None or not stream.n_words:
            return None
        symbols = np.flatnonzero(profile.counts) if profile.live is None else profile.live
        if not 2 <= symbols.size <= 1 << MAX_BITS:
            return None
        counts = profile.counts[symbols]
        runs = _runs(stream)
        fixed = DIRECTORY_BYTES * (len(runs) - 1) + sum(4 * lanes_of(run) + 2 for run in runs)
        frequencies, levels = np.empty_like(counts), np.empty_like(counts)
        bits, word_bits = best_frequencies(counts, frequencies, levels)
        head = bytes((bits,)) + table_bytes(symbols, levels, frequencies)
        # What a finite state loses is far below this margin (tested).
        n_bytes = len(head) + fixed + (word_bits + (word_bits >> 12) + 7 >> 3)
        return _Plan(stream, bits, symbols, frequencies, head, n_bytes)

    def source(self, payload: memoryview, stream: Stream) -> BlockSource:
        bits = payload[0] if len(payload) else 0
        if not MIN_BITS <= bits <= MAX_BITS:
            raise FormatError(f"frequencies of {MIN_BITS} to {MAX_BITS} bits", str(bits), "literal")
        symbols, _, frequencies, table_bytes_ = take_alphabet(payload[1:], stream.width_bits, with_values=True)
        if symbols.size < 2 or int(frequencies.sum()) != 1 << bits:
            raise FormatError(f"frequencies that add up to {1 << bits}", str(frequencies.sum()), "literal")
        n_runs = len(_runs(stream))
        table_end = 1 + table_bytes_
        start = table_end + DIRECTORY_BYTES * max(n_runs - 1, 0)
        if start > len(payload) or not n_runs:
            raise FormatError(f"{n_runs} runs", f"{len(payload)} bytes", "literal")
        sizes = np.frombuffer(payload[table_end:start], "<u4").astype(np.int64)
        starts = np.concatenate(([start], start + np.cumsum(sizes), [len(payload)]))
        if (np.diff(starts) < 0).any():
            raise FormatError(f"runs of {len(payload) - start} bytes", f"{sizes.sum()}", "literal")
        table = np.empty(1 << bits, np.uint64)
        decoding_table(symbols, frequencies, table)
        return _Source(stream, np.frombuffer(payload, np.uint8), starts, bits, table)
