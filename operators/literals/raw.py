"""Words as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import Encoding, Plan, Profile, Source, Stream, Writer
from operators.errors import FormatError
from operators.words import Bytes, Words, container


class _Writer(Writer):
    def __init__(self, out: NDArray[np.uint8]) -> None:
        self._out = out
        self._start = 0

    def add(self, words: Words) -> None:
        self._out[self._start : self._start + words.nbytes] = words.view(np.uint8)
        self._start += words.nbytes

    def finish(self) -> Bytes:
        return self._out.data


@dataclass(frozen=True, slots=True)
class _Plan(Plan):
    stream: Stream
    n_bytes: int

    def writer(self, out: NDArray[np.uint8] | None = None) -> Writer:
        return _Writer(np.empty(self.room, np.uint8) if out is None else out)


class _Source(Source):
    def __init__(self, data: NDArray[np.uint8], stream: Stream) -> None:
        self._left = data
        self._dtype = container(stream.width_bits)

    def read(self, out: Words) -> None:
        out.view(np.uint8)[:] = self._next(out.nbytes)

    def take(self, scratch: Words) -> Words:
        data = self._next(scratch.nbytes)
        words = data.view(self._dtype)
        if words.flags.aligned:
            return words
        scratch.view(np.uint8)[:] = data  # kernels see no unaligned pointer
        return scratch

    def take_bytes(self, scratch: Words) -> NDArray[np.uint8]:
        return self._next(scratch.nbytes)

    def _next(self, n_bytes: int) -> NDArray[np.uint8]:
        if n_bytes > self._left.size:
            raise FormatError(f"a read of at most {self._left.size} bytes", str(n_bytes))
        data, self._left = self._left[:n_bytes], self._left[n_bytes:]
        return data


class Raw(Encoding):
    """Words of 8, 16, 32 or 64 bits as they are.

    Payload: n little-endian words, nothing else. Words of other widths have no raw form: a packed one
    is never larger.
    """

    code = 64
    name = "raw"

    def plan(self, profile: Profile) -> Plan | None:
        stream = profile.stream
        return _Plan(stream, stream.n_bytes) if 8 * stream.n_bytes == stream.width_bits * stream.n_words else None

    def source(self, payload: memoryview, stream: Stream) -> Source:
        if 8 * stream.n_bytes != stream.width_bits * stream.n_words:
            raise FormatError("words of 8, 16, 32 or 64 bits", str(stream))
        if len(payload) != stream.n_bytes:
            raise FormatError(f"{stream.n_bytes} bytes of {stream}", str(len(payload)))
        return _Source(np.frombuffer(payload, np.uint8), stream)
