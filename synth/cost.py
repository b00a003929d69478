"""What a program would cost, in integer units of 1/256 bit, judged on a sample.

Costs order and accept; they never decide alone: the finalists are weighed by the bytes that the emitter
writes, where the words are few enough, or on a larger sample (`synth.template.weigh`).

Three guards make a small sample enough. Entropies come from Grassberger's estimator. An alphabet with
more live symbols than a sixth of the sample is taken as not entropy-coded: its table is unknown. The size of
a table, and of the code space that rare symbols take, counts those that the sample has missed.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, Parametric, Stream
from operators.kernels.judging import LISTED_WORDS, LIVE_AT, PLACES_AT, judge_narrow, judge_wide
from operators.literals.lz import compressor_of
from operators.literals.profile import LARGE_WORDS, RANS_GAIN, Profiler, choose, faster_bound
from operators.literals.rans import RUN_WORDS, lanes_of
from operators.words import Words
from synth.features import NARROW_BITS, SCRATCH, Features, Summary
from synth.logs import ALL_LOGS
from synth.sample import gathered, spread

Q8 = 256
"""Costs are integers in units of ``1 / Q8`` bit."""
BYTE_Q8 = 8 * Q8
PROBE_PIECES, PROBE_BYTES = 16, 1 << 10
"""Pieces, and bytes of each, on which LZ has to save one part in `PROBE_GAIN` to be looked at further."""
PROBE_GAIN = 64
MATCHED = 256
"""Part that matches alone have to save of words which have any."""
BYTES_JUDGED = 16 << 10
"""Bytes of which a code is judged where there are no matches."""
FRAME_BYTES = 10
"""What the frame around a sample takes, and around the whole stream."""
FAIR_PIECES, FAIR_BYTES = 32, 4 << 10
"""Those on which LZ is then judged."""
WHOLE_PROBE_BYTES = 512 << 10
"""Streams up to this size are probed whole: rows that mirror one another lie far apart."""
GUARD = 6
"""Words of a sample per live symbol, at least, where an alphabet is to be entropy-coded."""
_ENCODINGS = ("bitpack", "huffman", "rans")
Counted: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]
"""How often each word of a sample occurs, and those words in ascending order."""
NOT_COUNTED: Counted = (np.empty(0, np.int64), np.empty(0, np.int64))


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
    payload_q8 : int
        Without its node.
    """

    bits_q8: int
    encoding: str
    floor_q8: int
    payload_q8: int

    def or_lz(self, lz_q8: int, stream: Stream) -> LiteralCost:
        """Return the cost of the literal that the emitter would choose where LZ takes `lz_q8`, payload alone."""
        if lz_q8 >= faster_bound("lz", self.payload_q8, stream.n_words):
            return self
        return LiteralCost(literal_q8(lz_q8), "lz", self.floor_q8, lz_q8)


@dataclass(slots=True)
class Verdict:
    """What is known of a stream by its sample."""

    summary: Summary
    features: Features
    literal: LiteralCost
    """LZ left out."""


@functools.lru_cache(maxsize=1 << 12)
def node_q8(op: Parametric) -> int:
    """Return the cost of a node with parameters on the wire."""
    return BYTE_Q8 * (2 + sum(_varint_bytes(param) for param in op.params))


