"""Kernels of the operators: bit fields of words, narrow words in wide ones, scans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
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


@kernel("a", "b")
def split_two(words: Any, at: Any, width_bits: Any, a: Any, b: Any) -> None:
    """As `split_field` for two fields in one pass; `at` and `width_bits` are tuples."""
    mask_a = words.dtype.type(np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits[0]))
    mask_b = words.dtype.type(np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits[1]))
    for i in range(words.size):
        word = words[i]
        a[i] = both(down(word, at[0]), mask_a)
        b[i] = both(down(word, at[1]), mask_b)


@kernel("a", "b", "c")
def split_three(words: Any, at: Any, width_bits: Any, a: Any, b: Any, c: Any) -> None:
    """As `split_two` for three fields."""
    mask_a = words.dtype.type(np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits[0]))
    mask_b = words.dtype.type(np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits[1]))
    mask_c = words.dtype.type(np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width_bits[2]))
    for i in range(words.size):
        word = words[i]
        a[i] = both(down(word, at[0]), mask_a)
        b[i] = both(down(word, at[1]), mask_b)
        c[i] = both(down(word, at[2]), mask_c)


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
def join_two(a: Any, b: Any, second: int, out: Any) -> None:
    """Write words of two fields, which start at bits 0 and `second`."""
    for i in range(out.size):
        out[i] = out.dtype.type(a[i]) | up(out.dtype.type(b[i]), second)


@kernel("out")
def join_three(a: Any, b: Any, c: Any, second: int, third: int, out: Any) -> None:
    """Write words of three fields, which start at bits 0, `second` and `third`, in one pass."""
    for i in range(out.size):
        out[i] = out.dtype.type(a[i]) | up(out.dtype.type(b[i]), second) | up(out.dtype.type(c[i]), third)


def split_fields(words: Words, fields: Sequence[tuple[int, int]], out: Sequence[Words]) -> None:
    """Write fields of every word to arrays of their containers, up to three in one pass over the words.

    Parameters
    ----------
    words : Words, shape (n,)
    fields : sequence of (int, int)
        Lowest bit and bits of each field; they may leave bits out.
    out : sequence of Words, shape (n,) each
    """
    done = 0
    while done < len(fields):
        some = fields[done : done + 3]
        at, width_bits = zip(*some, strict=True)
        if len(some) == 3:
            split_three(words, at, width_bits, *out[done : done + 3])
        elif len(some) == 2:
            split_two(words, at, width_bits, *out[done : done + 2])
        else:
            split_field(words, at[0], width_bits[0], out[done])
        done += len(some)


def fields_of(widths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the lowest bit and the bits of each of the fields of `widths` bits, the lowest first."""
    return tuple(zip(accumulate(widths, initial=0), widths, strict=False))


def join_fields(fields: Sequence[Words], widths: Sequence[int], out: Words) -> None:
    """Inverse of `split_fields` for two fields and more that fill the words, the lowest first."""
    if len(widths) == 2:
        join_two(fields[0], fields[1], widths[0], out)
        return
    shift = widths[0] + widths[1]
    join_three(fields[0], fields[1], fields[2], widths[0], shift, out)
    for width, field in zip(widths[2:], fields[3:], strict=False):
        shift += width
        join_field(field, shift, out)


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
