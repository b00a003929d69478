"""Bytes, bits and canonical codes, taken slowly: what the decoders of this folder share."""

from __future__ import annotations

from collections.abc import Mapping

Words = list[int]


class WrongError(Exception):
    """The bytes are not what the page says."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise WrongError(what)


class Bytes:
    """Bytes that are taken from the front."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, n_bytes: int) -> bytes:
        need(0 <= n_bytes <= len(self.data) - self.place, "too few bytes")
        self.place += n_bytes
        return self.data[self.place - n_bytes : self.place]

    def number(self, n_bytes: int) -> int:
        return int.from_bytes(self.take(n_bytes), "little")

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                need(byte > 0 or shift == 7, "a padded varint")
                need(value < 1 << 64, "a varint of 64 bits")
                return value

    def rest(self) -> bytes:
        return self.take(len(self.data) - self.place)

    def end(self) -> None:
        need(self.place == len(self.data), "bytes are left")


class Bits:
    """Bits of bytes, the least significant one first."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def bit(self) -> int:
        need(self.place < 8 * len(self.data), "too few bits")
        self.place += 1
        return self.data[(self.place - 1) // 8] >> (self.place - 1) % 8 & 1

    def number(self, n_bits: int) -> int:
        return sum(self.bit() << place for place in range(n_bits))

    def golomb(self, order: int) -> int:
        e = 0
        while not self.bit():
            e += 1
            need(e < 64, "a number of 64 bits")
        return (1 << (e + order)) + self.number(e + order) - (1 << order)

    def signed(self, order: int) -> int:
        value = self.golomb(order)
        return -(value + 1) // 2 if value % 2 else value // 2

    def to_the_byte(self) -> int:
        """Check that the last byte is filled with zeros; return the number of bytes that were taken."""
        while self.place % 8:
            need(self.bit() == 0, "bits behind the end")
        return self.place // 8


def numbers(data: bytes, n_bytes: int) -> Words:
    return [int.from_bytes(data[i : i + n_bytes], "little") for i in range(0, len(data), n_bytes)]


def canonical(lengths: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """Return the word of each (length, code)."""
    codes = {}
    code = before = 0
    for length, word in sorted((length, word) for word, length in lengths.items()):
        code <<= length - before
        codes[length, code] = word
        code, before = code + 1, length
    need(code == 1 << before, "a code that is not complete")
    return codes


def decode_stream(data: bytes, n: int, codes: Mapping[tuple[int, int], int]) -> Words:
    bits = Bits(data)
    words = []
    for _ in range(n):
        length = code = 0
        while (length, code) not in codes:
            length, code = length + 1, code << 1 | bits.bit()
            need(length <= 14, "no such code")
        words.append(codes[length, code])
    need(bits.to_the_byte() == len(data), "bytes behind a stream")
    return words
