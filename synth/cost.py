"""What a program would cost, in integer units of 1/256 bit, judged on a sample.

Costs order and accept; they never decide alone: the finalists are weighed by the bytes that the emitter
writes, where the words are few enough, or on a larger sample (`synth.template.weigh`).

Three guards make a small sample enough. Entropies come from Grassberger's estimator. An alphabet with
more live symbols than a sixth of the sample is taken as not entropy-coded: its table is unknown. The size of
a table, and of the code space that rare symbols take, counts those that the sample has missed.
"""

from __future__ import annotations

from dataclasses import dataclass

import zstandard

from operators.base import BLOCK_WORDS, Operator, Stream
from operators.literals.profile import Profiler, choose, faster_bound
from operators.literals.rans import RUN_WORDS, lanes_of
from operators.words import Words
from synth.features import Summary
from synth.logs import log_q20

Q8 = 256
"""Costs are integers in units of ``1 / Q8`` bit."""
BYTE_Q8 = 8 * Q8
HUFFMAN_FIXED_BITS = 80
"""Head of a table, sizes of streams, bits left over."""
RANS_FIXED_BITS = 32
PIECES = 64
PROBE_BYTES = 1 << 10
"""Bytes of each piece, on which LZ has to save one part in `PROBE_GAIN` to be looked at further."""
PROBE_GAIN = 64
FRAME_BYTES = 10
"""What each piece takes for the frame around it, and the whole stream but once."""
LZ_SAMPLE_BYTES = 8 << 10
"""Bytes of each piece on which LZ is then judged."""
WHOLE_PROBE_BYTES = 512 << 10
"""Streams up to this size are probed whole: rows that mirror one another lie far apart."""
RANS_LOSS = 2048
"""One part in so many is lost to frequencies that are multiples of a power of two."""


@dataclass(slots=True)
class LiteralCost:
    """The cheapest literal of a stream.

    Attributes
    ----------
    bits_q8 : int
        With its node on the wire.
    encoding : str
    floor_q8 : int
        What no code of single words can go below, nor any set of codes of single fields of them: the
        empirical entropy. Compression by matches (lz) is not bounded by it.
    """

    bits_q8: int
    encoding: str
    floor_q8: int


def node_q8(op: Operator) -> int:
    """Return the cost of an operator on the wire."""
    return BYTE_Q8 * (2 + sum(_varint_bytes(param) for param in op.params))


