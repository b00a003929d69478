"""Integers on the wire: little-endian base-128 varints, shortest form only."""

from __future__ import annotations

from operators.errors import FormatError
from operators.words import Bytes

VARINT_BYTES = 10
"""Bytes of the longest varint, one of 64 bits."""


def put_varint(out: bytearray, value: int) -> None:
    """Append `value` (0 to 2**64 - 1) to `out`."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


class Reader:
    """Reads a buffer from front to back and never beyond its end.

    Parameters
    ----------
    buffer : bytes-like
        Not copied; slices that `take` returns share its memory.
    """

    def __init__(self, buffer: Bytes) -> None:
        self.buffer = memoryview(buffer)
        self.position = 0

    def take(self, n_bytes: int) -> memoryview:
        """Return the next `n_bytes`. Raises FormatError beyond the end."""
        end = self.position + n_bytes
        if end > len(self.buffer):
            raise FormatError(f"{n_bytes} more bytes", f"{len(self.buffer) - self.position}", f"@{self.position}")
        part = self.buffer[self.position : end]
        self.position = end
        return part

    def byte(self) -> int:
        """Return the next byte."""
        return self.take(1)[0]

    def varint(self, most: int = (1 << 64) - 1) -> int:
        """Return the next varint. Raises FormatError for one that is padded or larger than `most`."""
        value = shift = 0
        for length in range(1, VARINT_BYTES + 1):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if byte == 0 and length > 1:
                    raise FormatError("an integer in its shortest form", "a padded one", f"@{self.position}")
                if value > most:
                    raise FormatError(f"an integer up to {most}", str(value), f"@{self.position}")
                return value
        raise FormatError(f"an integer of at most {VARINT_BYTES} bytes", "a longer one", f"@{self.position}")

    def end(self) -> None:
        """Raise FormatError unless everything was read."""
        if self.position != len(self.buffer):
            raise FormatError(f"an end at {self.position}", f"{len(self.buffer) - self.position} more bytes")
