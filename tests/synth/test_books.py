from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.errors import ArchiveError
from operators.words import Words
from synth.books import (
    LAYOUTS,
    MAX_PARTS,
    RUNS,
    SHIPPED,
    CodebookSet,
    Counts,
    Family,
    fit,
    learn,
    regret_ppm,
    take_samples,
)
from synth.learn import casts, learn_books, region
from tests.bench.training import huffman_bits, plane
from tests.checkpoints import path, read


def words_in(file: str, dtype: str) -> list[Words]:
    """Return the tensors of a dtype in a file."""
    container = {1: np.uint8, 2: np.uint16, 4: np.uint32}[LAYOUTS[dtype].word_bytes]
    return [np.frombuffer(tensor.data, container) for tensor in read(path(file)).values() if tensor.dtype == dtype]


def planes(file: str, dtype: str) -> list[Counts]:
    """Return counts of the whole coded plane of every tensor of some size in a file."""
    tensors = [words for words in words_in(file, dtype) if words.size >= 4096]
    return [np.bincount(plane(words, dtype), minlength=256) for words in tensors]


def test_fit_is_a_huffman_code_with_an_escape() -> None:
    counts = np.zeros(256, np.int64)
    counts[100:140] = np.round(1e6 * np.exp(-0.02 * (np.arange(40) - 20.0) ** 2)).astype(np.int64)
    counts[7] = 3
    book = fit(counts)
    assert book.costs[7] > 8  # escaped: a code of its own would cost the others more
    assert int(counts @ book.costs) < 1.002 * huffman_bits(counts)
    one = np.zeros(256, np.int64)
    one[255] = 10
    assert fit(one).costs[255] == 1
    assert fit(np.ones(256, np.int64)).costs.max() <= 12 + 8


def test_words_around_the_end_of_the_alphabet_are_one_run() -> None:
    counts = np.zeros(256, np.int64)
    counts[np.arange(-20, 21)] = 1000 - 40 * np.abs(np.arange(-20, 21))
    book = fit(counts)
    assert len(book.lengths) == 41
    assert book.first == 256 - 20


def test_a_family_finds_the_kinds_that_there_are() -> None:
    rng = np.random.default_rng(0)
    samples = []
    for i in range(24):
        words = np.round(rng.normal(60 + 60 * (i % 3), 2 + 6 * (i % 3), 4096)).astype(np.int64).clip(0, 255)
        samples.append(np.bincount(words, minlength=256))
    family = learn(samples, 8)
    assert 3 <= len(family.books) <= 8
    for counts in samples:
        assert family.choose(counts).bits < 1.03 * huffman_bits(counts)
    assert learn(samples, 8) == family


def test_books_go_where_the_samples_are() -> None:
    rng = np.random.default_rng(3)
    widths = [2] * 40 + [9] * 40 + [50, 70]
    samples = [
        np.bincount(np.round(rng.normal(128, width, 4096)).astype(np.int64).clip(0, 255), minlength=256)
        for width in widths
    ]
    family = learn(samples, 2)  # two kinds, and two samples that are like nothing else
    for counts in samples[:80]:
        assert family.choose(counts).bits < 1.02 * huffman_bits(counts)


def test_a_shift_follows_a_factor() -> None:
    rng = np.random.default_rng(1)
    samples = [np.bincount(100 - rng.geometric(0.4, 4096).clip(0, 60), minlength=256) for _ in range(8)]
    family = learn(samples, 4, step=1)
    moved = np.roll(samples[0], 13)
    choice = family.choose(moved)
    assert choice.shift == 13
    assert choice.bits == family.choose(samples[0]).bits
    assert choice.escapes == family.choose(samples[0]).escapes
    fixed = learn(samples, 4).choose(moved)
    assert fixed.shift == 0
    assert fixed.bits > 1.5 * choice.bits


