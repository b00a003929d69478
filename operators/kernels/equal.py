"""Whether two runs of bytes are the same."""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from operators.kernels.jit import kernel
from operators.kernels.memory import load_u64

_STEP_BYTES = 4096
"""Bytes that are compared before anybody looks at the outcome: a loop without a way out is vectors."""


@kernel()
def equal_bytes(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    """Return whether `a` and `b`, of one size and any alignment, hold the same bytes."""
    n_bytes = a.size
    start = 0
    while n_bytes - start >= _STEP_BYTES:
        differ = np.uint64(0)
        for at in range(start, start + _STEP_BYTES, 8):
            differ |= load_u64(a, np.uint64(at)) ^ load_u64(b, np.uint64(at))
        if differ != np.uint64(0):
            return False
        start += _STEP_BYTES
    for at in range(start, n_bytes):
        if a[at] != b[at]:
            return False
    return True
