"""``xor[c]``: each word of the child xor `c`.

Type: ``xor[c](b[n]) : b[n]`` with c < 2**b.

Example: ``xor[3]`` of 0, 1, 2 as ``b8[3]`` is 3, 2, 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from operators.base import Stream
from operators.errors import FormatError
from operators.ops.support import WordMap
from operators.words import Words, mask_of


@dataclass(frozen=True, slots=True)
class Xor(WordMap):
    """Exclusive or with a constant."""

    opcode = 5
    name = "xor"
    constant: int

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if self.constant > mask_of(stream.width_bits):
            raise FormatError(f"a constant of {stream.width_bits} bits", str(self.constant))
        return (stream,)

    def forward(self, words: Words, width_bits: int) -> None:
        words ^= words.dtype.type(self.constant)

    def backward(self, words: Words, width_bits: int) -> None:
        self.forward(words, width_bits)
