"""Zigzag codes: integers about zero as magnitudes with their sign below."""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import kernel
from operators.kernels.lanes import both, down, up


@kernel("words")
def fold(words: Any, width_bits: int) -> None:
    """Replace words in two's complement of `width_bits` by their codes."""
    keep = words.dtype.type(~np.uint64(0) >> np.uint64(64 - width_bits))
    top = width_bits - 1
    for i in range(words.size):
        word = words[i]
        sign = words.dtype.type(np.uint64(0) - np.uint64(down(word, top)))
        words[i] = both(words.dtype.type(up(word, 1) ^ sign), keep)


@kernel("words")
def unfold(words: Any, width_bits: int) -> None:
    """Inverse of `fold`."""
    one = words.dtype.type(1)
    keep = words.dtype.type(~np.uint64(0) >> np.uint64(64 - width_bits))
    for i in range(words.size):
        word = words[i]
        sign = words.dtype.type(np.uint64(0) - np.uint64(both(word, one)))
        words[i] = both(words.dtype.type(down(word, 1) ^ sign), keep)
