"""Words packed into the bits that the largest of them needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, BlockSource, Encoding, Plan, Profile, Stream, Writer
from operators.errors import FormatError
from operators.kernels.bits import pack, packed_bytes, unpack
from operators.words import Bytes, Words


def packed_width(n_bytes: int, stream: Stream) -> int:
    """Return the widest packing of `stream` that `n_bytes` can hold."""
    return min(stream.width_bits, 8 * n_bytes // stream.n_words) if stream.n_words else 0


class _Writer(Writer):
    def __init__(self, stream: Stream, out: NDArray[np.uint8]) -> None:
        self._width = packed_width(out.size, stream)
        self._out = out
        self._start = 0

    def add(self, words: Words) -> None:
        if self._width:
            end = self._start + packed_bytes(words.size, self._width)
            pack(words, self._width, self._out[self._start : end])
            self._start = end

    def finish(self) -> Bytes:
        return self._out.data


@dataclass(frozen=True, slots=True)
class _Plan(Plan):
    stream: Stream
    n_bytes: int

    def writer(self, out: NDArray[np.uint8] | None = None) -> Writer:
        return _Writer(self.stream, np.empty(self.room, np.uint8) if out is None else out)


class _Source(BlockSource):
    def __init__(self, packed: NDArray[np.uint8], width: int, stream: Stream) -> None:
        super().__init__(stream)
        self._packed = packed
        self._width = width

    def decode_block(self, index: int, out: Words) -> None:
        if not self._width:
            out.fill(0)
            return
        start = index * BLOCK_WORDS * self._width >> 3
        unpack(self._packed[start : start + packed_bytes(out.size, self._width)], self._width, out)


class Bitpack(Encoding):
    """Fixed-width words.

    Payload: the words, `packed` bits each, least significant bit first, one after the other; the bits
    left in the last byte are zero. For ``b[n]`` and a payload of N bytes, ``packed = min(b, 8 * N // n)``,
    and N must be ``ceil(n * packed / 8)``. So nothing but the words is stored, and a payload of no bytes
    is n zeros.
    """

    code = 65
    name = "bitpack"

    def plan(self, profile: Profile) -> Plan:
        return _Plan(profile.stream, packed_bytes(profile.stream.n_words, profile.largest.bit_length()))

    def source(self, payload: memoryview, stream: Stream) -> BlockSource:
        packed = np.frombuffer(payload, np.uint8)
        width = packed_width(packed.size, stream)
        n_bits = stream.n_words * width
        if packed.size != packed_bytes(stream.n_words, width):
            raise FormatError(f"{packed_bytes(stream.n_words, width)} bytes of {stream}", str(packed.size))
        if n_bits & 7 and packed[-1] >> (n_bits & 7):
            raise FormatError("zero bits after the last word", f"{packed[-1]:#04x}")
        return _Source(packed, width, stream)
