"""``rotate[r]``: each word of the child rotated right by `r` bits within its width.

The target of a word is the word rotated left by `r`; ``rotate[1]`` above a ``merge`` brings the sign of a
float next to its low mantissa bits.

Type: ``rotate[r](b[n]) : b[n]`` with 0 < r < b.

Example: ``rotate[1]`` of 3 as ``b8[1]`` is 129.
"""

from __future__ import annotations

from dataclasses import dataclass

from operators.base import Stream
from operators.errors import FormatError
from operators.ops.support import WordMap
from operators.words import Words, mask_of


@dataclass(frozen=True, slots=True)
class Rotate(WordMap):
    """Rotation."""

    opcode = 9
    name = "rotate"
    distance: int

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if not 0 < self.distance < stream.width_bits:
            raise FormatError(f"a rotation between 0 and {stream.width_bits}", str(self.distance))
        return (stream,)

    def forward(self, words: Words, width_bits: int) -> None:
        _rotate_left(words, width_bits, width_bits - self.distance)

    def backward(self, words: Words, width_bits: int) -> None:
        _rotate_left(words, width_bits, self.distance)


def _rotate_left(words: Words, width_bits: int, distance: int) -> None:
    high = words << words.dtype.type(distance)
    words >>= words.dtype.type(width_bits - distance)
    words |= high
    words &= words.dtype.type(mask_of(width_bits))
