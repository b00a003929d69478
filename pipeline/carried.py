"""Which codebooks a pack carries: those that save more bytes of its records than they take at its end.

A record that a book makes smaller waits, in both forms, until all that wait for this book save more than it takes. Then
the pack carries it, and what follows may use it too. What waits in vain is stored as it is without books. Whatever
comes behind one that waits does so too: a pack has its records in the order of its segments, which an index takes the
fewest bytes to tell. What names of programs and other sizes of records add to the index and to the manifest is only
about known by then: at the end, where it is not clear, both are compared, and a pack that would be smaller without
books is made again. So no archive is larger than it would be if there were no books.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from operators.books import Book, Books
from operators.run import Encoded
from pipeline.packs import pack_index
from pipeline.parquet import to_parquet
from pipeline.rows import Row

WAITING_BYTES: Final = 16 << 20
"""Most bytes of records that wait; where there are more, the first is stored without a book."""
LEAST_GAIN_BYTES: Final = 8
"""That a codebook has to save of a record: its program, like few others, takes about half of it in a manifest."""
CLEAR_GAIN_BYTES: Final = 8
CLEAR_NAME_BYTES: Final = 64
"""More than a record with a book, and each program that names one, add to index and manifest: what saves as much is
clear. In 600 draws of rows of real packs it was 8 bytes a record and 51 at most."""

Settled: TypeAlias = tuple[bytes, Encoded]
"""The digest of a segment, and its record."""


class Carried:
    """The codebooks of one pack, and the records that wait for them.

    Parameters
    ----------
    is_open : bool
        Whether records are offered: not where a pack is made again, without books.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        self.is_open = is_open
        self.books = Books()
        self._plain: dict[bytes, tuple[str, int]] = {}
        """Program and bytes, without a book, of segments whose records name one."""
        self._names: set[str] = set()
        """Programs of records that name a book."""
        self._saved_bytes = 0
        self._waiting: dict[bytes, tuple[Encoded, tuple[Encoded, Book] | None]] = {}
        self._gains: Counter[bytes] = Counter()
        """What the books that are not carried save of the records that wait, beyond what they have to."""
        self._n_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether no record waits, so that one without a book is stored at once."""
        return not self._waiting

    def settle(self, digest: bytes, plain: Encoded, booked: tuple[Encoded, Book] | None) -> Iterator[Settled]:
        """Take a record, and its smaller form with the book that it needs; yield what is to be stored now.

        Parameters
        ----------
        digest : bytes
            Of the segment: no two are equal.
        plain : Encoded
            In memory of its own, as is the smaller one.
        booked : (Encoded, Book) or None
        """
        self._waiting[digest] = plain, booked
        self._count(plain, booked, 1)
        if booked is not None and self._gains[booked[1].id] > len(booked[1].to_bytes()):
            self.books.add(booked[1].id, booked[1].to_bytes())
        while self._waiting:
            first = next(iter(self._waiting))
            plain, booked = self._waiting[first]
            is_carried = booked is not None and booked[1].id in self.books
            if booked is not None and not is_carried and self._n_bytes <= WAITING_BYTES:
                break
            yield self._take(first)

    def rest(self) -> Iterator[Settled]:
        """Yield all that has waited."""
        while self._waiting:
            yield self._take(next(iter(self._waiting)))

    def pays(self, rows: Sequence[Row], index: bytes) -> bool:
        """Whether the finished pack and its part of a manifest are no larger than they would be without books.

        Parameters
        ----------
        rows : sequence of Row
            Of the pack, and those whose records are elsewhere.
        index : bytes
            Of the pack.
        """
        if not len(self.books):
            return True
        books_bytes = len(self.books.to_bytes())
        clear_bytes = CLEAR_GAIN_BYTES * len(self._plain) + CLEAR_NAME_BYTES * len(self._names)
        if self._saved_bytes >= books_bytes + clear_bytes:
            return True
        plain = self._without_books(rows)
        with_books = books_bytes + len(index) + len(to_parquet(rows))
        return with_books <= self._saved_bytes + len(pack_index(plain)) + len(to_parquet(plain))

    def _without_books(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows as they would be if no record named a book."""
        moved: dict[int, tuple[str | None, int, int]] = {}
        moved_by = 0
        for row in sorted((row for row in rows if row.pack is None), key=lambda row: row.pack_offset or 0):
            offset, n_bytes = row.pack_offset or 0, row.stored_bytes or 0
            if offset not in moved:
                program, plain_bytes = self._plain.get(row.digest or b"", (row.program, n_bytes))
                moved[offset] = program, plain_bytes, offset + moved_by
                moved_by += plain_bytes - n_bytes
        found = []
        for row in rows:
            if row.pack is None:
                program, plain_bytes, place = moved[row.pack_offset or 0]
                row = replace(row, program=program, stored_bytes=plain_bytes, pack_offset=place)
            found.append(row)
        return found

    def _take(self, digest: bytes) -> Settled:
        plain, booked = self._waiting.pop(digest)
        self._count(plain, booked, -1)
        if booked is None or booked[1].id not in self.books:
            return digest, plain
        self._plain[digest] = str(plain.program), len(plain.record)
        self._names.add(str(booked[0].program))
        self._saved_bytes += len(plain.record) - len(booked[0].record)
        return digest, booked[0]

    def _count(self, plain: Encoded, booked: tuple[Encoded, Book] | None, sign: int) -> None:
        self._n_bytes += sign * len(plain.record)
        if booked is not None:
            smaller, book = booked
            self._n_bytes += sign * len(smaller.record)
            self._gains[book.id] += sign * (len(plain.record) - len(smaller.record) - LEAST_GAIN_BYTES)
