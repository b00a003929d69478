"""The first pass over a literal, and the choice that it leads to."""

from __future__ import annotations

import numpy as np

from operators.base import BLOCK_WORDS, Plan, Profile, Stream
from operators.kernels.histogram import Histogram
from operators.kernels.repeats import WIDE_WINDOW, repeats, window_of
from operators.literals.lz import LzTrial
from operators.words import Words

RANS_GAIN = 64
"""rANS decodes slower than Huffman codes: a large literal has to save one part of theirs in this many."""
LZ_GAIN = 64
"""LZ writes and reads slower than everything else: a large literal has to save one part in this many."""
LARGE_WORDS = 1 << 16
"""Below this many words a literal takes too little time for a trade: the fewest bytes win."""


def faster_bound(encoding: str, n_bytes: int, n_words: int) -> int:
    """Return the bytes below which a slower `encoding` is taken in place of a faster one of `n_bytes`.

    The trade is fixed by the writer, so a choice depends on the words alone. Any unit will do.
    """
    gain = {"rans": RANS_GAIN, "lz": LZ_GAIN}.get(encoding)
    return n_bytes - n_bytes // gain if gain and n_words >= LARGE_WORDS else n_bytes


class Profiler:
    """Profiles one literal, block by block.

    Parameters
    ----------
    stream : Stream
        Type of the literal.
    encoding : str
        Name of the encoding that will write it, where that is known: what it does not need is left out, and
        counting noise is a third of the time that packing it takes. By default all are to be compared.
    """

    def __init__(self, stream: Stream, encoding: str = "") -> None:
        self._stream = stream
        is_counted = stream.width_bits <= 16 and encoding not in ("raw", "bitpack", "lz")
        self._histogram = Histogram(stream.width_bits, stream.n_words) if is_counted else None
        self._largest = 0
        self._always_lz = encoding == "lz"
        self._lz = LzTrial(stream, always=self._always_lz) if encoding in ("", "lz") else None

    def add(self, words: Words) -> None:
        """Count the next words; `words` is not kept."""
        if self._histogram is not None:
            self._histogram.add(words)
        elif words.size:
            self._largest = max(self._largest, int(words.max()))
        if self._lz is not None and (self._always_lz or words.size < self._stream.n_words or self._repeats(words)):
            self._lz.add(words)

    def _repeats(self, words: Words) -> bool:
        """Whether the words of a literal, all of them, repeat others: a block that does not is no case for LZ."""
        if not 0 < words.size <= BLOCK_WORDS:
            return words.size > 0
        if self._histogram is None:
            return repeats(words, WIDE_WINDOW)
        return repeats(words, window_of(self._histogram.counts()))

    def finish(self) -> Profile:
        """Return what was counted."""
        lz_payload = None if self._lz is None else self._lz.finish()
        if self._histogram is None:
            return Profile(self._stream, None, self._largest, lz_payload)
        counts = self._histogram.counts()
        live = np.flatnonzero(counts)
        return Profile(self._stream, counts, int(live[-1]) if live.size else 0, lz_payload, live)


def choose(profile: Profile) -> tuple[str, Plan]:
    """Return the name and the plan of the encoding that takes the fewest bytes.

    Ties go to the lower code; a slower encoding has to be below `faster_bound`.
    """
    from operators.registry import ENCODINGS

    chosen: tuple[str, Plan] | None = None
    for encoding in ENCODINGS.values():
        plan = encoding.plan(profile)
        if plan is None:
            continue
        n_words = profile.stream.n_words
        if chosen is None or plan.n_bytes < faster_bound(encoding.name, chosen[1].n_bytes, n_words):
            chosen = encoding.name, plan
    assert chosen is not None, "bitpack takes any words"
    return chosen
