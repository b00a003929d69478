"""``scan_xor[lag]`` and ``scan_add[lag]``: each word is the one `lag` words before, changed by a delta.

The first `lag` words are the first child; word i >= lag is word i - lag xor, or plus modulo 2**b, word
i - lag of the second child. A lag of 1 follows a sequence, a lag of a row follows the columns of a matrix.

Type: ``scan[lag](b[lag], b[n - lag]) : b[n]`` with 0 < lag < n.

Example: ``scan_add[1]`` of 5 and 1, 1, 255 as ``b8[4]`` is 5, 6, 7, 6.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from operators.base import Operator, Source, Stream
from operators.errors import FormatError
from operators.kernels.fields import scan_add, scan_xor
from operators.words import Words, mask_of


@dataclass(frozen=True, slots=True)
class Scan(Operator):
    """What both scans share."""

    lag: int

    @property
    def arity(self) -> int:
        return 2

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if not 0 < self.lag < stream.n_words:
            raise FormatError(f"a lag between 0 and {stream.n_words}", str(self.lag))
        return (Stream(stream.width_bits, self.lag), Stream(stream.width_bits, stream.n_words - self.lag))

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        return words[: self.lag], self.deltas(words, stream.width_bits)

    @abstractmethod
    def deltas(self, words: Words, width_bits: int) -> Words:
        """Return the deltas of all words but the first `lag`."""

    @abstractmethod
    def accumulate(self, history: Words, cursor: int, width_bits: int, words: Words) -> int:
        """Turn deltas into words in place; `history` holds the last `lag` words as a ring.

        Returns
        -------
        int
            The cursor of the ring after the last word.
        """

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        return _ScanSource(self, children, stream)

    def scratch_bytes(self, stream: Stream) -> int:
        return self.children(stream)[0].n_bytes


@dataclass(frozen=True, slots=True)
class ScanXor(Scan):
    """Exclusive or with the word `lag` before."""

    opcode = 11
    name = "scan_xor"

    def deltas(self, words: Words, width_bits: int) -> Words:
        return np.asarray(words[self.lag :] ^ words[: -self.lag])

    def accumulate(self, history: Words, cursor: int, width_bits: int, words: Words) -> int:
        return int(scan_xor(history, cursor, words))


@dataclass(frozen=True, slots=True)
class ScanAdd(Scan):
    """Sum with the word `lag` before."""

    opcode = 12
    name = "scan_add"

    def deltas(self, words: Words, width_bits: int) -> Words:
        deltas: Words = words[self.lag :] - words[: -self.lag]
        deltas &= deltas.dtype.type(mask_of(width_bits))
        return deltas

    def accumulate(self, history: Words, cursor: int, width_bits: int, words: Words) -> int:
        return int(scan_add(history, cursor, width_bits, words))


class _ScanSource(Source):
    def __init__(self, op: Scan, children: Sequence[Source], stream: Stream) -> None:
        self.op = op
        self.children = children
        self.width_bits = stream.width_bits
        self.head = op.children(stream)[0]
        self.history: Words | None = None
        self.cursor = 0
        self.given = 0

    def read(self, out: Words) -> None:
        if self.history is None:
            self.history = self.head.empty()
            self.children[0].read(self.history)
        from_head = min(self.history.size - self.given, out.size)
        out[:from_head] = self.history[self.given : self.given + from_head]
        self.given += from_head
        rest = out[from_head:]
        if rest.size:
            self.children[1].read(rest)
            self.cursor = self.op.accumulate(self.history, self.cursor, self.width_bits, rest)
