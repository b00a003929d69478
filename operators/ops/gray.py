"""``gray``: the child holds reflected binary (Gray) codes of the words.

Word x of the child gives x ^ x >> 1 ^ x >> 2 ^ ... ; the target of a word y is y ^ y >> 1.

Type: ``gray(b[n]) : b[n]``.

Example: ``gray`` of 0, 1, 3, 2 as ``b8[4]`` is 0, 1, 2, 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from operators.ops.support import WordMap
from operators.words import Words


@dataclass(frozen=True, slots=True)
class Gray(WordMap):
    """Binary from Gray codes."""

    opcode = 8
    name = "gray"

    def forward(self, words: Words, width_bits: int) -> None:
        shift = 1
        while shift < width_bits:
            words ^= words >> words.dtype.type(shift)
            shift *= 2

    def backward(self, words: Words, width_bits: int) -> None:
        words ^= words >> words.dtype.type(1)
