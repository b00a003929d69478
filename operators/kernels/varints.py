"""Varints of up to 4 bytes, as `operators.wire` has them.

Source: little-endian base-128 integers in their shortest form.
"""

# mypy: disable-error-code="no-any-return"
from __future__ import annotations

from typing import Any, Final

import numpy as np

from operators.kernels.jit import inlined

MOST_BYTES: Final = 4


@inlined
def put_varint(out: Any, at: Any, value: Any) -> Any:
    """Write a varint; return the byte after it."""
    while value > 127:
        out[at] = (value & 127) | 128
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@inlined
def take_varint(record: Any, at: Any) -> Any:
    """Return a varint of up to 4 bytes and the byte after it; -1 where there is none, or a padded one."""
    value, shift = np.int64(0), 0
    while at < record.size and shift < 7 * MOST_BYTES:
        byte = np.int64(record[at])
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return (value if byte > 0 or shift == 7 else np.int64(-1)), at
    return np.int64(-1), at
