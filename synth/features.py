"""What a sample shows at a glance: the counts that costs need and the few features that priors see."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from operators.kernels import judging
from operators.kernels.costing import cut_sums, distinct_words
from operators.words import Words
from synth.logs import LOGS, log_q20

NARROW_BITS = judging.NARROW_BITS
FLAT = judging.FLAT
MAX_CUT_WORDS = 2048
"""Words on which cuts are ranked."""

Features: TypeAlias = tuple[int, int, int, int, int, int, int, int]
"""Buckets of entropy, equality with the previous word, distinct words, trailing and leading dead bits, length, and
of nearness to the previous word and to the one a row before."""


@dataclass(slots=True)
class Summary:
    """Counts over the words of a sample.

    Attributes
    ----------
    n_words : int
        Words of the sample.
    live, once, twice : int
        Distinct words, and those that occur once and twice.
    entropy_q20 : int
        Empirical entropy of all words of the sample together. Units of 2**-20 bit; 0 for wide words.
    equal : int
        Words equal to the one before.
    varying : int
        Or of all differences to the first word.
    largest : int
    by_chance : int
        Words that would equal the one before in random order; 0 for wide words.
    """

    n_words: int
    live: int
    once: int
    twice: int
    entropy_q20: int
    equal: int
    varying: int
    largest: int
    by_chance: int

    @property
    def repeats(self) -> bool:
        """Whether words equal the one before clearly more often than in random order."""
        return 8 * self.equal > 9 * self.by_chance + self.n_words // 32

    @property
    def chao(self) -> int:
        """Chao's lower bound of the distinct words of the whole, from those seen once and twice."""
        return self.live + self.once * (self.once - 1) // (2 * (self.twice + 1))


def cut_entropies(words: Words, width_bits: int) -> list[tuple[int, int]]:
    """Return, for each cut 1 to ``width_bits - 1``, the entropies of the low and the high half of the words.

    Units of 2**-20 bit per `MAX_CUT_WORDS` or fewer words, spread over all; -1 for a half of more than
    `NARROW_BITS`.
    """
    words = np.ascontiguousarray(words[:: -(-words.size // MAX_CUT_WORDS)])
    sums = np.empty((width_bits, 2), np.int64)
    scratch = np.empty((2, words.size), np.int64)
    cut_sums(words, width_bits, LOGS, SCRATCH.counts, scratch[0], scratch[1], sums)
    whole = words.size * log_q20(words.size)
    return [(-1 if low < 0 else whole - low, -1 if high < 0 else whole - high) for low, high in sums[1:].tolist()]


class Scratch(threading.local):
    """What the kernels of a thread write to, made once: tables of zeros, which they leave so, and room for anything."""

    def __init__(self) -> None:
        size = 1 << NARROW_BITS
        self.counts = np.zeros(size, np.int32)
        self.room = np.zeros(judging.ROOM, np.int64)
        self.slots = np.empty(judging.SLOTS, np.uint64)
        self.hits = np.zeros(judging.SLOTS, np.int64)
        self.verdict = np.empty(judging.VERDICT, np.int64)


SCRATCH = Scratch()


def count_distinct(words: Words, limit: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]] | None:
    """Return the distinct words in some order and how often each occurs, or None where there are more than `limit`."""
    size = 1 << (2 * min(limit, words.size)).bit_length()
    slots, hits = np.empty(size, np.uint64), np.zeros(size, np.int64)
    n_distinct = int(distinct_words(words, limit, slots, hits))
    return None if n_distinct < 0 else (slots[:n_distinct], hits[:n_distinct])
