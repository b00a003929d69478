"""The leaf of a fixed codebook: against a plain decoder of its specification, in records, under damage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.base import BLOCK_WORDS, Stream
from operators.books import MAX_BOOKS_BYTES, Book, Books
from operators.check import check
from operators.errors import ArchiveError, DigestError, FormatError, LimitError, UnsupportedError
from operators.literals.fixed import Fixed
from operators.program import Literal, Node, parse
from operators.record import take_record
from operators.run import encode, execute
from operators.words import Words, container
from tests.operators.test_books import book_of, draw_words
from tests.operators.test_registry import PIECES, assert_same, read_in_pieces
from tests.strategies import damage

KINDS = ("like", "escapes", "uniform", "constant", "foreign")


def leaf(book: Book, shift: int = 0) -> Node:
    return Node(Literal(Fixed.name, (book.number, shift)))


def payload_of(book: Book, words: Words, shift: int) -> bytes:
    one = Fixed(book.number, shift)
    out = np.zeros(one.room(Stream(book.width_bits, words.size)), np.uint8)
    return out[: one.write(words, out, books=Books([book]))].tobytes()


def plain_decode(payload: bytes, book: Book, shift: int, n_words: int) -> list[int]:
    """Decode as FORMAT.md says, a bit at a time."""
    size, item = 1 << book.width_bits, 1 if book.width_bits <= 8 else 2
    ordered = sorted((length, k) for k, length in enumerate((*book.lengths, book.escape_length)))
    code, previous, symbols = 0, ordered[0][0], {}
    for length, k in ordered:
        code <<= length - previous
        symbols[length, code] = k
        code, previous = code + 1, length
    at, words = 0, []

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = payload[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def raw(count: int) -> list[int]:
        nonlocal at
        found = [int.from_bytes(payload[at + item * k : at + item * (k + 1)], "little") for k in range(count)]
        at += item * count
        return found

    def packed(count: int) -> list[int]:
        nonlocal at
        n_bytes, width = -(-count * book.width_bits // 8), book.width_bits
        bits = int.from_bytes(payload[at : at + n_bytes], "little")
        at += n_bytes
        assert bits >> count * width == 0
        return [bits >> width * k & size - 1 for k in range(count)]

    for start in range(0, n_words, BLOCK_WORDS):
        n = min(BLOCK_WORDS, n_words - start)
        m = varint()
        if m < 2:
            words += raw(1) * n if m else packed(n)
            continue
        parts = 4 if n >= 4096 else 1
        sizes = [varint() for _ in range(parts)]
        block = []
        for k, n_bytes in enumerate(sizes):
            quarter = -(-n // parts)
            count = quarter if k < parts - 1 else n - quarter * (parts - 1)
            bits = ((byte >> i) & 1 for byte in payload[at : at + n_bytes] for i in range(8))
            at += n_bytes
            for _ in range(count):
                length = code = 0
                while (length, code) not in symbols:
                    code, length = code << 1 | next(bits), length + 1
                block.append(symbols[length, code])
        escapes = iter(raw(m - 2))
        last = len(book.lengths)
        words += [next(escapes) if k == last else (book.first + k + shift) % size for k in block]
    assert at == len(payload)
    return words


@given(
    st.integers(0, 100), st.integers(1, 12), st.sampled_from(KINDS), st.sampled_from([1, 2, 300, 4095, 4096, 9001]),
    st.integers(0, 4095), PIECES,
)  # fmt: skip
def test_a_payload_is_what_the_format_says(
    seed: int, width_bits: int, kind: str, n: int, shift: int, pieces: list[int]
) -> None:
    book = book_of(seed, width_bits)
    shift %= book.size
    words = ((draw_words(book, kind, n, seed).astype(np.int64) + shift) % book.size).astype(container(width_bits))
    payload = payload_of(book, words, shift)
    assert plain_decode(payload, book, shift, n) == words.tolist()
    stream = Stream(width_bits, n)
    source = Fixed(book.number, shift).source(memoryview(payload), stream, Books([book]))
    assert_same(read_in_pieces(source, stream, pieces), words)


@pytest.mark.parametrize("n", [BLOCK_WORDS, BLOCK_WORDS + 1, 2 * BLOCK_WORDS + 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_names_its_book_and_restores(kind: str, n: int) -> None:
    book = book_of(5, 8)
    words = draw_words(book, kind, n, 7)
    encoded = encode(leaf(book, 3), words, books=Books([book_of(6, 8), book]))
    assert encoded is not None
    assert str(encoded.program) == f"fixed[{book.number},3]"
    assert str(take_record(encoded.record).program) == f"fixed[{book.number},3]"
    assert_same(execute(encoded.record, Books([book]), n_bytes=words.nbytes), words)
    assert encoded.body_bytes <= words.nbytes * 1.0001


def test_it_stands_below_other_operators() -> None:
    book, wide = book_of(5, 8), book_of(1, 9)
    rng = np.random.default_rng(2)
    words = (rng.standard_normal(3000) * 0.02).astype("<f4").view("<u4")
    for text in (
        f"merge[23,8,1](bitpack, scan_add[1](raw, fixed[{book.number},0]), lit)",
        f"add[9](merge[14,9,9](bitpack, fixed[{wide.number},500], fixed[{wide.number},0]))",
    ):
        encoded = encode(parse(text), words, books=Books([book, wide]))
        assert encoded is not None
        assert_same(execute(encoded.record, Books([wide, book])), words)


def test_a_book_that_is_missing_is_named() -> None:
    book, other = book_of(5, 8), book_of(6, 8)
    words = draw_words(book, "like", 500, 1)
    encoded = encode(leaf(book), words, books=Books([book]))
    assert encoded is not None
    name = f"number {book.number}"
    for books in (None, Books(), Books([other])):
        with pytest.raises(UnsupportedError, match=f"codebook {name}"):
            execute(encoded.record, books)
        with pytest.raises(UnsupportedError, match=f"codebook {name}"):
            encode(leaf(book), words, books=books)


def test_books_with_one_number_are_refused() -> None:
    by_number: dict[int, Book] = {}
    many = (Book(12, first, b"\2\2\2", 2) for first in range(4096))
    one, twin = next((by_number[b.number], b) for b in many if by_number.setdefault(b.number, b) != b)
    assert Books([one, twin])[twin.id] == twin
    with pytest.raises(FormatError, match="numbers of their own"):
        Books([one, twin]).numbered(one.number)


def test_another_book_in_its_place_gives_no_wrong_words() -> None:
    book = Book(8, 10, b"\2\2\2", 2)
    other = Book(8, 20, b"\2\2\2", 2)
    words = np.array([10, 11, 12, 11, 10] * 30, np.uint8)
    encoded = encode(leaf(book), words, books=Books([book]))
    assert encoded is not None
    lying = Books([other])
    lying._numbers[book.number] = {other.id}
    with pytest.raises(DigestError):
        execute(encoded.record, lying)


def test_a_book_of_another_width_is_refused() -> None:
    book = book_of(1, 9)
    payload = payload_of(book, draw_words(book, "like", 100, 1), 0)
    with pytest.raises(FormatError, match="8 bits"):
        Fixed(book.number, 0).source(memoryview(payload), Stream(8, 100), Books([book]))


@pytest.mark.parametrize(
    ("book", "shift", "stream"),
    [
        (0, 0, Stream(16, 4)), (0, 0, Stream(13, 4)), (0, 0, Stream(8, 0)), (0, 256, Stream(8, 4)),
        (1 << 14, 0, Stream(8, 4)),
    ],
)  # fmt: skip
def test_types_are_checked(book: int, shift: int, stream: Stream) -> None:
    with pytest.raises(FormatError):
        Fixed(book, shift).check(stream)
    text = f"merge[{stream.width_bits},{32 - stream.width_bits}](fixed[{book},{shift}], raw)"
    with pytest.raises(FormatError):
        check(parse(text), Stream(32, stream.n_words))


@given(st.data())
def test_damage_is_refused(data: st.DataObject) -> None:
    book = book_of(data.draw(st.integers(0, 20)), 8)
    words = draw_words(book, data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([1, 40, 4096])), 1)
    encoded = encode(leaf(book), words, books=Books([book]))
    assert encoded is not None
    with pytest.raises(ArchiveError):
        execute(data.draw(damage(bytes(encoded.record))), Books([book]), n_bytes=words.nbytes)


@given(st.data())
def test_a_damaged_payload_is_refused_or_gives_words(data: st.DataObject) -> None:
    book = book_of(data.draw(st.integers(0, 20)), data.draw(st.sampled_from([5, 8, 11])))
    words = draw_words(book, data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([1, 40, 4096])), 1)
    damaged = data.draw(damage(payload_of(book, words, 2)))
    out = np.zeros_like(words)
    try:
        source = Fixed(book.number, 2).source(memoryview(damaged), Stream(book.width_bits, words.size), Books([book]))
        source.read(out)
    except ArchiveError:
        return
    assert int(out.max()) < book.size


def test_books_are_stored_together() -> None:
    books = Books([book_of(seed, width) for seed, width in ((1, 8), (2, 8), (3, 12), (4, 1))])
    data = books.to_bytes()
    again = Books.from_bytes(data)
    assert list(again) == list(books)
    assert again.to_bytes() == data
    assert len(Books.from_bytes(b"")) == 0
    sizes = {len(Books(list(books)[:n]).to_bytes()) for n in range(5)}
    for n in range(len(data)):
        if n not in sizes:
            with pytest.raises(FormatError):
                Books.from_bytes(data[:n])
    with pytest.raises(LimitError):
        Books.from_bytes(bytes(MAX_BOOKS_BYTES + 1))
