"""``deal[w0, w1, ...]``: in turn `w0` words of the first child, `w1` of the second, and so on, again and again.

Blocks of quantised weights are such sequences: a scale and then its weights. The last turn may be cut short.

Type: ``deal[w0, ..., wk](b[n0], ..., b[nk]) : b[n]`` with every wi > 0 and n at least their sum p; ni counts the
places between 0 and n that are, modulo p, among the wi that follow the first w0 + ... + wi-1.

Example: ``deal[1,2]`` of 7, 8 and 1, 2, 3 as ``b8[5]`` is 7, 1, 2, 8, 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from operators.base import BLOCK_WORDS, Source, Stream
from operators.errors import FormatError
from operators.kernels.rows import put_part, put_words, take_part, take_words
from operators.ops.support import Widths
from operators.words import Words, container


@dataclass(frozen=True, slots=True)
class Deal(Widths):
    """Words in turn from several children."""

    opcode = 16
    name = "deal"

    @property
    def period(self) -> int:
        """Words of a turn."""
        return sum(self.widths)

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if min(self.widths) <= 0 or self.period > stream.n_words:
            raise FormatError(f"positive widths that sum to at most {stream.n_words}", str(self.widths))
        return tuple(Stream(stream.width_bits, n_words) for n_words in self.given(stream.n_words))

    def given(self, n_words: int) -> list[int]:
        """Return how many of the first `n_words` words each child has."""
        turns, rest = divmod(n_words, self.period)
        starts = accumulate(self.widths, initial=0)
        return [
            turns * width + min(max(rest - start, 0), width) for start, width in zip(starts, self.widths, strict=False)
        ]

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        parts = []
        start = 0
        for width, n_words in zip(self.widths, self.given(words.size), strict=True):
            part = np.empty(n_words, words.dtype)
            if width == 1:
                take_words(words, self.period, start, part)
            else:
                size = words.itemsize
                take_part(words.view(np.uint8), self.period * size, start * size, width * size, part.view(np.uint8))
            parts.append(part)
            start += width
        return tuple(parts)

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        return _DealSource(self, children, self.children(stream))


class _DealSource(Source):
    def __init__(self, op: Deal, children: Sequence[Source], streams: tuple[Stream, ...]) -> None:
        self.op = op
        self.children = children
        most = max(stream.n_words for stream in streams)
        self.scratch = np.empty(min(BLOCK_WORDS, most), container(streams[0].width_bits))
        self.phase = 0

    def read(self, out: Words) -> None:
        for start in range(0, out.size, BLOCK_WORDS):
            block = out[start : start + BLOCK_WORDS]
            before, after = self.op.given(self.phase), self.op.given(self.phase + block.size)
            place = 0
            for child, width, stop, begin in zip(self.children, self.op.widths, after, before, strict=True):
                part = self.scratch[: stop - begin]
                child.read(part)
                self._put(part, place - self.phase, width, block)
                place += width
            self.phase = (self.phase + block.size) % self.op.period

    def _put(self, part: Words, start: int, width: int, block: Words) -> None:
        """Put the words of one child where they belong: the first ones at `start`, a period more where they were."""
        period, size = self.op.period, block.itemsize
        if start <= -width:
            start += period
        if width == 1:
            put_words(part, period, start, block)
        else:
            put_part(part.view(np.uint8), period * size, start * size, width * size, block.view(np.uint8))
