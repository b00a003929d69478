"""``add[c]``: each word of the child plus `c`, modulo 2**b.

Type: ``add[c](b[n]) : b[n]`` with c < 2**b.

Example: ``add[250]`` of 1, 10 as ``b8[2]`` is 251, 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from operators.base import Stream
from operators.errors import FormatError
from operators.ops.support import WordMap
from operators.words import Words, mask_of


@dataclass(frozen=True, slots=True)
class Add(WordMap):
    """Addition of a constant."""

    opcode = 6
    name = "add"
    constant: int

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if self.constant > mask_of(stream.width_bits):
            raise FormatError(f"a constant of {stream.width_bits} bits", str(self.constant))
        return (stream,)

    def forward(self, words: Words, width_bits: int) -> None:
        words += words.dtype.type(self.constant)
        words &= words.dtype.type(mask_of(width_bits))

    def backward(self, words: Words, width_bits: int) -> None:
        words -= words.dtype.type(self.constant)
        words &= words.dtype.type(mask_of(width_bits))
