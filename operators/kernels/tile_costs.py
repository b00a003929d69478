"""What symbols in the context of scales take with an entropy coder, for the search."""

# mypy: disable-error-code="no-any-return, assignment, return-value"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.alphabet import golomb_bits, zigzag
from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length
from operators.kernels.scales import ESCAPE, HEADROOM, SLOTS, SYMBOLS, window
from operators.kernels.tile_heads import code_lengths


@inlined
def _log(x: Any, logs: Any) -> Any:
    """Return the logarithm of any count: beyond the table by its upper bits."""
    up = 0
    while x > 65536:
        x >>= 1
        up += 1
    return logs[x] + (np.int64(up) << 20)


@kernel("sums", "costs")
def table_costs(
    counts: Any,
    fraction_bits: int,
    field_bits: int,
    logs: NDArray[np.int64],
    smooth_logs: NDArray[np.int64],
    sums: NDArray[np.int64],
    costs: NDArray[np.int64],
    max_length: int,
) -> None:
    """Work out what the symbols of a sample would take with 1, 2, 4 and 8 tables an octave.

    Parameters
    ----------
    counts : uint32 array, shape (rows, bins)
        As `count_symbols` leaves them; as many rows as contexts may take.
    fraction_bits, field_bits : int
    logs, smooth_logs : int64 arrays
        log2 of 0 to 65536 in 2**-20 bit, and what stands for it in Grassberger's estimator of entropy.
    sums : int64 array, shape (rows, SYMBOLS)
        Scratch.
    costs : int64 array, shape (4, 2)
        Set, for each number of tables: bits of all symbols and escapes in 2**-20 bit, and bits of the tables.
    max_length : int
        Bits of the longest code of a symbol, 0 where the coder needs no whole bits.

    Notes
    -----
    A sample knows too little of rare symbols: its own entropy is below that of all words. The estimator makes up for
    it, and whole bits are charged by how far the sample's code lies above the sample's entropy.
    """
    lengths = np.empty(SYMBOLS, np.uint8)
    for tables in range(4):
        found = sums[: (counts.shape[0] >> 3) << tables]
        window(counts, fraction_bits, tables, HEADROOM, found)
        bits, head = np.int64(0), np.int64(0)
        escapes, counted = np.int64(0), np.int64(0)
        for table in range(found.shape[0]):
            total = np.int64(0)
            for v in range(SYMBOLS):
                total += found[table, v]
            head += 1
            if total == 0:
                continue
            coded = total * _log(total, logs)
            if max_length:
                code_lengths(found[table], lengths)
            previous = np.int64(0)
            for v in range(SYMBOLS):
                x = found[table, v]
                coded -= x * _log(x, smooth_logs)
                if max_length:
                    n_bits = np.int64(lengths[v])
                    coded += x * ((n_bits << 20) + _log(x, logs) - _log(total, logs))
                    head += golomb_bits(0, zigzag(n_bits - previous))
                else:
                    n_bits = bit_length((2 * x * SLOTS + total) // (2 * total))
                    head += golomb_bits(0, zigzag(n_bits - previous)) + min(max(n_bits - 1, np.int64(0)), 4)
                previous = n_bits
            bits += max(np.int64(0), coded) + ((found[table, ESCAPE] * field_bits) << 20)
            escapes += found[table, ESCAPE]
            counted += total
        if 2 * escapes > counted:
            bits = (counted * 64) << 20  # the writer gives up
        costs[tables, 0] = bits
        costs[tables, 1] = head
