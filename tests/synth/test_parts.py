"""Parts of a stream: zeros, rows of another kind, turns of a block; found, sampled and fitted to segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.ops.deal import Deal
from operators.ops.partition import Partition
from operators.program import LIT, parse
from operators.run import encode
from operators.words import Words, dtype_of
from synth import Prior
from synth.grammar import offers
from synth.hole import Hole, Setting
from synth.parts import Rows, Turns, Zeros
from synth.sample import take_sample
from synth.structured import Structured, f16, f32, upcast_bf16
from tests.synth.support import encoded, literal_bytes, search

COLUMNS = 256


def floats(rows: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, COLUMNS)) * 0.02).astype(np.float32)


def matrix(rows: int, *, zero: slice = slice(0), upcast: slice = slice(0), seed: int = 0) -> Words:
    """Return F32 words, some rows of which are zero or were BF16."""
    values = floats(rows, seed)
    words = f32(values).reshape(rows, COLUMNS)
    words[upcast] = upcast_bf16(values[upcast]).reshape(-1, COLUMNS)
    words[zero] = 0
    return words.reshape(-1)


def tensor(words: Words, dtype: str = "F32", columns: int = COLUMNS) -> Structured:
    return Structured("", dtype, words.size // columns, columns, words)


def root(words: Words, dtype: str = "F32", columns: int = COLUMNS, n_sample: int = 1 << 14) -> Hole:
    return Setting(dtype_of(dtype), n_sample, n_sample).root(words, columns)


def names(hole: Hole) -> list[str]:
    return [production.name for production in offers(hole, 3)]


# -- rows ---------------------------------------------------------------------------------------------------


def test_rows_of_another_kind_are_offered_where_there_are_any() -> None:
    assert not {"rows.zero", "rows.upcast"} & set(names(root(matrix(600))))
    assert names(root(matrix(600, zero=slice(0, 600, 9)))) == ["rows.zero"]
    assert names(root(matrix(600, upcast=slice(0, 600, 9)))) == ["rows.upcast"]
    assert {"rows.zero", "float.2"} <= set(names(root(matrix(600, zero=slice(0, 2)))))
    assert not {"rows.zero", "rows.upcast"} & set(names(root(matrix(600, upcast=slice(None)))))


def test_a_row_is_marked_by_as_many_zeros_as_pay_most() -> None:
    words = matrix(64, upcast=slice(0, 40)).reshape(64, COLUMNS)
    words[40:44] &= np.uint32(0xFFF00000)
    words[44] = 0
    flat = words.reshape(-1)
    stream = root(flat).stream
    assert Rows(all_bits=False).operator(flat, stream, COLUMNS) == Partition(COLUMNS, 45, 16)
    assert Rows(all_bits=True).operator(flat, stream, COLUMNS) == Partition(COLUMNS, 1, 32)
    assert Rows(all_bits=True).operator(flat[:-1], stream, COLUMNS) is None


@given(st.integers(20, 900), st.integers(0, 99), st.sampled_from((1024, 4096)))
def test_a_sample_of_some_rows_holds_those_and_their_neighbours(rows: int, seed: int, n_sample: int) -> None:
    kept = np.flatnonzero(np.random.default_rng(seed).random(rows) < 0.5)
    words = np.arange(rows * 100, dtype=np.uint32)
    sample = take_sample(words, 32, 100, n_sample, n_sample, kept=kept)
    assert sample.stream.n_words == kept.size * 100
    assert np.isin(sample.words // 100, kept).all()
    if sample.exact:
        assert np.array_equal(sample.words, words.reshape(-1, 100)[kept].ravel())
    elif sample.layout is not None and sample.layout[1] == 2:
        grid = np.searchsorted(kept, sample.words.reshape(sample.layout) // 100)
        assert (grid[:, 1] - grid[:, 0] == 1).all()


@pytest.mark.parametrize(("every", "is_few"), [(3, False), (8, True)])
def test_rows_that_are_few_have_a_smaller_sample(every: int, is_few: bool) -> None:
    words = matrix(1024, upcast=slice(0, 1024, every))
    expansion = Rows(all_bits=False).expand(root(words, n_sample=1 << 13))
    assert expansion is not None
    _, others, upcasts = expansion[1]
    assert others.sample.words.size == 1 << 13
    assert upcasts.sample.words.size == 1 << (11 if is_few else 13)
    assert upcasts.stream.n_words == -(-1024 // every) * COLUMNS


@pytest.mark.parametrize("budget", [64, 256])
def test_the_parts_of_a_matrix_cost_what_they_would_alone(budget: int) -> None:
    words = matrix(1024, upcast=slice(0, 1024, 4), zero=slice(0, 1024, 16))
    rows = words.reshape(-1, COLUMNS)
    is_zero = np.arange(1024) % 16 == 0
    is_upcast = (np.arange(1024) % 4 == 0) & ~is_zero
    parts = [rows[is_upcast].reshape(-1), rows[~is_upcast & ~is_zero].reshape(-1)]
    alone = sum(len(encoded(search(tensor(part), budget=budget), part).record) for part in parts)
    found = search(tensor(words), budget=budget)
    assert "partition" in str(found.program)
    assert len(encoded(found, words).record) <= 1.005 * alone + 300


def test_segments_without_an_end_are_coded_as_the_rest() -> None:
    for zero, dense in ((slice(700, 1024), slice(0, 512)), (slice(0, 300), slice(512, 1024))):
        words = matrix(1024, zero=zero)
        found = search(tensor(words), budget=64, disable=("rows", "zeros"))
        assert "concat" in str(found.program)
        part = words.reshape(-1, COLUMNS)[dense].reshape(-1)
        record = encode(found.program_for(part), part)
        assert record is not None
        assert len(record.record) < 0.9 * part.nbytes


def test_segments_without_a_kind_of_rows_are_coded_as_the_others() -> None:
    words = matrix(1024, zero=slice(0, 200, 2))
    found = search(tensor(words), budget=64)
    assert "partition" in str(found.program)
    dense = words[512 * COLUMNS :]
    program = found.program_for(dense)
    assert "partition" not in str(program)
    assert program != LIT
    record = encode(program, dense)
    assert record is not None
    assert len(record.record) < 0.99 * literal_bytes(dense)
    assert encode(found.program_for(words[: 100 * COLUMNS + 7]), words[: 100 * COLUMNS + 7]) is not None
    assert encode(found.program_for(np.zeros_like(dense)), dense * 0) is not None


# -- zeros --------------------------------------------------------------------------------------------------


def sparse(part: float, rows: int = 600) -> Words:
    values = floats(rows)
    return f32(np.where(np.random.default_rng(5).random(values.shape) < part, np.float32(0), values))


@pytest.mark.parametrize(("part", "is_offered"), [(0, False), (0.01, False), (0.04, True), (0.9, True), (0.99, False)])
def test_a_mask_of_zeros_is_offered_where_some_words_are(part: float, is_offered: bool) -> None:
    assert ("zeros" in names(root(sparse(part)))) == is_offered


def test_no_mask_of_few_different_words() -> None:
    assert "zeros" not in names(root(sparse(0.5) & np.uint32(0x00C00000)))
    assert "zeros" not in names(root(f16(floats(600)) * (np.arange(600 * COLUMNS) % 2).astype(np.uint16), "I16"))


def test_words_that_repeat_are_searched_on_although_some_are_zero() -> None:
    angles = np.outer(np.arange(258), np.arange(COLUMNS)) % COLUMNS * (2 * np.pi / COLUMNS)
    windows = np.hanning(COLUMNS) * (np.arange(COLUMNS) % 32 > 0)
    waves = f32((np.cos(angles) * windows + 0.0).astype(np.float32))
    assert {"zeros", "sign"} <= set(names(root(waves)))


@pytest.mark.parametrize("part", [0.05, 0.4, 0.9])
def test_zero_words_cost_their_mask(part: float) -> None:
    words = sparse(part)
    found = search(tensor(words), budget=64)
    left = words[words != 0]
    alone = len(encoded(search(tensor(left, columns=left.size), budget=64), left).record)
    mask_bits = -words.size * (part * np.log2(part) + (1 - part) * np.log2(1 - part))
    assert len(encoded(found, words).record) <= 1.004 * (alone + mask_bits / 8) + 300


def test_the_mask_of_a_sample_is_that_of_the_words() -> None:
    words = sparse(0.3)
    for n_sample in (1 << 12, 1 << 20):
        hole = root(words, n_sample=n_sample)
        expansion = Zeros().expand(hole)
        assert expansion is not None
        mask, rest, zeros = expansion[1]
        assert np.array_equal(mask.sample.words, hole.sample.words == 0)
        assert (mask.columns, rest.columns) == (COLUMNS, 0)
        assert rest.stream.n_words + zeros.stream.n_words == words.size
        assert abs(zeros.stream.n_words - int((words == 0).sum())) < 0.05 * words.size
        assert (rest.is_float, rest.tag, rest.depth, rest.exact) == (True, "root", 0, hole.exact)


# -- turns --------------------------------------------------------------------------------------------------


def block(layout: str, n: int = 4000) -> Words:
    """Return blocks as quantised files have them: little-endian F16 scales of a few octaves, codes of weights."""
    rng = np.random.default_rng(8)

    def scales() -> np.ndarray:
        return f16(np.exp(rng.standard_normal(n) * 0.3) * 1e-2).reshape(n, 1).view(np.uint8)

    def codes(width: int, spread: float) -> np.ndarray:
        return np.clip(np.rint(rng.standard_normal((n, width)) * spread + 128), 0, 255).astype(np.uint8)

    noise = rng.integers(0, 256, (n, 64)).astype(np.uint8)
    exponents = rng.integers(118, 125, (n, 1)).astype(np.uint8)
    parts = {
        "Q8_0": (scales(), codes(32, 40)),
        "Q4_0": (scales(), codes(16, 2.5) - 120 | codes(16, 2.5) - 120 << 4),
        "MXFP4": (exponents, codes(16, 60)),
        "Q6_K": (codes(128, 60), noise, codes(16, 20), scales()),
        "F16": (scales(),),
    }[layout]
    return np.concatenate(parts, axis=1).reshape(-1)


WIDTHS = {"Q8_0": (1, 1, 32), "Q4_0": (1, 1, 16), "MXFP4": (1, 16), "Q6_K": (128, 64, 16, 1, 1), "F16": (1, 1)}


@pytest.mark.parametrize("layout", sorted(WIDTHS))
@pytest.mark.parametrize("columns", [0, 840])
def test_the_fields_of_a_block_are_found(layout: str, columns: int) -> None:
    words = block(layout, 420 * 16)
    hole = root(words, "U8", columns)
    assert hole.detect(Turns()) == Deal(WIDTHS[layout])
    assert "deal" in names(hole)


@pytest.mark.parametrize("layout", sorted(WIDTHS))
def test_fields_apart_are_smaller(layout: str) -> None:
    words = block(layout, 6000)
    one = Structured("", "U8", 1, words.size, words)
    widths = WIDTHS[layout]
    known = encode(parse(f"deal[{','.join(map(str, widths))}]({', '.join(['lit'] * len(widths))})"), words)
    assert known is not None
    for prior in (Prior.uniform(), Prior.shipped()):
        assert len(encoded(search(one, prior, budget=64), words).record) <= 1.005 * len(known.record)
    assert len(known.record) < 0.99 * len(encoded(search(one, budget=64, disable=("deal",)), words).record)


def test_a_sample_of_a_field_is_of_its_words() -> None:
    words = np.resize(np.arange(34, dtype=np.uint8), 34 * 9000 + 11)
    expansion = Turns((2, 32)).expand(root(words, "U8", 340))
    assert expansion is not None
    scales, codes = expansion[1]
    assert set(scales.sample.words.tolist()) == {0, 1}
    assert set(codes.sample.words.tolist()) == set(range(2, 34))
    assert (scales.stream.n_words, codes.stream.n_words) == (18002, 34 * 9000 + 11 - 18002)
    assert (scales.columns, codes.columns) == (20, 320)
    for hole in (scales, codes):
        assert hole.sample.layout is not None
        assert np.prod(hole.sample.layout) == hole.sample.words.size


def test_no_turns_where_places_are_alike() -> None:
    rng = np.random.default_rng(3)
    for words in (
        rng.integers(0, 256, 300_000).astype(np.uint8),
        np.rint(rng.standard_normal(300_000) * 30).astype(np.int8).view(np.uint8),
        np.zeros(1, np.uint8),
        np.zeros(300_000, np.uint8),
        rng.integers(0, 1 << 40, 50_000).astype(np.uint64),
    ):
        assert Turns().operator(words, root(words, "U8", 0).stream, 0) is None


def test_a_whole_of_one_word_is_counted() -> None:
    words = np.zeros(1 << 18, np.uint8)
    words[::210] = np.arange(words[::210].size) % 200
    assert Turns().operator(words, root(words, "U8", 0).stream, 0) is not None


@pytest.mark.parametrize("name", ["rows", "zeros", "deal"])
def test_parts_can_be_switched_off(name: str) -> None:
    words = {"rows": matrix(600, upcast=slice(0, 300, 2)), "zeros": sparse(0.3), "deal": block("Q8_0")}[name]
    dtype = "U8" if name == "deal" else "F32"
    with_parts, without = search(tensor(words, dtype), budget=64), search(tensor(words, dtype), disable=(name,))
    assert with_parts.winner.cost_q8 < without.winner.cost_q8
    text = "deal" if name == "deal" else "partition"
    assert text in str(with_parts.program)
    assert text not in str(without.program)
