"""Fixed codebooks: Huffman codes that are made once, and then code many tensors without a table of their own.

A book gives codes to a contiguous run of words of an alphabet, modulo its size, and one to an escape: any other
word is the escape's code and stands as it is elsewhere. So no word can fail, and a rare one does not cost all
others a part of a code. Source: Agrawal et al., single-stage Huffman encoding, arXiv 2601.10673; escapes, shifts
and families are ours.

A book on the wire is `BOOK_MAGIC`, a byte of zero (the version), one each for `width_bits` and `escape_length`,
two bytes each for `first` and the number of lengths, then the lengths, two to a byte, the first in the low half.
Its id is the first 8 bytes of the BLAKE3 digest of that, its number the low 14 bits of the first 2, little-endian: two
bytes on the wire. Books that literals of one pack name have numbers of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS
from operators.errors import FormatError, LimitError, UnsupportedError
from operators.kernels.bits import packed_bytes
from operators.kernels.fixed import HEAD_BYTES, STREAM_BYTES, decode_words, encode_words
from operators.kernels.huffman import SPLIT_WORDS, STREAMS, canonical_codes, decoding_tables, encoding_table
from operators.wire import Reader
from operators.words import Bytes, Words, container

BOOK_MAGIC: Final = b"BRVB"
BOOK_VERSION: Final = 0
BOOK_HEAD_BYTES: Final = 11
MAX_LENGTH: Final = 12
"""Bits of the longest code: one look-up finds it."""
MAX_WIDTH_BITS: Final = 12
"""Of the words that a book codes."""
ID_BYTES: Final = 8
NUMBER_BITS: Final = 14
MAX_BOOKS_BYTES: Final = 1 << 20
"""Of books that are stored together."""
SLACK_BYTES: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What kernels know of a book, for one shift.

    Attributes
    ----------
    encoding : uint64 array, shape (2**width_bits,)
    single, many
        Of `operators.kernels.huffman.decoding_tables`.
    blank, first, span, mask : int
        As for `operators.kernels.fixed.decode_words`.
    """

    encoding: NDArray[np.uint64]
    single: NDArray[np.uint32]
    many: NDArray[np.uint64]
    blank: int
    first: int
    span: int
    mask: int


