"""Which codebooks a pack carries: those that save more bytes of its records than they take at its end.

A record that a book makes smaller waits, in both forms, until all that wait for this book save more than it takes. Then
the pack carries it, and what follows may use it too. What waits in vain is stored as it is without books: no pack is
larger than it would be if there were none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, TypeAlias

from operators.books import Book, Books
from operators.run import Encoded

WAITING_BYTES: Final = 4 << 20
"""Most bytes of records that wait; any further one is stored at once, without a book."""

Settled: TypeAlias = tuple[bytes, Encoded]
"""The digest of a segment, and its record."""


class Carried:
    """The codebooks of one pack, and the records that wait for them."""

    def __init__(self) -> None:
        self.books = Books()
        self._waiting: dict[bytes, list[tuple[bytes, Encoded, Encoded]]] = {}
        self._n_bytes = 0

    def settle(self, digest: bytes, plain: Encoded, booked: tuple[Encoded, Book] | None) -> Iterator[Settled]:
        """Take a record, and its smaller form with the book that it needs; yield what is to be stored now.

        Parameters
        ----------
        digest : bytes
            Of the segment.
        plain : Encoded
        booked : (Encoded, Book) or None
        """
        if booked is None:
            yield digest, plain
            return
        smaller, book = booked
        if book.id in self.books:
            yield digest, smaller
            return
        n_bytes = len(plain.record) + len(smaller.record)
        if self._n_bytes + n_bytes > WAITING_BYTES:
            yield digest, plain
            return
        self._n_bytes += n_bytes
        waiting = self._waiting.setdefault(book.id, [])
        waiting.append((digest, _kept(plain), _kept(smaller)))
        if sum(len(before.record) - len(after.record) for _, before, after in waiting) > len(book.to_bytes()):
            self.books.add(book.id, book.to_bytes())
            for one, before, after in self._waiting.pop(book.id):
                self._n_bytes -= len(before.record) + len(after.record)
                yield one, after

    def rest(self) -> Iterator[Settled]:
        """Yield what has waited in vain."""
        for waiting in self._waiting.values():
            for digest, plain, _ in waiting:
                yield digest, plain
        self._waiting.clear()


def _kept(encoded: Encoded) -> Encoded:
    return replace(encoded, record=bytes(encoded.record))
