"""What the encodings with a table of words share: tables as bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from operators.errors import FormatError
from operators.kernels.alphabet import put_table, table_symbols, take_table
from operators.words import Bytes

Integers = NDArray[np.int64]
NO_VALUES: Integers = np.empty(0, np.int64)


def table_bytes(symbols: Integers, levels: Integers, values: Integers = NO_VALUES) -> bytes:
    """Return the table of `operators.kernels.alphabet` as bytes."""
    out = np.zeros(8 * symbols.size + 16, np.uint8)
    return out[: put_table(symbols, levels, values, out)].tobytes()


def take_alphabet(payload: Bytes, width_bits: int, *, with_values: bool) -> tuple[Integers, Integers, Integers, int]:
    """Read a table; return its symbols, levels, values and bytes.

    Raises
    ------
    FormatError
        There is no table at the start of `payload`.
    """
    buffer = np.frombuffer(payload, np.uint8)
    m = table_symbols(buffer) if width_bits <= 16 else -1
    if m > 0:
        symbols, levels = np.empty(m, np.int64), np.empty(m, np.int64)
        values = np.empty(m if with_values else 0, np.int64)
        n_bytes = take_table(buffer, width_bits, symbols, levels, values)
        if n_bytes > 0:
            return symbols, levels, values, n_bytes
    raise FormatError(f"a table of words of up to {min(width_bits, 16)} bits", "something else", "literal")
