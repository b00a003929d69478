"""Words as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, BlockSource, Encoding, Plan, Profile, Stream, Writer
from operators.errors import FormatError
from operators.words import Bytes, Words, words_of


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


class _Source(BlockSource):
    def __init__(self, words: Words, stream: Stream) -> None:
        super().__init__(stream)
        self._words = words

    def decode_block(self, index: int, out: Words) -> None:
        out[:] = self._words[index * BLOCK_WORDS : index * BLOCK_WORDS + out.size]


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

    def source(self, payload: memoryview, stream: Stream) -> BlockSource:
        if 8 * stream.n_bytes != stream.width_bits * stream.n_words:
            raise FormatError("words of 8, 16, 32 or 64 bits", str(stream))
        if len(payload) != stream.n_bytes:
            raise FormatError(f"{stream.n_bytes} bytes of {stream}", str(len(payload)))
        return _Source(words_of(payload, stream.width_bits), stream)
