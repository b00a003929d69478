"""Rows of two classes and words dealt in turn: against plain numpy, at any read, and damaged masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.base import BLOCK_WORDS, Source, Stream
from operators.errors import FormatError
from operators.kernels.rows import count_places, trailing_zeros
from operators.ops.deal import Deal
from operators.ops.partition import Partition, marks
from operators.program import parse
from operators.run import encode, execute
from operators.words import Words, mask_of
from tests.operators.test_registry import PIECES, ArraySource, assert_same, read_in_pieces

NOISE = np.random.default_rng(21)
WIDTHS = st.sampled_from((8, 16, 32, 64))


def rows_of_zeros(width_bits: int, row_words: int, n_rows: int, low_bits: int, seed: int) -> Words:
    """Return words of which about a third of the rows end in zeros."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, mask_of(width_bits), (n_rows, row_words), np.uint64, endpoint=True)
    words[rng.random(n_rows) < 0.3] &= np.uint64(mask_of(width_bits) ^ mask_of(low_bits))
    return words.ravel().astype(f"u{width_bits // 8}")


def by_numpy(words: Words, row_words: int, low_bits: int) -> list[Words]:
    rows = words.reshape(-1, row_words)
    is_marked = ((rows & words.dtype.type(mask_of(low_bits))) == 0).all(axis=1)
    return [is_marked.astype(np.uint8), rows[~is_marked].ravel(), rows[is_marked].ravel()]


@given(WIDTHS, st.integers(1, 70), st.integers(2, 60), st.integers(1, 64), st.integers(0, 99), PIECES)
def test_rows_are_parted_and_joined(
    width_bits: int, row_words: int, n_rows: int, low_bits: int, seed: int, pieces: list[int]
) -> None:
    low_bits = min(low_bits, width_bits)
    words = rows_of_zeros(width_bits, row_words, n_rows, low_bits, seed)
    stream = Stream(width_bits, words.size)
    expected = by_numpy(words, row_words, low_bits)
    flags, n_marked = marks(words, row_words, low_bits)
    assert_same(flags, expected[0])
    assert n_marked == int(expected[0].sum())
    if not 0 < n_marked < n_rows:
        return
    op = Partition(row_words, n_marked, low_bits)
    targets = op.targets(words, stream)
    assert targets is not None
    for target, plain in zip(targets, expected, strict=True):
        assert_same(target, plain)
    assert_same(read_in_pieces(op.source(list(map(ArraySource, targets)), stream), stream, pieces), words)
    if n_rows > 2:
        assert Partition(row_words, n_marked % (n_rows - 1) + 1, low_bits).targets(words, stream) is None


@pytest.mark.parametrize("row_words", [1, 2, 7, 4099, BLOCK_WORDS + 1])
def test_rows_of_many_blocks(row_words: int) -> None:
    n_rows = max(5, 3 * BLOCK_WORDS // row_words)
    words = rows_of_zeros(16, row_words, n_rows, 16, 4)
    words[:row_words] = 0
    n_marked = int(by_numpy(words, row_words, 16)[0].sum())
    encoded = encode(parse(f"partition[{row_words},{n_marked},16](lit, merge[8,8](lit, lit), const[0])"), words)
    assert encoded is not None
    assert np.array_equal(execute(encoded.record), words)


@given(WIDTHS, st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(0, 300), PIECES)
def test_words_are_dealt_and_gathered(width_bits: int, widths: list[int], extra: int, pieces: list[int]) -> None:
    op = Deal(tuple(widths))
    words = NOISE.integers(0, mask_of(width_bits), op.period + extra, np.uint64).astype(f"u{width_bits // 8}")
    stream = Stream(width_bits, words.size)
    targets = op.targets(words, stream)
    assert targets is not None
    whose = np.resize(np.repeat(np.arange(len(widths)), widths), words.size)
    for child, target in enumerate(targets):
        assert_same(target, words[whose == child])
    assert_same(read_in_pieces(op.source(list(map(ArraySource, targets)), stream), stream, pieces), words)


def test_dealt_words_of_many_blocks() -> None:
    words = NOISE.integers(0, 256, 3 * BLOCK_WORDS + 5).astype("u1")
    for text in (
        "deal[1,1](lit, lit)",
        "deal[2,16](deal[1,1](lit, lit), unpack[4](lit))",
        "deal[3,1,7](lit, lit, lit)",
    ):
        encoded = encode(parse(text), words)
        assert encoded is not None
        assert np.array_equal(execute(encoded.record), words)


class Endless(Source):
    """Gives ones for ever."""

    def read(self, out: Words) -> None:
        out.fill(1)


@given(st.integers(1, 9), st.integers(2, 50), st.integers(1, 49), st.integers(0, 99), PIECES)
def test_a_mask_of_another_count_is_damage(
    row_words: int, n_rows: int, n_marked: int, seed: int, pieces: list[int]
) -> None:
    n_marked = min(n_marked, n_rows - 1)
    mask = np.random.default_rng(seed).integers(0, 2, n_rows).astype(np.uint8)
    stream = Stream(32, n_rows * row_words)
    source = Partition(row_words, n_marked, 32).source([ArraySource(mask), Endless(), Endless()], stream)
    if int(mask.sum()) == n_marked:
        read_in_pieces(source, stream, pieces)
        return
    with pytest.raises(FormatError, match="mask"):
        read_in_pieces(source, stream, pieces)


@given(st.sampled_from((16, 32, 64)), st.integers(1, 70), st.integers(1, 20), st.integers(1, 64), st.integers(0, 99))
def test_zeros_at_the_end_of_rows_are_counted(
    width_bits: int, row_words: int, n_rows: int, low_bits: int, seed: int
) -> None:
    words = rows_of_zeros(width_bits, row_words, n_rows, min(low_bits, width_bits), seed)
    zeros = np.empty(n_rows, np.uint8)
    trailing_zeros(words, row_words, width_bits, zeros)
    for row, count in zip(words.reshape(n_rows, row_words), zeros.tolist(), strict=True):
        used = int(np.bitwise_or.reduce(row))
        expected = (used & -used).bit_length() - 1 if used else width_bits
        assert count == (expected if expected >= 4 else 0)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 50), st.integers(1, 30), st.integers(0, 99))
def test_classes_are_counted_by_place(period: int, windows: int, run: int, n_classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 10_000, windows)
    data = rng.integers(0, n_classes, windows * run).astype(np.uint8)
    counts = np.full(period * n_classes, 7, np.int64)
    count_places(data, starts, period, n_classes, counts)
    expected = np.zeros((period, n_classes), np.int64)
    places = (starts[:, None] + np.arange(run)).ravel() % period
    np.add.at(expected, (places, data), 1)
    assert np.array_equal(counts.reshape(period, n_classes), expected)
