"""``concat[n1, ..., nk-1]``: the words of k children one after the other.

Type: ``concat[n1, ..., nk-1](b[n1], ..., b[nk]) : b[n]`` with every ni > 0 and nk = n - n1 - ... - nk-1 > 0.

Example: ``concat[2](const[7], const[0])`` as ``b8[5]`` is 7, 7, 0, 0, 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

from operators.base import Operator, Source, Stream
from operators.errors import FormatError
from operators.words import Words


@dataclass(frozen=True, slots=True)
class Concat(Operator):
    """Concatenation."""

    opcode = 2
    name = "concat"
    lengths: tuple[int, ...]
    """Words of all children but the last."""

    @property
    def params(self) -> tuple[int, ...]:
        return self.lengths

    @classmethod
    def from_params(cls, params: tuple[int, ...]) -> Self:
        if not params:
            raise FormatError("at least one length of concat", "none")
        return cls(params)

    @property
    def arity(self) -> int:
        return len(self.lengths) + 1

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        last = stream.n_words - sum(self.lengths)
        if last <= 0 or min(self.lengths) <= 0:
            raise FormatError(f"lengths of parts of {stream}", str(self.lengths))
        return tuple(Stream(stream.width_bits, n_words) for n_words in (*self.lengths, last))

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        cuts = [0, *accumulate(self.lengths), words.size]
        return tuple(words[start:stop] for start, stop in pairwise(cuts))

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        return _ConcatSource(children, [child.n_words for child in self.children(stream)])


class _ConcatSource(Source):
    def __init__(self, children: Sequence[Source], lengths: list[int]) -> None:
        self.children = children
        self.lengths = lengths
        self.child = 0
        self.left = lengths[0]

    def read(self, out: Words) -> None:
        done = 0
        while done < out.size:
            if self.left == 0:
                self.child += 1
                self.left = self.lengths[self.child]
            taken = min(self.left, out.size - done)
            self.children[self.child].read(out[done : done + taken])
            done += taken
            self.left -= taken
