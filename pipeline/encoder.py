"""From a segment to its record: searched, recalled or booked, encoded, and decoded again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from operators.books import Book, Books
from operators.errors import DamageError, InternalError
from operators.limits import RECORD_BYTES, SEGMENT_BYTES
from operators.program import Literal, Node
from operators.run import Encoded, encode, execute
from operators.words import Bytes, Words, dtype_of, words_of
from pipeline.carried import LEAST_GAIN_BYTES
from pipeline.rows import Row
from synth.booked import NAME_BYTES, Shelf, is_offered
from synth.options import SearchOptions
from synth.prior import Prior
from synth.roles import Recalled, Roles, smallest
from synth.synthesis import Synthesis, synthesise

RECORD_SLACK_BYTES = 64 << 10
"""What a record may take beyond its segment while it is written: its header, and room that payloads leave."""


class Encoder:
    """Turns the segments of a task into records.

    Parameters
    ----------
    options : SearchOptions
    prior : Prior
        With the codebooks of the run.
    """

    def __init__(self, options: SearchOptions, prior: Prior) -> None:
        self._roles = Roles(options, prior)
        self._shelf = Shelf(prior.books if is_offered(options) else Books())
        self._tensor: tuple[str, str | None] | None = None
        self._found: Synthesis | Recalled | None = None
        self._decoded = np.empty(0, np.uint8)
        self._written = np.empty(0, np.uint8)
        self.alarms: list[str] = []

    def start(self) -> None:
        """Forget the tensor of the last task: a task must not depend on those before it."""
        self._tensor = self._found = None
        self._roles.clear()
        self.alarms = []

    def record(self, row: Row, data: memoryview, out: NDArray[np.uint8] | None = None) -> tuple[Encoded, int]:
        """Return a record of `data`, decoded and compared, and the expansions that were spent on it.

        Parameters and memory are as of `write`.
        """
        encoded, expansions = self.write(row, data, out)
        return self.checked(row, data, encoded.record) or encoded, expansions

    def write(self, row: Row, data: memoryview, out: NDArray[np.uint8] | None = None) -> tuple[Encoded, int]:
        """Return a record of `data`, to be `checked`, and the expansions that were spent on it.

        Parameters
        ----------
        row : Row
            Of the segment, with its digest.
        data : memoryview
            Its bytes; not written, not kept.
        out : uint8 array, optional
            Memory for the record, at least `record_room` of the segment; by default that of the encoder.

        Returns
        -------
        (Encoded, int)
            The record lasts until the next call, or as long as `out` is not used again.
        """
        assert row.digest is not None
        words = segment_words(row.dtype, data)
        self._written = _grown(self._written, record_room(len(data)), RECORD_BYTES) if out is None else out
        encoded, expansions = self._coded(row, words, row.digest)
        if encoded is None or encoded.body_bytes >= len(data):
            encoded = _literal(words, row.digest)
        return encoded, expansions

    def checked(
        self, row: Row, data: memoryview, record: Bytes, out: NDArray[np.uint8] | None = None
    ) -> Encoded | None:
        """Return None where `record` decodes to `data`, else one that does: of plain bytes, in memory of its own.

        Parameters
        ----------
        row, data
            As for `write`.
        record : bytes-like
        out : uint8 array, optional
            Memory to decode into, at least as long as `data`; by default that of the encoder.

        Raises
        ------
        InternalError
            That does not either.
        """
        assert row.digest is not None
        if self._restores(record, data, row.digest, out=out):
            return None
        self.alarms.append(row.where)
        plain = _literal(words_of(data, 8), row.digest, "raw")
        if not self._restores(plain.record, data, row.digest, out=out):
            raise InternalError("a raw record that decodes to its bytes", "other bytes", row.where, "report it")
        return plain

    def booked(self, row: Row, data: memoryview, plain: Encoded) -> tuple[Encoded, Book] | None:
        """Return a verified record of `data` that is smaller than `plain`, and the codebook that it needs, or None.

        Parameters
        ----------
        row, data
            As for `write`.
        plain : Encoded
            What that returned; it stays as it is.
        """
        words = segment_words(row.dtype, data)
        found = self._shelf.choose(words, row.dtype)
        if found is None or found.n_bytes + NAME_BYTES + LEAST_GAIN_BYTES > plain.body_bytes:
            return None
        encoded = encode(found.program, words, row.digest, books=self._shelf.books)
        if encoded is None or len(encoded.record) + LEAST_GAIN_BYTES > len(plain.record):
            return None
        if not self._restores(encoded.record, data, row.digest or b"", self._shelf.books):
            self.alarms.append(row.where)
            return None
        return encoded, found.book

    def _coded(self, row: Row, words: Words, digest: bytes) -> tuple[Encoded | None, int]:
        """Search once per tensor and task; its further segments, and tensors of its role, share the program."""
        tensor = (row.file, row.tensor)
        if row.tensor is not None and tensor == self._tensor and self._found is not None:
            return self._encoded(self._found.program_for(words), words, digest), 0
        self._tensor = tensor
        rows, columns = shape_of(row, words)
        row_words = columns if rows > 1 else 0
        recalled = self._roles.recall(row.tensor, words, row.dtype, row_words, digest)
        missed: tuple[int, Recalled] | None = None
        for one in () if recalled is None else (recalled, *recalled.others):
            encoded = one.encoded or self._encoded(one.program, words, digest)
            if encoded is not None and not one.is_missed(encoded.body_bytes):
                self._found = one
                return encoded, 0
            if encoded is not None and (missed is None or encoded.body_bytes < missed[0]):
                missed = encoded.body_bytes, one
        found = self._found = self._roles.search(words, row.dtype, rows, columns)
        encoded = self._encoded(found.program, words, digest)
        if found.expansions and (encoded is None or found.is_missed(encoded.body_bytes)):
            found, encoded = smallest(found, encoded, words, lambda program: self._encoded(program, words, digest))
            self._found = found
        if encoded is not None and words.size:
            self._roles.remember(row.tensor, words, row.dtype, row_words, found, encoded)
        if missed is not None and (encoded is None or missed[0] < encoded.body_bytes):
            self._found = missed[1]
            encoded = missed[1].encoded or self._encoded(missed[1].program, words, digest)
        return encoded, found.expansions

    def _encoded(self, program: Node, words: Words, digest: bytes) -> Encoded | None:
        """Return the record of `program`, or None where it does not fit `words` or a limit of the format."""
        try:
            return encode(program, words, digest, out=self._written)
        except DamageError:
            return None

    def _restores(
        self,
        record: Bytes,
        data: memoryview,
        digest: bytes,
        books: Books | None = None,
        out: NDArray[np.uint8] | None = None,
    ) -> bool:
        if out is None:
            self._decoded = out = _grown(self._decoded, len(data), SEGMENT_BYTES)
        try:
            execute(record, books, n_bytes=len(data), digest=digest, out=out[: len(data)], expected=data)
        except DamageError:
            return False
        return True


def record_room(n_bytes: int) -> int:
    """Return the memory that the record of a segment may need while it is written."""
    return min(n_bytes + RECORD_SLACK_BYTES, RECORD_BYTES)


def search_segment(row: Row, data: Bytes, options: SearchOptions, prior: Prior) -> Synthesis:
    """Search the program of a segment from its bytes, seen as the rows that the plan says."""
    words = segment_words(row.dtype, data)
    rows, columns = shape_of(row, words)
    return synthesise(words, dtype=row.dtype, rows=rows, columns=columns, options=options, prior=prior)


def shape_of(row: Row, words: Words) -> tuple[int, int]:
    """Return rows and columns of the words of a segment."""
    by_rows = row.n_rows > 1 and words.size % row.n_rows == 0
    return (row.n_rows, words.size // row.n_rows) if by_rows else (1, words.size)


def segment_words(dtype: str | None, data: Bytes) -> Words:
    """View the bytes of a segment as words of its dtype, or as bytes where they do not fit it."""
    word_bits = dtype_of(dtype).word_bits
    return words_of(data, word_bits if len(data) * 8 % word_bits == 0 else 8)


def _grown(buffer: NDArray[np.uint8], n_bytes: int, most_bytes: int) -> NDArray[np.uint8]:
    """Return `buffer`, or a larger one where it is smaller than `n_bytes`; its content is lost then."""
    if buffer.size >= n_bytes:
        return buffer
    return np.empty(min(most_bytes, max(n_bytes, 2 * buffer.size)), np.uint8)


def _literal(words: Words, digest: bytes, encoding: str = "") -> Encoded:
    encoded = encode(Node(Literal(encoding)), words, digest)
    assert encoded is not None, "a literal takes any words"
    return encoded
