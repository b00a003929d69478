"""Kernels of the operators: bit fields of words, narrow words in wide ones, scans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from operators.kernels.jit import kernel
from operators.kernels.lanes import both, down, up
from operators.words import Words


@kernel("out")
def split_field(words: Any, shift: int, width_bits: int, out: Any) -> None:
    """Write bits `shift` to ``shift + width_bits`` of every word to `out`."""
    mask = words.dtype.type(np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits))
    for i in range(words.size):
        out[i] = both(down(words[i], shift), mask)


@kernel("out")
def join_field(field: Any, shift: int, out: Any) -> None:
    """Or ``field << shift`` into `out`; the field at shift 0 replaces what `out` held."""
    if shift == 0:
        for i in range(out.size):
            out[i] = field[i]
    else:
        for i in range(out.size):
            out[i] |= up(out.dtype.type(field[i]), shift)


@kernel("out")
def join_three(a: Any, b: Any, c: Any, second: int, third: int, out: Any) -> None:
    """Write words of three fields, which start at bits 0, `second` and `third`, in one pass."""
    for i in range(out.size):
        out[i] = out.dtype.type(a[i]) | up(out.dtype.type(b[i]), second) | up(out.dtype.type(c[i]), third)


def split_fields(words: Words, widths: Sequence[int], fields: Sequence[Words]) -> None:
    """Write the fields of `widths` bits of every word, the lowest first, to arrays of their containers."""
    shift = 0
    for width, field in zip(widths, fields, strict=True):
        split_field(words, shift, width, field)
        shift += width


def join_fields(fields: Sequence[Words], widths: Sequence[int], out: Words) -> None:
    """Inverse of `split_fields`."""
    if len(widths) == 3:
        join_three(fields[0], fields[1], fields[2], widths[0], widths[0] + widths[1], out)
        return
    shift = 0
    for width, field in zip(widths, fields, strict=True):
        join_field(field, shift, out)
        shift += width


@kernel("out")
def split_narrow(words: Any, width_bits: int, out: Any) -> None:
    """Write each word as ``out.size // words.size`` words of `width_bits`, the lowest first."""
    factor = out.size // words.size if words.size else 0
    mask = np.uint64((1 << width_bits) - 1)
    for i in range(words.size):
        word = np.uint64(words[i])
        for j in range(factor):
            out[i * factor + j] = out.dtype.type((word >> np.uint64(j * width_bits)) & mask)


@kernel("out")
def join_narrow(narrow: Any, width_bits: int, out: Any) -> None:
    """Inverse of `split_narrow`."""
    factor = narrow.size // out.size if out.size else 0
    for i in range(out.size):
        word = np.uint64(0)
        for j in range(factor):
            word |= np.uint64(narrow[i * factor + j]) << np.uint64(j * width_bits)
        out[i] = out.dtype.type(word)


@kernel("history", "words")
def scan_xor(history: Any, cursor: int, words: Any) -> int:
    """Turn xor deltas into words in place; return the cursor of the ring `history`."""
    lag = history.size
    for i in range(words.size):
        word = history[cursor] ^ words[i]
        history[cursor] = word
        words[i] = word
        cursor += 1
        if cursor == lag:
            cursor = 0
    return cursor


@kernel("history", "words")
def scan_add(history: Any, cursor: int, width_bits: int, words: Any) -> int:
    """Turn differences modulo ``2**width_bits`` into words in place; return the cursor of `history`."""
    lag = history.size
    mask = words.dtype.type(np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits))
    for i in range(words.size):
        word = words.dtype.type(history[cursor] + words[i]) & mask
        history[cursor] = word
        words[i] = word
        cursor += 1
        if cursor == lag:
            cursor = 0
    return cursor
