"""``repeat[p]``: the `p` words of the child again and again, the last time perhaps in part.

Type: ``repeat[p](b[p]) : b[n]`` with 0 < p < n.

Example: ``repeat[2]`` of 1, 2 as ``b8[5]`` is 1, 2, 1, 2, 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from operators.base import Operator, Source, Stream
from operators.errors import FormatError
from operators.words import Words


@dataclass(frozen=True, slots=True)
class Repeat(Operator):
    """Repetition."""

    opcode = 3
    name = "repeat"
    period: int

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if not 0 < self.period < stream.n_words:
            raise FormatError(f"a period between 0 and {stream.n_words}", str(self.period))
        return (Stream(stream.width_bits, self.period),)

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        period = self.period
        return (words[:period],) if np.array_equal(words[period:], words[:-period]) else None

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        return _RepeatSource(children[0], Stream(stream.width_bits, self.period))

    def scratch_bytes(self, stream: Stream) -> int:
        return Stream(stream.width_bits, self.period).n_bytes


class _RepeatSource(Source):
    def __init__(self, child: Source, stream: Stream) -> None:
        self.child = child
        self.stream = stream
        self.words: Words | None = None
        self.phase = 0

    def read(self, out: Words) -> None:
        if self.words is None:
            self.words = self.stream.empty()
            self.child.read(self.words)
        period = self.words.size
        first = min(period - self.phase, out.size)
        out[:first] = self.words[self.phase : self.phase + first]
        whole = (out.size - first) // period
        middle = first + whole * period
        out[first:middle].reshape(whole, period)[:] = self.words
        out[middle:] = self.words[: out.size - middle]
        self.phase = (self.phase + out.size) % period