def literal_q8(payload_q8: int) -> int:
    """Return the cost of a literal: its payload in whole bytes, its code and the length of its payload."""
    n_bytes = -(-payload_q8 // BYTE_Q8)
    return BYTE_Q8 * (n_bytes + 1 + _varint_bytes(n_bytes))


def judge(
    words: Words,
    shift: int,
    stream: Stream,
    *,
    row_below: tuple[int, int] = (0, 0),
    closed: bool = False,
    counted: Counted = NOT_COUNTED,
) -> Verdict:
    """Judge the bit field of ``stream.width_bits`` bits at `shift` of the words of a sample.

    Parameters
    ----------
    words : Words
        At most `MAX_WORDS`.
    shift : int
    stream : Stream
        The whole. A part of it has to show each word `GUARD` times, as a mean, before the cost of a code is
        worked out: else its table is unknown.
    row_below : (int, int)
        See `Sample.row_below`.
    closed : bool
        Whether neighbours do not matter.
    counted : Counted
        The counts of all `words`, where they are known.
    """
    n, n_sample, width_bits = stream.n_words, words.size, stream.width_bits
    scratch = SCRATCH
    found = scratch.verdict
    if width_bits <= NARROW_BITS:
        max_live = n_sample if n_sample == n else n_sample // GUARD
        tables = terms_of(n), ALL_LOGS, scratch.counts, scratch.room, found
        judge_narrow(words, shift, width_bits, *counted, max_live, not closed, *row_below, *tables)
        row = found.tolist()
    else:
        judge_wide(words, shift, width_bits, not closed, *row_below, n, scratch.slots, scratch.hits, found)
        row = found.tolist()
        row[6:8] = found[6:8].view(np.uint64).tolist()
    summary = Summary(n_sample, row[0], row[1], row[2], row[3], row[5], row[6], row[7], row[13])
    literal = LiteralCost(literal_q8(row[14]), _ENCODINGS[row[15]], row[16], row[14])
    seen: Features = tuple(row[17:])  # type: ignore[assignment]
    return Verdict(summary, seen, literal)


def counts_of(verdict: Verdict) -> Counted | None:
    """Return the counts that the last call of `judge` in this thread has left behind.

    None where it has no list of them, as most words occur but once: their fields are counted by the words as well.
    """
    live = verdict.summary.live
    if LISTED_WORDS * live >= verdict.summary.n_words:
        return None
    where = SCRATCH.room[LIVE_AT:][:live], SCRATCH.room[PLACES_AT:][:live]
    return where[0].copy(), where[1].copy()


@functools.lru_cache(maxsize=1 << 12)
def terms_of(n_words: int) -> NDArray[np.int64]:
    """Return what the cost of a literal takes from the length of its stream: see `weigh_counts`."""
    states_q8 = lanes_of(n_words) * 32 * Q8 * (1 + n_words // RUN_WORDS)
    return np.array([n_words, states_q8, RANS_GAIN if n_words >= LARGE_WORDS else 0], np.int64)


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


class _Compressors(threading.local):
    """Those of a thread: costly to make, and not to be shared."""

    def __init__(self) -> None:
        self.matcher = zstandard.ZstdCompressor(level=-1)
        self.fast = zstandard.ZstdCompressor(level=1)


_COMPRESSORS = _Compressors()


class LzProbe:
    """Estimates LZ literals; one per search, as it remembers what it has compressed."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Words, tuple[int, int]]] = {}

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
        probe = self._judge(_COMPRESSORS.fast, words, stream, PROBE_PIECES, PROBE_BYTES)
        if probe >= literal_q8 - literal_q8 // PROBE_GAIN:
            return None
        return self._judge(compressor_of(stream), words, stream, FAIR_PIECES, FAIR_BYTES)

    def has_matches(self, words: Words) -> bool:
        """Return whether words repeat others, as far as the fastest search tells: a tenth of the time of a probe."""
        n_bytes = self._compressed(_COMPRESSORS.matcher, words, 1, words.nbytes)[0]
        return n_bytes < words.nbytes - words.nbytes // MATCHED

    def _judge(
        self, compressor: zstandard.ZstdCompressor, words: Words, stream: Stream, n_pieces: int, piece_bytes: int
    ) -> int:
        """Return what `stream` would take by pieces of it, compressed together: repeats may lie far apart."""
        pieces = (1, words.nbytes) if is_whole(words, stream) else (n_pieces, piece_bytes)
        n_bytes, n_words = self._compressed(compressor, words, *pieces)
        return BYTE_Q8 * (n_bytes - FRAME_BYTES) * stream.n_words // n_words

    def _compressed(
        self, compressor: zstandard.ZstdCompressor, words: Words, n_pieces: int, piece_bytes: int
    ) -> tuple[int, int]:
        """Return the bytes that pieces of `words` take, and their words; once, as a finish looks at them again."""
        key = id(words), id(compressor)
        if key not in self._known:
            picked = _pieces(words, n_pieces, piece_bytes)
            self._known[key] = words, (len(compressor.compress(picked.data)), picked.size)
        return self._known[key][1]


def is_whole(words: Words, stream: Stream) -> bool:
    """Return whether `words` are all of a stream that is so small that it is probed whole."""
    return words.size == stream.n_words and words.nbytes <= WHOLE_PROBE_BYTES


def bytes_q8(words: Words, stream: Stream) -> int:
    """Return the payload of a stream coded byte by byte, by a sample: what LZ takes where there are no matches."""
    spread = np.ascontiguousarray(words[:: -(-words.nbytes // BYTES_JUDGED)])
    return judge(spread.view(np.uint8), 0, Stream(8, stream.n_bytes), closed=True).literal.payload_q8


def _pieces(words: Words, n_pieces: int, piece_bytes: int) -> Words:
    """Return equal pieces of `words`, spread over all of them, one after the other; or all.

    Many and far apart: the first rows of a table are often like no others.
    """
    run = piece_bytes // words.itemsize
    return words if words.size <= n_pieces * run else gathered(words, spread(n_pieces, words.size - run), run)


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))
