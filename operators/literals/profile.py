"""The first pass over a literal, and the choice that it leads to."""

from __future__ import annotations

import numpy as np

from operators.base import Plan, Profile, Stream
from operators.kernels.histogram import Histogram
from operators.literals.lz import LzTrial
from operators.words import Words

RANS_GAIN = 128
"""rANS decodes slower than Huffman codes: it is taken where it saves one part of theirs in this many."""
LZ_GAIN = 64
"""LZ writes and reads slower than everything else: it is taken where it saves one part in this many."""


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
        self._histogram = Histogram(stream.width_bits) if is_counted else None
        self._largest = 0
        self._lz = LzTrial(stream, always=encoding == "lz") if encoding in ("", "lz") else None

    def add(self, words: Words) -> None:
        """Count the next words; `words` is not kept."""
        if self._lz is not None:
            self._lz.add(words)
        if self._histogram is not None:
            self._histogram.add(words)
        elif words.size:
            self._largest = max(self._largest, int(words.max()))

    def finish(self) -> Profile:
        """Return what was counted."""
        lz_payload = None if self._lz is None else self._lz.finish()
        if self._histogram is None:
            return Profile(self._stream, None, self._largest, lz_payload)
        counts = self._histogram.counts()
        live = np.flatnonzero(counts)
        return Profile(self._stream, counts, int(live[-1]) if live.size else 0, lz_payload)


def choose(profile: Profile) -> tuple[str, Plan]:
    """Return the name and the plan of the encoding that takes the fewest bytes.

    Ties go to the lower code. A slower encoding has to save a part of the best faster one: the trade is
    fixed by the writer, so the choice depends on the words alone.
    """
    from operators.registry import ENCODINGS

    chosen: tuple[str, Plan] | None = None
    for encoding in ENCODINGS.values():
        plan = encoding.plan(profile)
        if plan is None:
            continue
        part = {"rans": RANS_GAIN, "lz": LZ_GAIN}.get(encoding.name)
        if chosen is None or plan.n_bytes < chosen[1].n_bytes - (chosen[1].n_bytes // part if part else 0):
            chosen = encoding.name, plan
    assert chosen is not None, "bitpack takes any words"
    return chosen