def literal_q8(payload_q8: int) -> int:
    """Return the cost of a literal: its payload in whole bytes, its code and the length of its payload."""
    n_bytes = -(-payload_q8 // BYTE_Q8)
    return BYTE_Q8 * (n_bytes + 1 + _varint_bytes(n_bytes))


def literal_cost(summary: Summary, stream: Stream, lz_q8: int | None = None) -> LiteralCost:
    """Return the cost of the literal that the emitter would choose (`operators.literals.profile.choose`).

    Parameters
    ----------
    summary : Summary
        Of a sample of the stream, or of all of it.
    stream : Stream
    lz_q8 : int, optional
        Estimated payload of an LZ literal, where one was tried.
    """
    n, n_sample = stream.n_words, summary.n_words
    best, encoding = n * summary.largest.bit_length() * Q8, "bitpack"
    if n == 0 or n_sample == 0:
        return LiteralCost(literal_q8(0), encoding, 0)
    floor = min(best, summary.entropy_q20 * n // n_sample >> 12)
    if summary.huffman_bits >= 0:
        huffman, rans = _coded_q8(summary, stream)
        if huffman < best:
            best, encoding = huffman, "huffman"
        if rans < faster_bound("rans", best, n):
            best, encoding = rans, "rans"
    if lz_q8 is not None and lz_q8 < faster_bound("lz", best, n):
        best, encoding = lz_q8, "lz"
    return LiteralCost(literal_q8(best), encoding, floor)


def _coded_q8(summary: Summary, stream: Stream) -> tuple[int, int]:
    """Return the payloads of a Huffman and of a rANS literal."""
    n, n_sample, seen = stream.n_words, summary.n_words, summary.live
    entropy_q20, live = summary.entropy_q20, seen
    if n != n_sample:
        entropy_q20 = max(entropy_q20, summary.smooth_q20)
        live = min(seen + summary.unseen(n), n, 1 << stream.width_bits)
    gaps, lengths, frequencies = summary.table_bits
    table = min(gaps, seen * ((summary.largest // seen).bit_length() + 2)) + min(lengths, 4 * seen)
    huffman = summary.huffman_bits * Q8 * n // n_sample
    if summary.entropy_q20 and seen > 2:
        # The sample flatters its own code by as much as it flatters its own entropy.
        huffman = huffman * entropy_q20 // summary.entropy_q20
    # Each word takes at least one of 2**14 frequencies, or of 2**15 places in the space of codes, however rare
    # it is; those too that the sample has missed.
    taken_q24 = summary.rare_q24 + (live - seen << 10)
    huffman += (n * _loss_q20(taken_q24 >> 1) >> 12) + (table * live // seen + HUFFMAN_FIXED_BITS) * Q8
    rans = entropy_q20 * n // n_sample + n * _loss_q20(taken_q24) >> 12
    rans += rans // RANS_LOSS
    rans += ((table + frequencies) * live // seen + RANS_FIXED_BITS) * Q8
    return huffman, rans + lanes_of(n) * 32 * Q8 * (1 + n // RUN_WORDS)


def _loss_q20(taken_q24: int) -> int:
    """Return the bits per word that are lost where a part of all codes is taken by words that hardly occur."""
    return log_q20(1 << 24) - log_q20(max(1, (1 << 24) - taken_q24))


def exact_literal(words: Words, stream: Stream, *, with_lz: bool) -> tuple[int, str]:
    """Return the cost and the encoding of a literal of `words`, the whole of `stream`, as the emitter chooses them.

    Parameters
    ----------
    words : Words
    stream : Stream
    with_lz : bool
        Whether LZ is tried too, which is slow.
    """
    profiler = Profiler(stream, "" if with_lz else "rans")  # what rANS needs serves all but LZ
    for start in range(0, words.size, BLOCK_WORDS):
        profiler.add(words[start : start + BLOCK_WORDS])
    name, plan = choose(profiler.finish())
    return literal_q8(plan.n_bytes * BYTE_Q8), name


class LzProbe:
    """Estimates LZ literals; one per search, since compressors are costly to make and not to be shared."""

    def __init__(self) -> None:
        self._fast = zstandard.ZstdCompressor(level=1)
        self._fair = zstandard.ZstdCompressor(level=3)

    def payload_q8(self, words: Words, stream: Stream, literal_q8: int) -> int | None:
        """Return the payload of `stream`, or None where a first part says that it is not worth it.

        Parameters
        ----------
        words : Words
            Neighbours in the stream, as many as are at hand.
        stream : Stream
        literal_q8 : int
            What the stream costs without matches.
        """
        whole = words.size == stream.n_words and words.nbytes <= WHOLE_PROBE_BYTES
        probe = self._judge(self._fast, [words] if whole else _pieces(words, PROBE_BYTES), stream)
        if probe >= literal_q8 - literal_q8 // PROBE_GAIN:
            return None
        return self._judge(self._fair, [words] if whole else _pieces(words, LZ_SAMPLE_BYTES), stream)

    @staticmethod
    def _judge(compressor: zstandard.ZstdCompressor, pieces: list[Words], stream: Stream) -> int:
        """Return what `stream` would take by the mean of `pieces`."""
        n_bytes = sum(len(compressor.compress(piece.data)) - FRAME_BYTES for piece in pieces)
        return BYTE_Q8 * n_bytes * stream.n_words // (len(pieces) * pieces[0].size)


def _pieces(words: Words, n_bytes: int) -> list[Words]:
    """Return `PIECES` equal parts of `words`, spread over all of them, or all in one.

    Many and far apart: the first rows of a table are often like no others.
    """
    size = n_bytes // words.itemsize
    if words.size <= PIECES * size:
        return [words]
    step = (words.size - size) // (PIECES - 1)
    return [words[start : start + size] for start in range(0, PIECES * step, step)]


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))