@dataclass(frozen=True)
class Book:
    """One codebook; equal books have equal ids.

    Parameters
    ----------
    width_bits : int
        1 to `MAX_WIDTH_BITS`: the alphabet has ``2**width_bits`` words.
    first : int
        The first word that has a code.
    lengths : bytes
        Bits of the codes of `first` and the words after it, modulo the alphabet: 1 to `MAX_LENGTH` each, one word
        at least, and one word of the alphabet at least has none.
    escape_length : int
        Bits of the code of the escape, 1 to `MAX_LENGTH`.

    Raises
    ------
    FormatError
        The lengths are no complete code.
    """

    width_bits: int
    first: int
    lengths: bytes
    escape_length: int

    def __post_init__(self) -> None:
        if not 1 <= self.width_bits <= MAX_WIDTH_BITS:
            raise FormatError(f"a book of words of 1 to {MAX_WIDTH_BITS} bits", str(self.width_bits), "codebook")
        size = 1 << self.width_bits
        if not 0 <= self.first < size or not 1 <= len(self.lengths) < size:
            found = f"{len(self.lengths)} from {self.first}"
            raise FormatError(f"codes of 1 to {size - 1} words below {size}", found, "codebook")
        lengths = self._all_lengths
        if lengths.min() < 1 or lengths.max() > MAX_LENGTH or canonical_codes(lengths, np.empty_like(lengths)):
            raise FormatError(f"a complete code of 1 to {MAX_LENGTH} bits", "other lengths", "codebook")

    @property
    def _all_lengths(self) -> NDArray[np.int64]:
        """Lengths of the words from `first` on, and of the escape."""
        return np.array((*self.lengths, self.escape_length), np.int64)

    @cached_property
    def id(self) -> bytes:
        """First 8 bytes of the digest of the book as it is stored."""
        return blake3(self.to_bytes()).digest(ID_BYTES)

    @property
    def number(self) -> int:
        """What a literal names the book by: a part of its id."""
        return int.from_bytes(self.id[:2], "little") % (1 << NUMBER_BITS)

    @property
    def size(self) -> int:
        """Words of the alphabet."""
        return 1 << self.width_bits

    @cached_property
    def costs(self) -> NDArray[np.int32]:
        """Bits that each word of the alphabet takes, escapes with what they escape; shape (size,)."""
        costs = np.full(self.size, self.escape_length + 8 * container(self.width_bits).itemsize, np.int32)
        costs[(self.first + np.arange(len(self.lengths))) % self.size] = np.frombuffer(self.lengths, np.uint8)
        return costs

    @cached_property
    def mean(self) -> int:
        """The mean of the words from `first` on, as the code expects it; beyond the alphabet where they wrap."""
        shares = (1 << MAX_LENGTH) >> np.frombuffer(self.lengths, np.uint8).astype(np.int64)
        return self.first + int(shares @ np.arange(shares.size)) // int(shares.sum())

    def tables(self, shift: int = 0) -> Tables:
        """Return what kernels need to code words, each `shift` above those of the book, modulo the alphabet."""
        return _tables(self, shift % self.size)

    def encode(self, words: Words, out: NDArray[np.uint8], *, shift: int = 0) -> int:
        """Code words; return the bytes written.

        Parameters
        ----------
        words : Words, shape (n,)
            Of the book's width, contiguous. Read only.
        out : uint8 array, shape (at least `room` of them,)
            The caller's buffer, written from its start on.
        shift : int
            What was added to words like those that the book was made from.
        """
        tables = self.tables(shift)
        block_words = min(BLOCK_WORDS, words.size)
        scratch = np.empty((2, STREAM_BYTES * block_words + SLACK_BYTES * 2), np.uint8)
        escapes = np.empty(block_words, words.dtype)
        return encode_words(
            words, words.view(np.uint8), tables.encoding, tables.first, tables.span, tables.mask, scratch[0],
            scratch[1], escapes, out,
        )  # fmt: skip

    def decode(self, payload: NDArray[np.uint8], out: Words, *, shift: int = 0) -> int:
        """Fill `out` with words that `encode` coded; return the bytes read. Raises FormatError for other bytes."""
        tables = self.tables(shift)
        n_bytes = decode_words(
            payload, tables.many, tables.single, tables.blank, tables.first, tables.span, tables.mask,
            out.view(np.uint8), out,
        )  # fmt: skip
        if n_bytes < 0:
            raise FormatError(f"{out.size} words coded by book {self.id.hex()}", "other bytes", "coded words")
        return int(n_bytes)

    def to_bytes(self) -> bytes:
        """Return the book as it is stored."""
        head = bytearray(BOOK_MAGIC)
        head += bytes((BOOK_VERSION, self.width_bits, self.escape_length))
        head += self.first.to_bytes(2, "little") + len(self.lengths).to_bytes(2, "little")
        nibbles = np.frombuffer(self.lengths + bytes(len(self.lengths) % 2), np.uint8)
        return bytes(head) + (nibbles[::2] | nibbles[1::2] << 4).tobytes()

    @classmethod
    def from_bytes(cls, data: Bytes) -> Book:
        """Inverse of `to_bytes`. Raises FormatError, UnsupportedError."""
        reader = Reader(data)
        book = cls.take(reader)
        reader.end()
        return book

    @classmethod
    def take(cls, reader: Reader) -> Book:
        """Read the next book as it is stored. Raises FormatError, UnsupportedError."""
        head = bytes(reader.take(BOOK_HEAD_BYTES))
        if head[:4] != BOOK_MAGIC:
            raise FormatError(f"a codebook ({BOOK_MAGIC!r})", repr(head[:4]), "codebook")
        if head[4] > BOOK_VERSION:
            raise UnsupportedError(f"version {BOOK_VERSION} or older", str(head[4]), "codebook", "use a newer version")
        width_bits, escape_length = head[5], head[6]
        first, n_lengths = int.from_bytes(head[7:9], "little"), int.from_bytes(head[9:11], "little")
        packed = np.frombuffer(reader.take((n_lengths + 1) // 2), np.uint8)
        nibbles = np.stack((packed & 15, packed >> 4), axis=1).ravel()
        if nibbles[n_lengths:].any():
            raise FormatError("a half byte of zero after the last length", str(nibbles[-1]), "codebook")
        return cls(width_bits, first, nibbles[:n_lengths].tobytes(), escape_length)


def room(n_words: int, width_bits: int) -> int:
    """Return the bytes of a buffer for any `n_words` coded words."""
    return packed_bytes(n_words, width_bits) + HEAD_BYTES * (n_words // BLOCK_WORDS + 1)


def head_bytes(n_words: int, n_bytes: int) -> int:
    """Return about the least that `n_words` in one block of `n_bytes` take beside those: sizes of streams."""
    n_streams = STREAMS if n_words >= SPLIT_WORDS else 1
    return 1 + n_streams * (1 if n_bytes < 128 * n_streams else 2)


@lru_cache(maxsize=256)
def _tables(book: Book, shift: int) -> Tables:
    lengths = book._all_lengths  # noqa: SLF001
    codes = np.empty_like(lengths)
    canonical_codes(lengths, codes)
    first = (book.first + shift) % book.size
    blank = (first + lengths.size - 1) % book.size
    words = np.append((first + np.arange(lengths.size - 1)) % book.size, blank)
    encoding = np.empty(book.size, np.uint64)
    encoding[:] = (np.uint64(codes[-1]) << np.uint64(64 - lengths[-1])) | np.uint64(lengths[-1])
    encoding_table(words[:-1], lengths[:-1], codes[:-1], encoding)
    single, many = np.empty(1 << MAX_LENGTH, np.uint32), np.empty(1 << MAX_LENGTH, np.uint64)
    decoding_tables(words, lengths, codes, container(book.width_bits).itemsize, single, many)
    return Tables(encoding, single, many, blank, first, lengths.size - 1, book.size - 1)


class Books:
    """Books by id, in the order in which they came.

    Parameters
    ----------
    books : iterable of Book
    """

    def __init__(self, books: Iterable[Book] = ()) -> None:
        self._books: dict[bytes, Book] = {}
        self._numbers: dict[int, set[bytes]] = {}
        for book in books:
            self._take(book)

    def _take(self, book: Book) -> None:
        self._books[book.id] = book
        self._numbers.setdefault(book.number, set()).add(book.id)

    def __getitem__(self, book_id: bytes) -> Book:
        """Return a book. Raises UnsupportedError where it is not there."""
        return self._found(self._books.get(book_id), book_id.hex())

    def numbered(self, number: int) -> Book:
        """Return the book of this number. Raises UnsupportedError where it is not there, FormatError where two are."""
        ids = sorted(self._numbers.get(number, ()))
        if len(ids) > 1:
            found = " and ".join(one.hex() for one in ids)
            raise FormatError("codebooks with numbers of their own", f"{found} with {number}", "codebooks")
        return self._found(self._books[ids[0]] if ids else None, f"number {number}")

    def _found(self, book: Book | None, name: str) -> Book:
        if book is None:
            known = ", ".join(one.hex() for one in self._books) or "none"
            raise UnsupportedError(f"codebook {name}", known, next_step="load the books that it was written with")
        return book

    def __contains__(self, book_id: object) -> bool:
        return book_id in self._books

    def __iter__(self) -> Iterator[Book]:
        return iter(self._books.values())

    def __len__(self) -> int:
        return len(self._books)

    def add(self, book_id: bytes, data: Bytes) -> None:
        """Take a book as it is stored. Raises FormatError where it is not the one with that id."""
        book = Book.from_bytes(data)
        if book.id != bytes(book_id):
            raise FormatError(f"codebook {bytes(book_id).hex()}", book.id.hex(), "codebook", "take another copy of it")
        self._take(book)

    def to_bytes(self) -> bytes:
        """Return the books as they are stored, one after the other."""
        return b"".join(book.to_bytes() for book in self)

    @classmethod
    def from_bytes(cls, data: Bytes) -> Books:
        """Inverse of `to_bytes`. Raises FormatError, LimitError, UnsupportedError."""
        if len(data) > MAX_BOOKS_BYTES:
            raise LimitError(f"codebooks of at most {MAX_BOOKS_BYTES} bytes", str(len(data)))
        reader = Reader(data)
        books = []
        while reader.position < len(reader.buffer):
            books.append(Book.take(reader))
        return cls(books)
