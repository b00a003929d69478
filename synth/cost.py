"""What a program would cost, in integer units of 1/256 bit, judged on a sample.

Costs order and accept; they never decide alone: the finalists are weighed by the bytes that the
emitter writes (`synth.finish`).

Three guards make a small sample enough. Entropies come from Grassberger's estimator. An alphabet with
more live symbols than a sixth of the sample is taken as not entropy-coded: its table is unknown. The size of
a table counts the symbols that the sample has missed, by Chao's estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from operators.base import Operator, Profile, Stream
from operators.kernels.costing import huffman_bits
from operators.literals.profile import choose
from operators.words import Words
from synth.features import NARROW_BITS, Summary

Q8 = 256
"""Costs are integers in units of ``1 / Q8`` bit."""
BYTE_Q8 = 8 * Q8
RECORD_Q8 = 44 * BYTE_Q8
"""The fixed part of a record: header and digest."""
GUARD = 6
"""Words of a sample per live symbol, at least, where an alphabet is to be entropy-coded."""


@dataclass(frozen=True, slots=True)
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
    return payload_q8 + BYTE_Q8 * (1 + _varint_bytes(n_bytes))


def literal_cost(summary: Summary, stream: Stream, lz_q8: int | None = None) -> LiteralCost:
    """Return the cheapest literal of `stream`.

    Parameters
    ----------
    summary : Summary
        Of a sample of the stream, or of all of it.
    stream : Stream
    lz_q8 : int, optional
        Estimated payload of an LZ literal, where one was tried.
    """
    n, n_sample = stream.n_words, summary.n_words
    best, encoding = n * stream.width_bits * Q8, "raw"
    if n == 0 or n_sample == 0:
        return LiteralCost(literal_q8(0), encoding, 0)
    exact = n == n_sample
    packed_bits = summary.largest.bit_length()
    packed = n * packed_bits * Q8 + BYTE_Q8
    if packed < best:
        best, encoding = packed, "bitpack"
    floor = min(best, summary.entropy_q20 * n // n_sample >> 12)
    if summary.counts is not None and (exact or GUARD * summary.live <= n_sample):
        entropy_q20 = summary.entropy_q20 if exact else max(summary.entropy_q20, summary.smooth_q20)
        entropy = entropy_q20 * n // n_sample >> 12
        live = summary.live if exact else min(summary.chao, n, 1 << stream.width_bits)
        coded = entropy + entropy // 4096 + _table_q8(live) + STATE_Q8
        if coded < best:
            best, encoding = coded, "rans"
        if n_sample < 400 * summary.live:
            counts = np.sort(summary.counts[summary.counts > 0])
            huffman = huffman_bits(counts, np.empty_like(counts)) * Q8 * n // n_sample
            if not exact and summary.entropy_q20:
                # The sample flatters its own code by as much as it flatters its own entropy.
                huffman = huffman * entropy_q20 // summary.entropy_q20
            huffman += _table_q8(live)
            if huffman < best:
                best, encoding = huffman, "huffman"
    if lz_q8 is not None and lz_q8 * 100 < best * 97:
        best, encoding = lz_q8, "lz"
    return LiteralCost(literal_q8(best), encoding, floor)


STATE_Q8 = 16 * BYTE_Q8


def _table_q8(live: int) -> int:
    return live * BYTE_Q8 + 4 * BYTE_Q8


def exact_literal(summary: Summary, stream: Stream) -> tuple[int, str]:
    """Return the cost and the encoding of a literal whose words are all known, as the emitter would choose them."""
    name, plan = choose(Profile(stream, summary.counts, summary.largest))
    return plan.n_bytes * BYTE_Q8 + BYTE_Q8 * (1 + _varint_bytes(plan.n_bytes)), name


def lz_trial(words: Words, stream: Stream) -> int | None:
    """Return the LZ payload of `stream` in 1/256 bit, or None where a first block of its sample says it is not worth it."""
    return None


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))


assert NARROW_BITS == 16
