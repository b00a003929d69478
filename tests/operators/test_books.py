from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS
from operators.books import Book, Books, room
from operators.errors import ArchiveError, FormatError, UnsupportedError
from operators.kernels.fixed import HEAD_BYTES
from operators.words import Words, container
from synth.books import fit


def book_of(seed: int, width_bits: int) -> Book:
    """Return a book for words around one that may be anywhere, the ends of the alphabet included."""
    rng = np.random.default_rng(seed)
    size = 1 << width_bits
    counts = np.zeros(size, np.int64)
    words = np.round(rng.normal(rng.integers(size), rng.uniform(0, size / 8), 4000)).astype(np.int64) % size
    np.add.at(counts, words, 1)
    return fit(counts)


def draw_words(book: Book, kind: str, n: int, seed: int) -> Words:
    rng = np.random.default_rng(seed)
    dtype = container(book.width_bits)
    if kind == "uniform":
        return rng.integers(0, book.size, n).astype(dtype)
    if kind == "constant":
        return np.full(n, rng.integers(book.size), dtype)
    if kind == "foreign":  # nothing but escapes
        outside = np.setdiff1d(np.arange(book.size), (book.first + np.arange(len(book.lengths))) % book.size)
        return rng.choice(outside, n).astype(dtype)
    shares = np.exp2(-np.frombuffer(book.lengths, np.uint8).astype(float))
    words = (book.first + rng.choice(shares.size, n, p=shares / shares.sum())) % book.size
    rare = rng.random(n) < (0.01 if kind == "escapes" else 0)
    return np.where(rare, rng.integers(0, book.size, n), words).astype(dtype)


def coded(book: Book, words: Words, shift: int = 0) -> NDArray[np.uint8]:
    out = np.full(room(words.size, book.width_bits) + 16, 0xA5, np.uint8)
    n_bytes = book.encode(words, out[: room(words.size, book.width_bits)], shift=shift)
    assert (out[-16:] == 0xA5).all()
    return out[:n_bytes]


@given(
    st.integers(0, 200), st.integers(1, 12), st.sampled_from(["like", "escapes", "uniform", "constant", "foreign"]),
    st.sampled_from([0, 1, 2, 255, 256, 257, 4095, 4096, 4097, 20_000]), st.integers(0, 4095),
)  # fmt: skip
@example(3, 8, "escapes", BLOCK_WORDS, 1)
@example(3, 8, "escapes", 2 * BLOCK_WORDS + 5, 77)
@example(4, 11, "like", BLOCK_WORDS + 1, 0)
def test_any_words_come_back(seed: int, width_bits: int, kind: str, n: int, shift: int) -> None:
    book = book_of(seed, width_bits)
    words = draw_words(book, kind, n, seed)
    words = ((words.astype(np.int64) + shift) % book.size).astype(words.dtype)
    words.flags.writeable = False
    data = coded(book, words, shift)
    assert data.size <= words.nbytes + HEAD_BYTES * (n // BLOCK_WORDS + 1)
    padded = np.append(data, np.arange(9, dtype=np.uint8))
    padded.flags.writeable = False
    out = np.full(n + 8, 7, words.dtype)
    assert book.decode(padded, out[:n], shift=shift) == data.size
    assert (out[:n] == words).all()
    assert (out[n:] == 7).all()


def test_uniform_words_hardly_grow() -> None:
    book = book_of(1, 8)
    words = draw_words(book, "uniform", 8 * BLOCK_WORDS, 1)
    assert coded(book, words).size <= words.nbytes * 1.0001
    assert coded(book, np.full(BLOCK_WORDS, 9, np.uint8)).size == 2


def test_a_shift_costs_nothing() -> None:
    book = book_of(5, 8)
    words = draw_words(book, "like", 10_000, 5)
    plain = coded(book, words)
    assert coded(book, (words + np.uint8(9)).astype(np.uint8), 9).size == plain.size


@given(st.integers(0, 100), st.integers(1, 12))
def test_a_book_is_stored_in_one_way(seed: int, width_bits: int) -> None:
    book = book_of(seed, width_bits)
    data = book.to_bytes()
    again = Book.from_bytes(data)
    assert again == book
    assert again.id == book.id
    assert len(book.id) == 8
    assert np.array_equal(again.costs, book.costs)


def test_damaged_books_are_refused() -> None:
    book = book_of(2, 8)
    data = book.to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            mutated = bytearray(data)
            mutated[position] ^= 1 << bit
            try:
                found = Book.from_bytes(mutated)
            except ArchiveError:
                continue
            assert found.id != book.id
            with pytest.raises(FormatError, match=book.id.hex()):
                Books().add(book.id, mutated)
    for n in range(len(data)):
        with pytest.raises(FormatError):
            Book.from_bytes(data[:n])
    with pytest.raises(FormatError):
        Book.from_bytes(data + b"\0")


@pytest.mark.parametrize(
    ("width_bits", "first", "lengths", "escape"),
    [
        (0, 0, b"\1", 1), (13, 0, b"\1", 1), (8, 256, b"\1", 1), (8, 0, b"", 1), (1, 0, b"\1\2", 2), (8, 0, b"\1", 2),
        (8, 0, b"\1\1", 1), (8, 0, b"\0", 0), (8, 0, b"\1\2" + b"\3" * 2, 13),
    ],
)  # fmt: skip
def test_incomplete_codes_are_refused(width_bits: int, first: int, lengths: bytes, escape: int) -> None:
    with pytest.raises(FormatError):
        Book(width_bits, first, lengths, escape)


def test_a_registry_names_what_is_missing() -> None:
    one, other = book_of(1, 8), book_of(2, 8)
    books = Books([one])
    books.add(other.id, other.to_bytes())
    assert list(books) == [one, other]
    assert other.id in books
    assert len(books) == 2
    with pytest.raises(FormatError, match=one.id.hex()):
        books.add(one.id, other.to_bytes())
    with pytest.raises(UnsupportedError, match=f"{bytes(8).hex()}.*{one.id.hex()}"):
        books[bytes(8)]


@given(st.data())
def test_damaged_words_end_in_errors_or_words_of_the_alphabet(data: st.DataObject) -> None:
    book = book_of(data.draw(st.integers(0, 20)), data.draw(st.sampled_from([5, 8, 11])))
    n = data.draw(st.sampled_from([1, 100, 4096, 5000]))
    payload = coded(book, draw_words(book, data.draw(st.sampled_from(["escapes", "uniform", "constant"])), n, 1)).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, payload.size - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(0, payload.size))]
    out = np.zeros(n + 4, container(book.width_bits))
    try:
        used = book.decode(payload, out[:n])
    except FormatError:
        used = 0
    else:
        assert out[:n].max() < book.size
    assert used <= payload.size
    assert not out[n:].any()


def test_interpreted_kernels_give_the_same_bytes() -> None:
    code = """
import hashlib, sys
import numpy as np
from tests.operators.test_books import book_of, coded, draw_words
digest = hashlib.sha256()
for width in (5, 8, 11):
    for kind in ("escapes", "uniform", "constant", "foreign"):
        book = book_of(width, width)
        words = draw_words(book, kind, 4500, 3)
        data = coded(book, words, 3)
        out = np.zeros_like(words)
        assert book.decode(data, out, shift=3) == data.size and (out == words).all()
        digest.update(data.tobytes())
print(digest.hexdigest())
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "NUMBA_DISABLE_JIT": flag}, capture_output=True, check=True
        ).stdout
        for flag in "01"
    }
    assert len(found) == 1
