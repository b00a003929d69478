"""Scales of rows and columns of integers, by the means of their magnitudes (`operators.literals.tiled`).

Integers have no exponent whose mean were a scale. That of a row or column is the logarithm of a mean, in thirds of
an octave: the eight tables that a scale can name are three octaves then, which is what real layers have. Magnitudes
are zigzag codes, or what else is small where it is near zero.
"""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length, both, down
from operators.kernels.scales import CHUNK

THIRD, TWO_THIRDS = 1321123, 1664511
"""2**20 times the cube root of two, and its square."""


@inlined
def _thirds(total: Any, count: Any) -> Any:
    """Return three times the logarithm of a mean and a quarter, rounded down; a mean of zero has one too."""
    x = (64 * total + 16 * count) // count
    octave = bit_length(x) - 1
    mantissa = (x << 20) >> octave
    return 3 * octave + np.int64(mantissa >= THIRD) + np.int64(mantissa >= TWO_THIRDS)


@kernel("sums", "rows", "columns")
def magnitude_scales(
    words: Any, shift: int, mask: int, step: int, column_step: int, chunks: int, sums: Any, rows: Any, columns: Any
) -> None:
    """Set the scales of rows, and those of columns less the mean of them all.

    Parameters
    ----------
    words : Words
    shift, mask : int
        Magnitude of a word: ``(word >> shift) & mask``.
    step, column_step : int
        Scale i is that of row ``i * step``; columns are looked at in every `column_step`-th row.
    chunks : int
        Runs of neighbouring columns that a row is judged by, spread over it.
    sums : uint32 array, shape (n_columns,)
        Scratch.
    rows, columns : int32 arrays
        Either may be empty.
    """
    n_columns = sums.size
    keep = words.dtype.type(mask)
    stride = n_columns // chunks if n_columns > CHUNK * chunks else CHUNK
    for i in range(rows.size):
        row = words[i * step * n_columns : (i * step + 1) * n_columns]
        total, count = np.int64(0), np.int64(0)
        for first in range(0, n_columns, stride):
            run = row[first : min(first + CHUNK, n_columns)]
            part = np.uint32(0)
            for c in range(run.size):
                part += np.uint32(both(down(run[c], shift), keep))
            total += np.int64(part)
            count += run.size
        rows[i] = _thirds(total, count)
    if not columns.size:
        return
    for c in range(n_columns):
        sums[c] = np.uint32(0)
    looked_at, total = np.int64(0), np.int64(0)
    for start in range(0, words.size - n_columns + 1, column_step * n_columns):
        row = words[start : start + n_columns]
        for c in range(n_columns):
            sums[c] += np.uint32(both(down(row[c], shift), keep))
        looked_at += 1
    for c in range(n_columns):
        columns[c] = _thirds(np.int64(sums[c]), looked_at)
        total += np.int64(columns[c])
    middle = (2 * total + n_columns) // (2 * n_columns)
    for c in range(n_columns):
        columns[c] -= middle
