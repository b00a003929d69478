"""``zigzag``: the child holds zigzag codes of two's complement words.

Word x of the child gives x / 2 where x is even and -(x + 1) / 2 modulo 2**b where it is odd, so that
small codes give words near zero on both sides.

Type: ``zigzag(b[n]) : b[n]``.

Example: ``zigzag`` of 0, 1, 2, 3 as ``b8[4]`` is 0, 255, 1, 254.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from operators.ops.support import WordMap
from operators.words import Words, mask_of


@dataclass(frozen=True, slots=True)
class Zigzag(WordMap):
    """Two's complement from zigzag codes."""

    opcode = 7
    name = "zigzag"

    def forward(self, words: Words, width_bits: int) -> None:
        one = words.dtype.type(1)
        sign = np.negative(words & one)
        words >>= one
        words ^= sign
        words &= words.dtype.type(mask_of(width_bits))

    def backward(self, words: Words, width_bits: int) -> None:
        sign = np.negative(words >> words.dtype.type(width_bits - 1))
        words <<= words.dtype.type(1)
        words ^= sign
        words &= words.dtype.type(mask_of(width_bits))
