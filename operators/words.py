"""Bytes and words: the dtype table, and views of a buffer as unsigned words.

Values are never interpreted as numbers here, only as bits: a NaN payload, a negative zero and a
BOOL byte of 255 pass like any other pattern.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[Any]
"""One-dimensional, C-contiguous, aligned array of uint8, uint16, uint32 or uint64."""
Bytes: TypeAlias = bytes | bytearray | memoryview
"""What holds bytes; never written by whoever receives it."""
LINE_BYTES = 64
"""A line of the cache."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """How the elements of a safetensors dtype are seen as words.

    Attributes
    ----------
    name : str
        The dtype string of safetensors.
    element_bits : int
        Bits of one element; F4 and F6 pack several elements into bytes.
    word_bits : int
        8, 16, 32 or 64: the word that the language works on. Sub-byte dtypes are bytes, a complex
        element is two words.
    exponent_bits, mantissa_bits : int
        Field widths of an IEEE-like word, 0 and 0 where the word has no such layout.
    """

    name: str
    element_bits: int
    word_bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0


_TABLE = (
    Dtype("BOOL", 8, 8),
    Dtype("U8", 8, 8),
    Dtype("I8", 8, 8),
    Dtype("U16", 16, 16),
    Dtype("I16", 16, 16),
    Dtype("U32", 32, 32),
    Dtype("I32", 32, 32),
    Dtype("U64", 64, 64),
    Dtype("I64", 64, 64),
    Dtype("F4", 4, 8),
    Dtype("F6_E2M3", 6, 8),
    Dtype("F6_E3M2", 6, 8),
    Dtype("F8_E4M3", 8, 8, 4, 3),
    Dtype("F8_E5M2", 8, 8, 5, 2),
    Dtype("F8_E8M0", 8, 8),
    Dtype("F16", 16, 16, 5, 10),
    Dtype("BF16", 16, 16, 8, 7),
    Dtype("F32", 32, 32, 8, 23),
    Dtype("F64", 64, 64, 11, 52),
    Dtype("C64", 64, 32, 8, 23),
)
DTYPES: dict[str, Dtype] = {entry.name: entry for entry in _TABLE}
BYTES = Dtype("", 8, 8)
"""What is not a tensor, and tensors of a dtype that the table does not know."""


def dtype_of(name: str | None) -> Dtype:
    """Return the table's entry for `name`, or `BYTES` for None and for unknown names."""
    return DTYPES.get(name or "", BYTES)


@functools.cache
def container(width_bits: int) -> np.dtype[Any]:
    """Return the smallest unsigned numpy dtype that holds words of `width_bits` (1 to 64)."""
    for bits in (8, 16, 32):
        if width_bits <= bits:
            return np.dtype(f"u{bits // 8}")
    return np.dtype("u8")


def words_of(buffer: Bytes, word_bits: int) -> Words:
    """View `buffer` as little-endian words of `word_bits`.

    The view shares memory with `buffer` where that is aligned, and is a copy where it is not: kernels
    never see an unaligned pointer.

    Parameters
    ----------
    buffer : bytes-like, length a multiple of the word
        Not written, not kept beyond the view.
    word_bits : {8, 16, 32, 64}

    Returns
    -------
    Words, shape (n_bytes * 8 // word_bits,)
    """
    words = np.frombuffer(buffer, dtype=container(word_bits).newbyteorder("<"))
    return words if words.flags.aligned else words.copy()


def aligned(n_bytes: int) -> NDArray[np.uint8]:
    """Return fresh memory that starts on a line of the cache: any words may view it, and no vector crosses a line."""
    room = np.empty(n_bytes + LINE_BYTES, np.uint8)
    start = -room.ctypes.data % LINE_BYTES
    return room[start : start + n_bytes]


def mask_of(width_bits: int) -> int:
    """Return 2**width_bits - 1."""
    return (1 << width_bits) - 1
