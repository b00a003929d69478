"""``zigzag``: the child holds zigzag codes of two's complement words.

Word x of the child gives x / 2 where x is even and -(x + 1) / 2 modulo 2**b where it is odd, so that
small codes give words near zero on both sides.

Type: ``zigzag(b[n]) : b[n]``.

Example: ``zigzag`` of 0, 1, 2, 3 as ``b8[4]`` is 0, 255, 1, 254.
"""

from __future__ import annotations

from dataclasses import dataclass

from operators.kernels.folding import fold, unfold
from operators.ops.support import WordMap
from operators.words import Words


@dataclass(frozen=True, slots=True)
class Zigzag(WordMap):
    """Two's complement from zigzag codes."""

    opcode = 7
    name = "zigzag"

    def forward(self, words: Words, width_bits: int) -> None:
        unfold(words, width_bits)

    def backward(self, words: Words, width_bits: int) -> None:
        fold(words, width_bits)
