"""Words by a fixed codebook, which is not in the payload."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, BlockSource, Conditioned, Stream
from operators.books import MAX_WIDTH_BITS, NUMBER_BITS, Book, Books, room
from operators.errors import FormatError
from operators.words import Words

TABLES_BYTES = 1 << 18
"""More than tables and scratch of a book take."""


class _Source(BlockSource):
    """Blocks follow one another, and nothing but the one before says where one begins."""

    def __init__(self, payload: memoryview, stream: Stream, book: Book, shift: int) -> None:
        super().__init__(stream)
        self._payload = np.frombuffer(payload, np.uint8)
        self._book = book
        self._shift = shift
        self._at = 0

    def decode_block(self, index: int, out: Words) -> None:
        self._at += self._book.decode(self._payload[self._at :], out, shift=self._shift)
        if index == (self.stream.n_words - 1) // BLOCK_WORDS and self._at != self._payload.size:
            raise FormatError(f"a payload that ends at {self._at}", f"{self._payload.size} bytes", "literal")


@dataclass(frozen=True, slots=True)
class Fixed(Conditioned):
    """Words of up to 12 bits by a codebook that is made once and codes many tensors (`operators.books`).

    No word can fail: one without a code is the code of the escape, and stands as it is elsewhere. A block that would
    grow is stored as it is, one of equal words as one of them. The blocks are those of coded messages.

    Parameters
    ----------
    book : int
        Number of the book: a part of its id (`operators.books.Book.number`).
    shift : int
        What was added to words like those that the book was made from, modulo the alphabet.
    """

    book: int
    shift: int

    code = 71
    name = "fixed"

    def check(self, stream: Stream) -> None:
        if not 1 <= stream.width_bits <= MAX_WIDTH_BITS or not stream.n_words:
            raise FormatError(f"words of 1 to {MAX_WIDTH_BITS} bits", str(stream))
        if self.book >> NUMBER_BITS:
            raise FormatError(f"a number of a codebook below 2**{NUMBER_BITS}", str(self.book))
        if self.shift >> stream.width_bits:
            raise FormatError(f"a shift below 2**{stream.width_bits}", str(self.shift))

    def room(self, stream: Stream) -> int:
        return room(stream.n_words, stream.width_bits)

    def write(self, words: Words, out: NDArray[np.uint8], *, thorough: bool = False, books: Books | None = None) -> int:
        return self._book(books).encode(words, out, shift=self.shift)

    def source(self, payload: memoryview, stream: Stream, books: Books | None = None) -> BlockSource:
        book = self._book(books)
        if book.width_bits != stream.width_bits:
            raise FormatError(f"a codebook of words of {stream.width_bits} bits", f"{book.width_bits}", "literal")
        return _Source(payload, stream, book, self.shift)

    def scratch_bytes(self, stream: Stream) -> int:
        return TABLES_BYTES

    def _book(self, books: Books | None) -> Book:
        return (Books() if books is None else books).numbered(self.book)
