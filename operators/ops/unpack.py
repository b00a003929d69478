"""``unpack[w]``: each word is put together from b / w neighbouring words of the child, the first one lowest.

Word i is ``x[f*i] | x[f*i + 1] << w | ...`` with f = b / w.

Type: ``unpack[w](w[n*f]) : b[n]`` with 0 < w < b and w a divisor of b.

Example: ``unpack[4]`` of 1, 15, 2, 0 as ``b8[2]`` is 241, 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from operators.base import BLOCK_WORDS, Operator, Source, Stream
from operators.errors import FormatError
from operators.kernels.fields import join_narrow, split_narrow
from operators.words import Words, container


@dataclass(frozen=True, slots=True)
class Unpack(Operator):
    """Narrower words."""

    opcode = 14
    name = "unpack"
    width_bits: int

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if not 0 < self.width_bits < stream.width_bits or stream.width_bits % self.width_bits:
            raise FormatError(f"a proper divisor of {stream.width_bits}", str(self.width_bits))
        return (Stream(self.width_bits, stream.n_words * (stream.width_bits // self.width_bits)),)

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        factor = stream.width_bits // self.width_bits
        narrow = np.empty(words.size * factor, container(self.width_bits))
        split_narrow(words, self.width_bits, narrow)
        return (narrow,)

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        return _UnpackSource(children[0], self.width_bits, stream)


class _UnpackSource(Source):
    def __init__(self, child: Source, width_bits: int, stream: Stream) -> None:
        self.child = child
        self.width_bits = width_bits
        self.factor = stream.width_bits // width_bits
        self.block_words = max(1, BLOCK_WORDS // self.factor)
        n_words = min(self.block_words, stream.n_words) * self.factor
        self.narrow = np.empty(n_words, container(width_bits))

    def read(self, out: Words) -> None:
        for start in range(0, out.size, self.block_words):
            block = out[start : start + self.block_words]
            narrow = self.narrow[: block.size * self.factor]
            self.child.read(narrow)
            join_narrow(narrow, self.width_bits, block)