@given(st.integers(0, 1000), st.sampled_from([0, 1, 8, 16]), st.integers(-300, 300))
def test_the_choice_is_the_best_of_all_that_are_tried(seed: int, step: int, moved: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = [np.bincount(rng.binomial(255, rng.uniform(0.1, 0.9), 2000), minlength=256) for _ in range(5)]
    family = Family(tuple(map(fit, kinds)), step)
    counts = np.roll(kinds[0] + kinds[1] * rng.integers(0, 2), moved)
    mean = int(counts @ np.arange(256)) // int(counts.sum())
    found = []
    for k, book in enumerate(family.books):
        shifts = [0, *((mean - book.mean) // step * step + step * i for i in range(3))] if step else [0]
        costs = [int(np.roll(counts, -shift) @ book.costs) for shift in shifts]
        found.append((min(costs), k, shifts[costs.index(min(costs))] % 256))
    choice = family.choose(counts)
    assert (choice.bits, choice.place, choice.shift) == min(found)
    assert choice.book == family.books[choice.place]
    own = np.roll(counts, -choice.shift)[(choice.book.first + np.arange(len(choice.book.lengths))) % 256]
    assert choice.escapes == counts.sum() - own.sum()
    assert choice.sample_words == counts.sum()


def in_places(seed: int, n: int, factors: list[float]) -> Words:
    """Return BF16 words of one size after the other."""
    x = np.random.default_rng(seed).normal(0, 1, n) * np.repeat(factors, -(-n // len(factors)))[:n]
    words: Words = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return words


def test_samples_tell_where_places_differ() -> None:
    layout = LAYOUTS["BF16"]
    for seed in range(20):
        alike, unlike = in_places(seed, 200_000, [1]), in_places(seed, 200_000, [1, 0.5])
        assert take_samples(alike, layout).shape == (1, 256)
        samples = take_samples(unlike, layout)
        assert samples.shape == (1 + MAX_PARTS, 256)
        assert samples[0].sum() == RUNS * layout.run_words
        assert (samples[1:].sum(axis=1) == 1024).all()
        assert np.abs(np.diff(samples[1:] @ np.arange(256) / 1024)).argmax() == MAX_PARTS // 2 - 1
    assert len(take_samples(unlike[:16_384], layout)) == 1
    assert len(take_samples(in_places(0, 16_384, [1, 0.01]), layout)) == 3
    assert len(take_samples(in_places(0, 16_383, [1, 0.01]), layout)) == 1  # its halves would be small


def test_unlike_parts_have_books_of_their_own() -> None:
    layout = LAYOUTS["BF16"]
    family = learn([take_samples(in_places(seed, 4096, [1]), layout)[0] for seed in range(4)], 4, step=layout.step)
    samples, choices = family.select(in_places(9, 200_000, [1, 0.25, 2**-9]), layout)
    assert len(choices) == MAX_PARTS
    assert {choice.shift for choice in choices} >= {0, 254, 256 - 9}
    assert choices == family.choose_parts(samples)
    assert regret_ppm(choices) < 100_000 < regret_ppm([family.choose(samples[0])])
    samples, choices = family.select(in_places(9, 200_000, [1]), layout)
    assert choices == [family.choose(samples[0])] == family.choose_parts(samples)
    one = learn([take_samples(in_places(seed, 9000, [1, 0.25, 2**-9]), layout)[0] for seed in range(4)], 1)
    assert len(one.select(in_places(9, 200_000, [1, 0.25, 2**-9]), layout)[1]) == 1  # nothing but a book for all


FILES = [("minilm-bf16", "BF16"), ("minilm-f32", "F32"), ("wordllama-f16", "F16"), ("minilm-f8", "F8_E4M3")]


@pytest.mark.parametrize(("file", "dtype"), FILES)
def test_loss_against_a_code_for_each_tensor(file: str, dtype: str) -> None:
    layout = LAYOUTS[dtype]
    counts = planes(file, dtype)
    own = sum(map(huffman_bits, counts))
    shipped = CodebookSet.shipped().families[dtype, "weight"]
    assert sum(shipped.choose(one).bits for one in counts) <= 1.005 * own
    samples = [take_samples(words, layout)[0] for words in words_in(file, dtype) if words.size >= 256]
    family = learn(samples, 16, step=layout.step)
    assert sum(family.choose(one).bits for one in counts) <= 1.002 * own


def test_loss_for_integers() -> None:
    layout = LAYOUTS["I8"]
    counts = planes("fracast-i8", "I8")
    samples = [take_samples(words, layout)[0] for words in words_in("fracast-i8", "I8") if words.size >= 4096]
    family = learn(samples, 32)
    assert sum(family.choose(one).bits for one in counts) <= 1.012 * sum(map(huffman_bits, counts))


def test_samples_look_at_the_byte_that_is_coded() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    counts = take_samples(words, LAYOUTS["BF16"])[0]
    assert counts.sum() == 4096
    assert (counts > 0).sum() >= 64  # runs lie all over the words
    few = np.array([0x8001, 0x7F80, 0x0080], np.uint16)
    assert list(np.flatnonzero(take_samples(few, LAYOUTS["BF16"])[0])) == [0, 1, 255]
    assert take_samples(words[:0], LAYOUTS["BF16"])[0].sum() == 0


def test_books_of_the_package_are_learned_from_samples_and_say_so() -> None:
    rng = np.random.default_rng(4)
    tensors = [rng.normal(0, scale, (64, 64)).astype(np.float32) for scale in (0.02, 0.3)]
    samples = [region(words, dtype, one.shape) for one in tensors for dtype, words in casts(one)]
    made = learn_books(samples, [{"file": "a", "sha256": "b"}])
    assert made == learn_books(samples, [{"file": "a", "sha256": "b"}])
    assert json.loads(made)["provenance"] == [{"file": "a", "sha256": "b"}]
    books = CodebookSet.load(bytes.fromhex(json.loads(made)["books"]))
    dtypes = {"F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "I8"}
    assert set(books.families) == set(CodebookSet.shipped().families) == {(dtype, "weight") for dtype in dtypes}
    for source in json.loads(SHIPPED.read_bytes())["provenance"]:
        assert source.keys() == {"file", "package", "sha256"}
        assert len(source["sha256"]) == 64


def test_a_set_is_stored_and_checked() -> None:
    rng = np.random.default_rng(2)
    samples = {
        ("BF16", kind): [np.bincount(rng.binomial(255, 0.4, 4096), minlength=256) for _ in range(4)]
        for kind in ("weight", "grad")
    }
    books = CodebookSet.learn(samples, k=4)
    data = books.save()
    again = CodebookSet.load(data)
    assert again.id == books.id
    assert list(again.families) == [("BF16", "grad"), ("BF16", "weight")]
    words = rng.integers(0, 1 << 16, 9000).astype(np.uint16)
    _, [(number, choice)] = books.select("BF16", "weight", words)
    assert books.books[number] == choice.book
    assert books.select("F32", "weight", words.view(np.uint32))[1] == []
    for position in range(len(data)):
        mutated = bytearray(data)
        mutated[position] ^= 1 << position % 8
        try:
            assert CodebookSet.load(mutated).id != books.id
        except ArchiveError:
            continue
    for n in range(len(data)):
        with pytest.raises(ArchiveError):
            CodebookSet.load(data[:n])
