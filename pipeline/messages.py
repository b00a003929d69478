"""Tensors on the wire of a training run: one message each, coded in a single stage by books that every rank holds.

A message is a header (`HEADER`), the book of each of its equal parts (`PART`), the bytes of words that are not coded,
plane by plane, and the coded plane, part by part (`operators.kernels.fixed`). Mostly there is one part; more where
words are of one size here and of another there, as gradients of several layers in one bucket. A tensor that no book
fits, or of a drifted kind, has no part: after the header stand the words as they are. Source: Agrawal et al., arXiv
2601.10673; parts are ours.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from operators.books import room
from operators.errors import FormatError, UnsupportedError
from operators.kernels.fixed import join_top, join_top_wide, rotate_bytes, split_top, split_top_wide
from operators.words import Words
from synth.books import LAYOUTS, Choice, CodebookSet, Counts, Layout, take_samples

HEADER: Final = struct.Struct("<4sBBBB8sQI")
"""Magic, version, number of the layout, flags, parts, id of the set, words, CRC-32 of all else or zero."""
PART: Final = np.dtype([("book", "<u2"), ("shift", "<u2")])
"""Number of the book in the set, and what was added to words like those that it was made from."""
MAGIC: Final = b"BRVM"
VERSION: Final = 0
CHECKED: Final = 1
"""Flag: the CRC-32 is there."""
MIN_WORDS = 256
"""Fewer words are sent as they are."""
DRIFT_PPM = 20_000
"""A kind has drifted when its regret, averaged, is above this for `DRIFT_MESSAGES` messages."""
DRIFT_MESSAGES = 3
ESCAPE_PART = 256
"""Or where one word in so many is escaped."""
RECENT = 4096
"""Samples that are kept to learn from again."""


@dataclass(slots=True)
class Traffic:
    """What was sent of one dtype and kind.

    Attributes
    ----------
    messages, raw_bytes, wire_bytes : int
    bits_q8, excess_q8 : int
        Of the samples of messages, and what they take beyond codes of their own; decayed by a quarter each time.
    strikes : int
        Messages in a row with a regret, or a part of escapes, beyond the limit.
    recent : deque of int64 arrays
        Counts of the samples of the last messages, those to learn from.
    """

    messages: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0
    bits_q8: int = 0
    excess_q8: int = 0
    strikes: int = 0
    recent: deque[Counts] = field(default_factory=lambda: deque(maxlen=RECENT), repr=False)

    @property
    def has_drifted(self) -> bool:
        """Whether the books no longer fit."""
        return self.strikes >= DRIFT_MESSAGES

    def note(self, choices: Sequence[Choice]) -> None:
        """Take in the choice of a book for each part of a message."""
        self.messages += 1
        self.bits_q8 += (sum(one.bits for one in choices) << 8) - self.bits_q8 // 4
        self.excess_q8 += sum(one.excess_q8 for one in choices) - self.excess_q8 // 4
        n_escapes, n_words = sum(one.escapes for one in choices), sum(one.sample_words for one in choices)
        is_off = self.regret_ppm > DRIFT_PPM or n_escapes * ESCAPE_PART > n_words
        self.strikes = self.strikes + 1 if is_off else 0

    @property
    def regret_ppm(self) -> int:
        """What the last messages take beyond codes of their own, in millionths of their coded planes."""
        return max(0, self.excess_q8) * 1_000_000 // max(1, self.bits_q8)


class TensorCodec:
    """Codes tensors as messages by the books of a set.

    Parameters
    ----------
    books : CodebookSet
    on_drift : {"raw", "relearn"}
        What becomes of a kind that has drifted: it is sent as it is, or goes on to be coded until `books` is replaced
        by a set learned from `samples`.
    checksum : bool
        Messages end in an error, not in wrong values, whatever becomes of them on the way, and such without one are
        refused. Otherwise only the structure of a message is checked.
    """

    def __init__(
        self, books: CodebookSet, *, on_drift: Literal["raw", "relearn"] = "relearn", checksum: bool = False
    ) -> None:
        self.books = books
        self.on_drift = on_drift
        self.checksum = checksum
        self._traffic: dict[tuple[str, str], Traffic] = {}

    def encode(self, words: Words, dtype: str, kind: str) -> NDArray[np.uint8]:
        """Return the message of a tensor, a new array.

        Parameters
        ----------
        words : Words, shape (n,)
            Bits of its elements, contiguous. Read only.
        dtype : str
            A key of `synth.books.LAYOUTS`.
        kind : str
        """
        layout = _layout_of(dtype, words)
        traffic = self._traffic.setdefault((dtype, kind), Traffic())
        message = None
        if words.size >= MIN_WORDS:
            samples, chosen = self.books.select(dtype, kind, words)
            traffic.recent.extend(samples)
            if chosen:
                traffic.note([choice for _, choice in chosen])
                if not (traffic.has_drifted and self.on_drift == "raw"):
                    message = self._coded(words, layout, chosen)
        if message is None:
            message = np.empty(HEADER.size + words.nbytes, np.uint8)
            message[HEADER.size :] = words.view(np.uint8)
            self._seal(message, layout, 0, words.size)
        traffic.raw_bytes += words.nbytes
        traffic.wire_bytes += message.size
        return message

    def decode(self, message: NDArray[np.uint8], out: Words, dtype: str) -> None:
        """Restore the words of a message.

        Parameters
        ----------
        message : uint8 array
        out : Words, shape (n,)
            The caller's memory, contiguous, as many words as are expected.
        dtype : str
            That is expected.

        Raises
        ------
        FormatError
            The message is damaged, or one of another dtype or size.
        UnsupportedError
            It is coded by books of another set.
        """
        layout = _layout_of(dtype, out)
        if message.size < HEADER.size:
            raise FormatError(f"a message of at least {HEADER.size} bytes", str(message.size), "message")
        magic, version, number, flags, n_parts, set_id, n_words, checksum = HEADER.unpack_from(message.data)
        if magic != MAGIC:
            raise FormatError(f"a message ({MAGIC!r})", repr(magic), "message")
        if version > VERSION or flags > CHECKED:
            raise UnsupportedError(f"version {VERSION}, known flags", f"{version}, {flags}", "message")
        if number != layout.number or n_words != out.size:
            found = next((name for name, one in LAYOUTS.items() if one.number == number), str(number))
            raise FormatError(f"{out.size} words of {dtype}", f"{n_words} of {found}", "message")
        if self.checksum and not flags:
            raise FormatError("a message with a checksum", "one without", "message", "let every rank add one")
        if checksum != (_checksum(message) if flags else 0):
            raise FormatError("the checksum of the message", "another", "message", "send it again")
        body = message[HEADER.size :]
        if not n_parts:
            if body.size != out.nbytes:
                raise FormatError(f"{out.nbytes} bytes", str(body.size), "message")
            out.view(np.uint8)[:] = body
            return
        if set_id != self.books.id:
            raise UnsupportedError(
                f"a message coded by the books of set {self.books.id.hex()}", set_id.hex(), "message",
                "give every rank the same books",
            )  # fmt: skip
        n_head = n_parts * PART.itemsize
        if body.size < n_head + _plain_bytes(layout, out.size):
            raise FormatError(f"books of {n_parts} parts, and whole planes", f"{body.size} bytes", "message")
        parts = [(int(book), int(shift)) for book, shift in body[:n_head].view(PART)]
        if max(book for book, _ in parts) >= len(self.books.books):
            raise FormatError(f"books below {len(self.books.books)}", f"{parts}", "message")
        self._restore(body[n_head:], layout, parts, out)

    def stats(self) -> Mapping[tuple[str, str], Traffic]:
        """Return what was sent, by dtype and kind. The mapping is read only, the counts go on."""
        return MappingProxyType(self._traffic)

    def observe(self, words: Words, dtype: str, kind: str) -> None:
        """Take samples of a tensor to learn from, and send nothing."""
        layout = _layout_of(dtype, words)
        if words.size >= MIN_WORDS:
            self._traffic.setdefault((dtype, kind), Traffic()).recent.extend(take_samples(words, layout))

    def samples(self) -> dict[tuple[str, str], list[Counts]]:
        """Return counts of the last samples by dtype and kind: what `CodebookSet.learn` learns from."""
        return {key: list(traffic.recent) for key, traffic in self._traffic.items() if traffic.recent}

    def replace_books(self, books: CodebookSet) -> None:
        """Code by other books from now on; what was noted of drift is forgotten."""
        self.books = books
        for traffic in self._traffic.values():
            traffic.strikes = traffic.bits_q8 = traffic.excess_q8 = 0

    def _coded(self, words: Words, layout: Layout, chosen: Sequence[tuple[int, Choice]]) -> NDArray[np.uint8] | None:
        """Return the message, or None where it would be no smaller than the words as they are."""
        n_plain, start = _plain_bytes(layout, words.size), HEADER.size + PART.itemsize * len(chosen)
        coded = np.empty(words.size, np.uint8)
        parts = _parts(coded, len(chosen))
        message = np.empty(start + n_plain + sum(room(part.size, 8) for part in parts), np.uint8)
        message[HEADER.size : start].view(PART)[:] = [(number, choice.shift) for number, choice in chosen]
        plain = message[start : start + n_plain]
        if layout.word_bytes == 1:
            rotate_bytes(words, layout.rotate, coded)
        elif layout.word_bytes == 2:
            split_top(words, layout.rotate, coded, plain)
        else:
            split_top_wide(words, layout.rotate, coded, plain[: words.size], plain[words.size :].view(np.uint16))
        end = start + n_plain
        for part, (_, choice) in zip(parts, chosen, strict=True):
            end += choice.book.encode(part, message[end:], shift=choice.shift)
        if end >= HEADER.size + words.nbytes:
            return None
        message = message[:end]
        self._seal(message, layout, len(chosen), words.size)
        return message

    def _restore(self, body: NDArray[np.uint8], layout: Layout, parts: Sequence[tuple[int, int]], out: Words) -> None:
        end = _plain_bytes(layout, out.size)
        plain, coded = body[:end], np.empty(out.size, np.uint8)
        for part, (book, shift) in zip(_parts(coded, len(parts)), parts, strict=True):
            end += self.books.books[book].decode(body[end:], part, shift=shift)
        if end != body.size:
            raise FormatError("a coded plane that ends with the message", "more bytes", "message")
        if layout.word_bytes == 1:
            rotate_bytes(coded, (8 - layout.rotate) % 8, out)
        elif layout.word_bytes == 2:
            join_top(coded, plain, layout.rotate, out)
        else:
            low = np.empty(out.size, np.uint16)
            low.view(np.uint8)[:] = plain[out.size :]
            join_top_wide(coded, plain[: out.size], low, layout.rotate, out)

    def _seal(self, message: NDArray[np.uint8], layout: Layout, n_parts: int, n_words: int) -> None:
        """Write the header of a message whose body stands."""
        fields = (MAGIC, VERSION, layout.number, CHECKED * self.checksum, n_parts, self.books.id, n_words)
        HEADER.pack_into(message.data, 0, *fields, 0)
        if self.checksum:
            HEADER.pack_into(message.data, 0, *fields, _checksum(message))


def _parts(words: Words, n_parts: int) -> list[Words]:
    """Cut words into equal parts, but for the last."""
    size = -(-words.size // n_parts)
    return [words[min(k * size, words.size) : min((k + 1) * size, words.size)] for k in range(n_parts)]


def _layout_of(dtype: str, words: Words) -> Layout:
    layout = LAYOUTS.get(dtype)
    if layout is None or words.itemsize != layout.word_bytes:
        found = f"{dtype} in {words.itemsize} bytes"
        raise UnsupportedError(f"words of {', '.join(LAYOUTS)}", found, "tensor", "send it without the codec")
    return layout


def _plain_bytes(layout: Layout, n_words: int) -> int:
    return (layout.word_bytes - 1) * n_words


def _checksum(message: NDArray[np.uint8]) -> int:
    """CRC-32 of the header without its last field, and of the body."""
    return zlib.crc32(message[HEADER.size :].data, zlib.crc32(message[: HEADER.size - 4].data))
