"""The table of an entropy coder: which words occur, and a number for each of them.

Bits are written least significant first. EG(k, v) is the Exp-Golomb code of order k: with
``u = v + 2**k`` and ``e = floor(log2(u)) - k``, e zero bits, a one bit, the low ``e + k`` bits of u.

==========================  =====================================================================
4 bits                      k
1 bit                       d: levels are differences
EG(4, m - 1)                m, the number of words that occur
m x EG(k, gap - 1)          gaps between them in increasing order, the first from -1
m x 4 bits (d = 0)          level of each, or
m x EG(0, zigzag) (d = 1)   its difference to the one before (the first: to 0), ``0, -1, 1, -2`` as ``0, 1, 2, 3``
(with values) m x level     the bits of the value below its leading one, which is bit `level`
to the byte                 zero bits
==========================  =====================================================================

A Huffman table has code lengths as levels; a rANS table has frequencies as values, and so their bit
lengths less one as levels. Neighbouring words have similar levels in real data, so most cost a bit or three.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import inlined, kernel
from operators.kernels.lanes import bit_length
from operators.kernels.memory import load_u64, store_u64

MAX_SYMBOLS = 1 << 14
"""Most words that occur: as many as codes and frequencies of 14 bits can tell apart."""
_M_ORDER = 4


@inlined
def peek(buffer: Any, bit: Any) -> Any:
    """Return the 57 or more bits from `bit` on, zeros beyond the end of `buffer`."""
    start = bit >> 3
    down = np.uint64(bit & 7)
    if start + 8 <= buffer.size:
        return load_u64(buffer, np.uint64(start)) >> down
    bits = np.uint64(0)
    for k in range(buffer.size - start):
        bits |= np.uint64(buffer[start + k]) << np.uint64(8 * k)
    return bits >> down


@inlined
def put_bits(out: Any, bit: Any, value: Any, n_bits: Any) -> Any:
    """Write the low `n_bits` (at most 56) of `value` at `bit` of the zeroed `out`; return the bit after them."""
    at = np.uint64(bit >> 3)
    keep = (np.uint64(1) << np.uint64(n_bits)) - np.uint64(1)
    store_u64(out, at, load_u64(out, at) | ((np.uint64(value) & keep) << np.uint64(bit & 7)))
    return bit + n_bits


@inlined
def golomb_bits(order: Any, value: Any) -> Any:
    """Return the bits of EG(order, value)."""
    return 2 * bit_length(value + (1 << order)) - 1 - order


@inlined
def put_golomb(out: Any, bit: Any, order: Any, value: Any) -> Any:
    """Write EG(order, value) at `bit` of the zeroed `out`; return the bit after it."""
    u = value + (1 << order)
    zeros = bit_length(u) - 1 - order
    low = u - (1 << (zeros + order))
    return put_bits(out, bit, (low << (zeros + 1)) | (1 << zeros), 2 * zeros + 1 + order)


@inlined
def take_golomb(buffer: Any, bit: Any, order: Any) -> Any:
    """Return (value, bit after it); the value is -1 where the code is longer than any that is written."""
    bits = peek(buffer, bit)
    zeros = 0
    while zeros <= 17 and not (bits >> np.uint64(zeros)) & np.uint64(1):
        zeros += 1
    if zeros > 17:
        return -1, bit
    n_bits = zeros + order
    low = (bits >> np.uint64(zeros + 1)) & ((np.uint64(1) << np.uint64(n_bits)) - np.uint64(1))
    return (1 << n_bits) + np.int64(low) - (1 << order), bit + zeros + 1 + n_bits


@inlined
def zigzag(value: Any) -> Any:
    """Return 0, -1, 1, -2 ... as 0, 1, 2, 3 ..."""
    return 2 * value if value >= 0 else -2 * value - 1


@kernel("out")
def put_table(
    symbols: NDArray[np.int64], levels: NDArray[np.int64], values: NDArray[np.int64], out: NDArray[np.uint8]
) -> int:
    """Write a table to the zeroed `out` of ``8 * m + 16`` bytes; return its bytes.

    Parameters
    ----------
    symbols : int64 array, shape (m,)
        Increasing, 1 to `MAX_SYMBOLS` of them.
    levels : int64 array, shape (m,)
        0 to 15.
    values : int64 array, shape (m,) or (0,)
        Each with its leading one at bit `level`; none in a table without values.
    """
    m = symbols.size
    order, best = 0, np.int64(1) << 62
    for k in range(16):
        if m * (k + 1) >= best:
            break  # no code of this order is shorter
        n_bits = np.int64(0)
        previous = np.int64(-1)
        for i in range(m):
            n_bits += golomb_bits(k, symbols[i] - previous - 1)
            previous = symbols[i]
        if n_bits < best:
            order, best = k, n_bits
    difference_bits = np.int64(0)
    previous = np.int64(0)
    for i in range(m):
        difference_bits += golomb_bits(0, zigzag(levels[i] - previous))
        previous = levels[i]
    differences = difference_bits < 4 * m
    bit = put_bits(out, 0, order, 4)
    bit = put_bits(out, bit, 1 if differences else 0, 1)
    bit = put_golomb(out, bit, _M_ORDER, m - 1)
    previous = np.int64(-1)
    for i in range(m):
        bit = put_golomb(out, bit, order, symbols[i] - previous - 1)
        previous = symbols[i]
    previous = np.int64(0)
    for i in range(m):
        if differences:
            bit = put_golomb(out, bit, 0, zigzag(levels[i] - previous))
            previous = levels[i]
        else:
            bit = put_bits(out, bit, levels[i], 4)
    for i in range(values.size):
        bit = put_bits(out, bit, values[i], levels[i])
    return (bit + 7) >> 3


@kernel()
def table_symbols(buffer: NDArray[np.uint8]) -> int:
    """Return how many words the table at the start of `buffer` has, or -1 if they cannot be there."""
    m, _ = take_golomb(buffer, 5, _M_ORDER)
    m += 1
    # Each takes a bit for its gap and one for its level.
    return m if 0 < m <= MAX_SYMBOLS and 2 * m <= 8 * buffer.size else -1


@kernel("symbols", "levels", "values")
def take_table(
    buffer: NDArray[np.uint8],
    width_bits: int,
    symbols: NDArray[np.int64],
    levels: NDArray[np.int64],
    values: NDArray[np.int64],
) -> int:
    """Read a table of `table_symbols` words; return its bytes, or -1 where no writer could have written it.

    Parameters
    ----------
    buffer : uint8 array
        The table and what follows it.
    width_bits : int
        Bits of a word: larger ones are refused.
    symbols, levels : int64 arrays, shape (m,)
    values : int64 array, shape (m,) or (0,)
        None in a table without values.
    """
    head = np.int64(peek(buffer, 0) & np.uint64(31))
    order, differences = head & 15, head >> 4
    _, bit = take_golomb(buffer, 5, _M_ORDER)
    end = 8 * buffer.size
    previous = np.int64(-1)
    for i in range(symbols.size):
        gap, bit = take_golomb(buffer, bit, order)
        previous += gap + 1
        if gap < 0 or bit > end or previous >> width_bits:
            return -1
        symbols[i] = previous
    previous = np.int64(0)
    for i in range(symbols.size):
        if differences:
            code, bit = take_golomb(buffer, bit, 0)
            if code < 0:
                return -1
            previous += code >> 1 if code & 1 == 0 else -((code + 1) >> 1)
        else:
            previous = np.int64(peek(buffer, bit) & np.uint64(15))
            bit += 4
        if bit > end or previous < 0 or previous > 15:
            return -1
        levels[i] = previous
    for i in range(values.size):
        n_bits = levels[i]
        low = peek(buffer, bit) & ((np.uint64(1) << np.uint64(n_bits)) - np.uint64(1))
        values[i] = (np.int64(1) << n_bits) | np.int64(low)
        bit += n_bits
        if bit > end:
            return -1
    if bit & 7 and buffer[bit >> 3] >> (bit & 7):
        return -1
    return (bit + 7) >> 3
