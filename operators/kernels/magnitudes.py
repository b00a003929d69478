"""Scales of rows and columns of integers, by the means of their magnitudes (`operators.literals.tiled`).

Integers have no exponent whose mean were a scale. That of a row or column is the logarithm of a mean, in thirds of
an octave: the eight tables that a scale can name are three octaves then, which is what real layers have. Magnitudes
are zigzag codes, or what else is small where it is near zero.
"""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np

from operators.kernels.jit import inlined
from operators.kernels.lanes import bit_length, both, down
from operators.kernels.memory import item_bytes
from operators.kernels.scales import CHUNK, ESCAPE, STEPS, TILE_ROWS

THIRD, TWO_THIRDS = 1321123, 1664511
"""2**20 times the cube root of two, and its square."""


@inlined
def _thirds(total: Any, count: Any) -> Any:
    """Return three times the logarithm of a mean and a quarter, rounded down; a mean of zero has one too."""
    x = (64 * total + 16 * count) // count
    octave = bit_length(x) - 1
    mantissa = (x << 20) >> octave
    return 3 * octave + np.int64(mantissa >= THIRD) + np.int64(mantissa >= TWO_THIRDS)


@inlined
def magnitude_scales(
    words: Any,
    n_columns: Any,
    below: Any,
    step: Any,
    row_chunks: Any,
    column_rows: Any,
    geometry: Any,
    rows: Any,
    columns: Any,
    sums: Any,
) -> Any:
    """Set the scales of words without a sign, as `operators.kernels.tile_plans.measure_scales` returns them."""
    fraction, field_bits, kept = geometry[1], geometry[2], geometry[5]
    middle = STEPS * (min(np.int64(ESCAPE - 1), (np.int64(1) << field_bits) - 1) >> fraction) + STEPS // 2
    rows[:] = 0
    columns[:] = 0
    n_rows = words.size // n_columns // TILE_ROWS * TILE_ROWS
    if n_rows and kept:
        mask = (np.int64(1) << (8 * item_bytes(words) - below)) - 1
        column_step = max(np.int64(1), n_rows // column_rows)
        seen = columns if kept == 2 else columns[:0]
        _measure(words[: n_rows * n_columns], n_columns, below, mask, step, column_step, row_chunks, sums, rows, seen)
        total = np.int64(0)
        for i in range(rows.size):
            total += np.int64(rows[i])
        mean = (2 * total // rows.size + 1) >> 1
        # Six classes of rows and three of columns: their sums are the eight steps of one octave.
        for i in range(rows.size):
            rows[i] = min(max(np.int64(rows[i]) - mean, np.int64(-3)), np.int64(2))
        for c in range(n_columns):
            columns[c] = min(max(columns[c], -1), 1)
    for i in range(rows.size):
        rows[i] += middle
    return middle


@inlined
def _measure(
    words: Any,
    n_columns: Any,
    shift: Any,
    mask: Any,
    step: Any,
    column_step: Any,
    chunks: Any,
    sums: Any,
    rows: Any,
    columns: Any,
) -> None:
    """Set the scales of rows, and those of columns less the mean of them all; `columns` may be empty.

    The magnitude of a word is ``(word >> shift) & mask``. Columns are looked at in every `column_step`-th row.
    """
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
