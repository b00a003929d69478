"""Small tensors by codebooks: which field is coded, what is learned of it, and which book is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.books import MAX_WIDTH_BITS, Books
from operators.run import encode, execute
from operators.words import DTYPES, Words, container, dtype_of
from synth.booked import MOST_BYTES, MOST_SAMPLES, Lessons, Shelf, coded_field, counts_of, program_of, step_of
from tests.cases import bf16

CODED = [name for name, dtype in DTYPES.items() if coded_field(dtype) is not None]
KINDS = ("like", "noise", "constant", "edges", "scaled")


def draw_words(name: str, kind: str, n: int, seed: int) -> Words:
    """Return words whose coded field is narrow in the middle of its range, or anything but that."""
    dtype, rng = dtype_of(name), np.random.default_rng(seed)
    field = coded_field(dtype)
    assert field is not None
    size, shift = 1 << dtype.word_bits, 1 << field[0]
    if kind == "constant":
        found = [int(rng.integers(size - 1, dtype=np.uint64))] * n
    elif kind == "edges":
        found = [(0, 1, size - 1, size - 2, size >> 1)[i] for i in rng.integers(5, size=n)]
    elif kind == "noise":
        return np.frombuffer(rng.bytes(n * dtype.word_bits // 8), container(dtype.word_bits))
    else:
        middle = (1 << field[1] - 1) - (5 * step_of(dtype) if kind == "scaled" else 0)
        coded = np.abs(middle + 3 * rng.standard_normal(n)).astype(int) % (1 << field[1])
        signs = rng.integers(1 + (dtype.exponent_bits > 0), size=n)
        found = [
            (int(sign) << dtype.word_bits - 1) + int(one) * shift + int(rng.integers(shift))
            for one, sign in zip(coded, signs, strict=True)
        ]
    return np.array(found, container(dtype.word_bits))


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    lessons = Lessons()
    for name in CODED:
        for seed in range(10):
            lessons.add(draw_words(name, "like", 1000, seed), name)
    return Shelf(lessons.learn())


def test_all_floats_and_all_bytes_have_a_field_that_is_coded() -> None:
    for name, dtype in DTYPES.items():
        field = coded_field(dtype)
        assert (field is None) == (not dtype.exponent_bits and dtype.word_bits > 8), name
        if field is not None:
            assert 1 <= field[1] <= MAX_WIDTH_BITS
            assert field[0] + field[1] == dtype.word_bits - (dtype.exponent_bits > 0)


@given(st.sampled_from(CODED), st.sampled_from(KINDS), st.integers(1, 3000), st.integers(0, 1 << 20))
def test_any_words_come_back_by_any_book(shelf: Shelf, name: str, kind: str, n: int, seed: int) -> None:
    words = draw_words(name, kind, n, seed)
    found = shelf.choose(words, name)
    assert found is not None
    encoded = encode(found.program, words, books=shelf.books)
    assert encoded is not None
    assert execute(encoded.record, Books([found.book])).tobytes() == words.tobytes()
    if kind == "like" and n > 64:
        assert found.n_bytes <= encoded.body_bytes <= found.n_bytes + 6
        other = program_of(dtype_of(name), found.book, 0)
        assert encoded.body_bytes <= (encode(other, words, books=shelf.books) or encoded).body_bytes


@given(st.sampled_from(CODED), st.sampled_from(KINDS), st.integers(1, 5000), st.integers(0, 99))
def test_a_book_is_chosen_by_all_words(shelf: Shelf, name: str, kind: str, n: int, seed: int) -> None:
    dtype, words = dtype_of(name), draw_words(name, kind, n, seed)
    family, counts = shelf._family(dtype), counts_of(words, dtype)
    assert family is not None
    assert counts is not None
    assert family.choose_of(words, 1 if dtype.exponent_bits else 0) == family.choose(counts)


@pytest.mark.parametrize("name", ["BF16", "F32", "F8_E4M3"])
def test_a_factor_of_two_is_a_shift(shelf: Shelf, name: str) -> None:
    like, scaled = (shelf.choose(draw_words(name, kind, 2000, 1), name) for kind in ("like", "scaled"))
    assert like is not None
    assert scaled is not None
    assert scaled.n_bytes < like.n_bytes * 1.02
    assert str(scaled.program) != str(like.program)


@pytest.mark.parametrize("name", CODED)
def test_noise_grows_by_less_than_a_part_in_ten_thousand(shelf: Shelf, name: str) -> None:
    dtype = dtype_of(name)
    words = draw_words(name, "noise", (1 << 20) * 8 // dtype.word_bits, 1)
    _, width_bits = coded_field(dtype) or (0, 0)
    program = program_of(dtype, next(book for book in shelf.books if book.width_bits == width_bits), 0)
    encoded = encode(program, words, books=shelf.books)
    assert encoded is not None
    assert encoded.body_bytes * 10_000 < words.nbytes * 10_001


def test_what_is_no_case_for_a_book_is_left_alone(shelf: Shelf) -> None:
    words = draw_words("BF16", "like", 1000, 1)
    for other, name in (
        (words[:0], "BF16"),
        (words, "F32"),
        (words, None),
        (words, "I16"),
        (np.zeros(MOST_BYTES // 2 + 1, np.uint16), "BF16"),
    ):
        assert shelf.choose(other, name) is None
    assert shelf.choose(words, "BF16") is not None
    assert Shelf(Books()).choose(words, "BF16") is None


def test_lessons_are_the_same_in_any_order_and_few() -> None:
    words = [np.frombuffer(bf16(seed, 300), np.uint16) for seed in range(2 * MOST_SAMPLES)]
    first, second = Lessons(), Lessons()
    for some in words:
        first.add(some, "BF16")
    for some in (*words[::-1], *words[:5]):
        second.add(some, "BF16")
    assert first.learn().to_bytes() == second.learn().to_bytes()
    assert [len(known) for known in first._counts.values()] == [MOST_SAMPLES]
    assert len({book.number for book in first.learn()}) == len(first.learn())


def test_one_tensor_teaches_no_book() -> None:
    lessons = Lessons()
    for _ in range(100):  # equal ones are one
        lessons.add(np.frombuffer(bf16(1, 300), np.uint16), "BF16")
    assert len(lessons.learn()) == 0


def test_counts_are_those_of_the_coded_field() -> None:
    words = np.array([0x3F80, 0xBF80, 0x3FA0], np.uint16)  # 1, -1 and 1.25 in BF16
    counts = counts_of(words, dtype_of("BF16"))
    assert counts is not None
    assert {int(word): int(counts[word]) for word in np.flatnonzero(counts)} == {127 << 2: 2, (127 << 2) + 1: 1}
