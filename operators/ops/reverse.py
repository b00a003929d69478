"""``reverse``: the bits of each word in reverse order.

Type: ``reverse(b[n]) : b[n]``.

Example: ``reverse`` of 1, 6 as ``b8[2]`` is 128, 96.
"""

from __future__ import annotations

from dataclasses import dataclass

from operators.ops.support import WordMap
from operators.words import Words, mask_of


@dataclass(frozen=True, slots=True)
class Reverse(WordMap):
    """Bit reversal."""

    opcode = 10
    name = "reverse"

    def forward(self, words: Words, width_bits: int) -> None:
        bits = words.dtype.itemsize * 8
        words.byteswap(inplace=True)
        for shift in (4, 2, 1):
            keep = words.dtype.type(mask_of(bits) // (mask_of(2 * shift) // mask_of(shift)))
            high = words >> words.dtype.type(shift)
            high &= keep
            words &= keep
            words <<= words.dtype.type(shift)
            words |= high
        words >>= words.dtype.type(bits - width_bits)

    def backward(self, words: Words, width_bits: int) -> None:
        self.forward(words, width_bits)
