"""How the bytes of a request to S3 are sent: from where they lie, in pieces that a socket may take at once."""

from __future__ import annotations

import os
from collections.abc import Sequence

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload, payload_type

from pipeline.store import Data

SENT_BYTES = 1 << 20
"""Handed over at once: what a socket does not take is copied, so that more would be copied for nothing."""


class Body:
    """The body of one request, as the client takes it: a file, which it can read and seek in.

    Of ``bytes`` it would make a file in memory, copy that whole, and send it by 64 KiB.

    Parameters
    ----------
    pieces : sequence of bytes-like
        In order; not copied, so they stay as they are until the request has ended.
    """

    def __init__(self, pieces: Sequence[Data]) -> None:
        self.pieces = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        self.n_bytes = sum(map(len, self.pieces))
        self._place = 0

    def read(self, n_bytes: int | None = -1) -> bytes:
        """Return the next bytes, for what hashes a body or sends it in a form of its own."""
        start, stop = self._place, self.n_bytes
        if n_bytes is not None and n_bytes >= 0:
            stop = min(start + n_bytes, stop)
        self._place = max(start, stop)
        parts, begin = [], 0
        for piece in self.pieces:
            parts.append(piece[max(start - begin, 0) : max(stop - begin, 0)])
            begin += len(piece)
        return b"".join(parts)

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to another place and return it."""
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.n_bytes}[whence]
        return self._place


@payload_type(Body)
class _Sent(Payload):
    """What sends a `Body`: all of it, each time it is asked to."""

    def __init__(self, body: Body, **_: object) -> None:
        super().__init__(body)
        self._size = body.n_bytes

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value.pieces).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._value.pieces:
            for start in range(0, len(piece), SENT_BYTES):
                await writer.write(piece[start : start + SENT_BYTES])
