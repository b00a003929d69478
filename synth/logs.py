"""Logarithms as integers, computed with integers: the same on every machine.

Units are ``2**-20`` bit (`LOGS`, `SMOOTH_LOGS`, `log_q20`) or ``2**-10`` bit (`bits_q10`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from operators.kernels.costing import LOG_SCALE_BITS, LOG_TABLE_SIZE

_LN2_Q40 = 762123384786
"""ln 2 in units of 2**-40."""
_GAMMA_Q40 = 634655335294
"""Euler's constant in units of 2**-40."""


def _log_table(size: int) -> NDArray[np.int64]:
    """Return log2 of 0 to ``size - 1`` (0 of 0), bit by bit: squaring a mantissa doubles its logarithm."""
    values = np.arange(size, dtype=np.uint64)
    values[0] = 1
    whole = np.zeros(size, np.uint64)
    for power in range(1, size.bit_length()):
        whole[1 << power :] = power
    mantissa = values << (np.uint64(31) - whole)
    logs = whole << np.uint64(LOG_SCALE_BITS)
    for place in range(LOG_SCALE_BITS - 1, -1, -1):
        mantissa = (mantissa * mantissa) >> np.uint64(31)
        carry = mantissa >> np.uint64(32)
        logs |= carry << np.uint64(place)
        mantissa >>= carry
    return logs.astype(np.int64)


def _smooth_table(size: int) -> NDArray[np.int64]:
    """Return Grassberger's G(n) / ln 2, the substitute for log2(n) that removes most bias of small samples.

    Source: P. Grassberger, "Entropy estimates from insufficient samplings", arXiv physics/0307138:
    G(1) = -gamma - ln 2, G(2) = 2 + G(1), G(2k + 1) = G(2k), G(2k + 2) = G(2k) + 2 / (2k + 1).
    """
    odd = np.arange(size // 2 + 1, dtype=np.int64) * 2 + 1
    steps = (2 << 40) // odd
    even = np.cumsum(steps) - _GAMMA_Q40 - _LN2_Q40  # G(2), G(4), ...
    table = np.empty(size, np.int64)
    table[0] = 0
    table[1] = -_GAMMA_Q40 - _LN2_Q40
    for n in (2, 3):
        table[n::2] = even[: table[n::2].size]
    # Divided by ln 2 with 24 bits of fraction: the product stays below 2**54.
    return (table >> 16) * (1 << 26) // (_LN2_Q40 >> 10)


def _growth(logs: NDArray[np.int64]) -> NDArray[np.int64]:
    products = np.arange(logs.size) * logs
    return np.diff(products, append=products[-1])


LOGS, SMOOTH_LOGS = _log_table(LOG_TABLE_SIZE), _smooth_table(LOG_TABLE_SIZE)
"""log2(x) for x from 0 to 65536; of 0 it is 0. And what stands for it in Grassberger's estimator."""
ALL_LOGS = np.stack((LOGS, SMOOTH_LOGS, _growth(LOGS), _growth(SMOOTH_LOGS)))
"""Both, and by how much x times each of them grows from x to x + 1."""


def log_q20(x: int) -> int:
    """Return log2(x) in units of 2**-20 bit; 0 for 0."""
    up = max(0, x.bit_length() - 16)
    return int(LOGS[x >> up]) + (up << LOG_SCALE_BITS)


def bits_q10(numerator: int, denominator: int) -> int:
    """Return ``-log2(numerator / denominator)`` in units of 2**-10 bit, for 0 < numerator <= denominator."""
    return max(0, log_q20(denominator) - log_q20(numerator)) >> 10
