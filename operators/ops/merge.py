"""``merge[w0, w1, ...]``: each word is put together from one word of every child, the first one lowest.

Word i is ``x0[i] | x1[i] << w0 | x2[i] << (w0 + w1) | ...``.

Type: ``merge[w0, ..., wk](w0[n], ..., wk[n]) : b[n]`` with every wi > 0 and their sum b.

One operator serves for cuts at any bit, for float fields (``merge[5,10,1]``: five mantissa bits, the
exponent with the two top mantissa bits, the sign of a BF16), for byte planes (``merge[8,8,8,8]``) and for
bit planes.

Example: ``merge[4,4]`` of 1, 2 and 15, 0 as ``b8[2]`` is 241, 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from operators.base import BLOCK_WORDS, Source, Stream, WholeSource
from operators.errors import FormatError
from operators.kernels.fields import fields_of, join_fields, split_fields
from operators.ops.support import Widths
from operators.words import Words, container


@dataclass(frozen=True, slots=True)
class Merge(Widths):
    """Bit fields."""

    opcode = 4
    name = "merge"
    pointwise = True

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if min(self.widths) <= 0 or sum(self.widths) != stream.width_bits:
            raise FormatError(f"widths that sum to {stream.width_bits}", str(self.widths))
        return tuple(Stream(width, stream.n_words) for width in self.widths)

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        fields = tuple(np.empty(words.size, container(width)) for width in self.widths)
        split_fields(words, fields_of(self.widths), fields)
        return fields

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        widths: list[int] = []
        parts: list[Source] = []
        for width, child in zip(self.widths, children, strict=True):
            # The fields of a field are fields of the word: no need to put them together twice.
            if isinstance(child, _MergeSource):
                widths += child.widths
                parts += child.children
            else:
                widths.append(width)
                parts.append(child)
        upper = parts[-1]
        if stream.width_bits == 32 and widths[-1] == 16 and isinstance(upper, WholeSource) and upper.takes_lows:
            return _HalvesSource(parts, widths, stream, upper)
        return _MergeSource(parts, widths, min(BLOCK_WORDS, stream.n_words))


class _MergeSource(Source):
    def __init__(self, children: Sequence[Source], widths: Sequence[int], block_words: int) -> None:
        self.children = children
        self.widths = widths
        self.scratch = [np.empty(block_words, container(width)) for width in widths]

    def read(self, out: Words) -> None:
        for start in range(0, out.size, BLOCK_WORDS):
            block = out[start : start + BLOCK_WORDS]
            pairs = zip(self.children, self.scratch, strict=True)
            join_fields([child.take(scratch[: block.size]) for child, scratch in pairs], self.widths, block)


class _HalvesSource(_MergeSource):
    """Words of 32 bits whose upper halves are decoded where they belong, where all words are read at once."""

    whole = True

    def __init__(self, children: Sequence[Source], widths: Sequence[int], stream: Stream, upper: WholeSource) -> None:
        super().__init__(children, widths, min(BLOCK_WORDS, stream.n_words))
        self._n_words = stream.n_words
        self._upper = upper

    def read(self, out: Words) -> None:
        if out.size < self._n_words:
            super().read(out)
            return
        *lower, _ = self.children
        halves = lower[0] if len(lower) == 1 else _MergeSource(lower, self.widths[:-1], min(BLOCK_WORDS, out.size))
        # Not touched, and so not there, where the lower halves are in memory already.
        scratch = np.empty(out.size, np.uint16)
        self._upper.decode_above(halves.take_bytes(scratch), out)
