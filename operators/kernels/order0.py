"""What coding words by their frequencies takes."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import kernel
from operators.kernels.memory import item_bytes
from operators.kernels.rans import log2_of


@kernel()
def order_0_q16(words: NDArray[Any], n_planes: int) -> int:
    """Return the empirical entropy of all words together, in units of 2**-16 bit.

    Parameters
    ----------
    words : uint8 or uint16 array
        Fewer than 2**31 of them.
    n_planes : int
        Words that are so many apart are counted together, apart from others.
    """
    counts = np.zeros(1 << 8 * item_bytes(words), np.int32)
    n = words.size // n_planes
    total: Any = np.int64(0)
    for plane in range(n_planes):
        for i in range(plane, words.size, n_planes):
            counts[words[i]] += 1
        total += n * log2_of(n)
        # Tables are larger than what is counted here: they are read, and cleared, where something is.
        for i in range(plane, words.size, n_planes):
            count = np.int64(counts[words[i]])
            if count:
                total -= count * log2_of(count)
                counts[words[i]] = 0
    return total
