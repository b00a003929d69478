from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from operators.errors import ArchiveError, FormatError, UnsupportedError
from operators.words import Words
from pipeline.messages import HEADER, TensorCodec
from synth.books import LAYOUTS, CodebookSet
from tests.bench.training import huffman_bits, plane
from tests.checkpoints import path, read
from tests.fuzz.targets import mutate

DTYPES = sorted(LAYOUTS)


def draw(dtype: str, n: int, seed: int, scale: float = 1e-3) -> Words:
    x = np.random.default_rng(seed).normal(0, 1, n).astype(np.float32)
    layout = LAYOUTS[dtype]
    if dtype in ("I8", "U8", "F4"):
        return np.round(x * 20).clip(-127, 127).astype(np.int8).view(np.uint8)
    if layout.word_bytes == 4:
        return (x * np.float32(scale)).view(np.uint32)
    if dtype == "F16":
        return (x * np.float32(scale)).astype(np.float16).view(np.uint16)
    bf16 = ((x * np.float32(scale)).view(np.uint32) >> 16).astype(np.uint16)
    return bf16 if dtype == "BF16" else (np.round(x * 4).astype(np.int8).view(np.uint8) ^ np.uint8(0x38))


def codec(**options: object) -> TensorCodec:
    learner = TensorCodec(CodebookSet({}))
    for dtype in DTYPES:
        for seed in range(4):
            learner.observe(draw(dtype, 1 << 13, seed), dtype, "weight")
    return TensorCodec(CodebookSet.learn(learner.samples()), **options)  # type: ignore[arg-type]


CODEC, CHECKED = codec(), codec(checksum=True)


@given(
    st.sampled_from(DTYPES), st.integers(0, 99),
    st.sampled_from([0, 1, 255, 256, 257, 4096, 10_001]), st.sampled_from(["like", "uniform", "constant"]),
    st.booleans(),
)  # fmt: skip
def test_any_tensor_comes_back(dtype: str, seed: int, n: int, kind: str, checked: bool) -> None:
    words = draw(dtype, n, seed)
    if kind != "like":
        top = np.iinfo(words.dtype).max
        rng = np.random.default_rng(seed)
        words = rng.integers(0, top, n, words.dtype, endpoint=True) if kind == "uniform" else np.full_like(words, top)
    words.flags.writeable = False
    coder = CHECKED if checked else CODEC
    message = coder.encode(words, dtype, "weight")
    assert message.size <= words.nbytes + HEADER.size
    out = np.zeros_like(words)
    coder.decode(message, out, dtype)
    assert (out == words).all()


@pytest.mark.parametrize(("dtype", "most"), [("BF16", 0.68), ("F32", 0.85), ("F8_E4M3", 0.9), ("F16", 0.9)])
def test_messages_are_smaller(dtype: str, most: float) -> None:
    words = draw(dtype, 1 << 18, 50)
    assert CODEC.encode(words, dtype, "weight").size < most * words.nbytes


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_parts_of_unlike_words_have_books_of_their_own(dtype: str) -> None:
    places = [draw(dtype, 40_001, seed, scale=scale) for seed, scale in enumerate((1e-3, 1e-2, 1e-3, 1e-1))]
    unlike, alike = np.concatenate(places), draw(dtype, 160_004, 5)
    size = {}
    for coder in (CODEC, CHECKED):
        for name, words, n_parts in (("unlike", unlike, 16), ("alike", alike, 1)):
            message = coder.encode(words, dtype, "weight")
            assert message[PARTS_AT] == n_parts
            out = np.zeros_like(words)
            coder.decode(message, out, dtype)
            assert (out == words).all()
            size[name] = message.size
    plain = (unlike.itemsize - 1) * unlike.size + HEADER.size
    own = huffman_bits(np.bincount(plane(unlike, dtype), minlength=256)) / 8
    assert size["unlike"] - plain < 0.95 * own  # less than a code for all of it
    assert size["unlike"] < 1.02 * size["alike"]
    assert not CODEC.stats()[dtype, "weight"].has_drifted


def halves(to: str) -> list[Words]:
    """Return the matrices of a checkpoint in words of 4 bits, each 32 with a scale, two to a byte."""
    levels = np.arange(-7, 8) if to == "I4" else np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    borders = (levels[1:] + levels[:-1]) / 2
    found = []
    for tensor in read(path("minilm-f32")).values():
        if tensor.dtype == "F32" and len(tensor.shape) == 2 and tensor.shape[0] >= 384:
            groups = np.frombuffer(tensor.data, np.float32)[: 1 << 18].reshape(-1, 32)
            scaled = groups * (levels[-1] / np.abs(groups).max(axis=1, keepdims=True).clip(1e-12))
            codes = np.searchsorted(borders, scaled.ravel()).astype(np.uint8)
            found.append(codes[::2] | codes[1::2] << 4)
    return found


@pytest.mark.parametrize(("dtype", "kind", "to"), [("U8", "int4", "I4"), ("F4", "weight", "F4")])
def test_words_of_4_bits_are_coded_in_pairs(dtype: str, kind: str, to: str) -> None:
    tensors = halves(to)
    coder = TensorCodec(CodebookSet({}))
    for words in tensors[::2]:
        coder.observe(words, dtype, kind)
    coder.replace_books(CodebookSet.learn(coder.samples(), k=16))
    size = bits = 0.0
    for words in tensors[1::2]:
        message = coder.encode(words, dtype, kind)
        out = np.zeros_like(words)
        coder.decode(message, out, dtype)
        assert (out == words).all()
        counts = np.bincount(np.concatenate((words & 15, words >> 4)), minlength=16)
        size += message.size
        bits += float(counts @ np.log2(counts.sum() / counts.clip(1)))
    assert size <= 1.015 * bits / 8
    assert size < 0.975 * sum(words.nbytes for words in tensors[1::2])


@given(st.data())
def test_mutated_messages_end_in_errors(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    words = draw(dtype, 5000, 1)
    message = CHECKED.encode(words, dtype, "weight")
    message[data.draw(st.integers(0, message.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    message = message[: data.draw(st.integers(0, message.size))]
    out = np.zeros_like(words)
    with pytest.raises(ArchiveError):
        CHECKED.decode(message, out, dtype)


@given(st.data())
def test_mutated_messages_without_a_checksum_stay_in_their_memory(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    words = draw(dtype, 5000, 1)
    message = CODEC.encode(words, dtype, "weight")
    message[data.draw(st.integers(HEADER.size, message.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    out = np.zeros(words.size + 4, words.dtype)
    with contextlib.suppress(ArchiveError):
        CODEC.decode(message, out[:-4], dtype)
    assert not out[-4:].any()


MUTATIONS = 3000
PARTS_AT = 7
"""Of the header: how many parts there are."""


def mutated(seed: int, n_words: int = 700) -> Iterator[tuple[str, Words, NDArray[np.uint8]]]:
    """Yield damaged messages with checksums, and what they held: of all dtypes, coded and plain."""
    rng = random.Random(seed)
    sent = [(dtype, words, CHECKED.encode(words, dtype, "weight")) for dtype in DTYPES for words in (
        draw(dtype, n_words, 1), draw(dtype, 70, 2), np.zeros(n_words, draw(dtype, 1, 0).dtype),
    )]  # fmt: skip
    halves = np.concatenate((draw("BF16", 1 << 13, 1), draw("BF16", 1 << 13, 1, scale=1e-6)))
    sent.append(("BF16", halves, CHECKED.encode(halves, "BF16", "weight")))
    assert sent[-1][2][PARTS_AT] == 2
    others = [message.tobytes() for _, _, message in sent]
    for _ in range(MUTATIONS):
        dtype, words, message = rng.choice(sent)
        data = mutate(rng, message.tobytes(), others)
        if data != message.tobytes():
            yield dtype, words, np.frombuffer(data, np.uint8)


def test_thousands_of_damaged_messages_are_refused() -> None:
    for dtype, words, message in mutated(0):
        out = np.zeros_like(words)
        try:
            CHECKED.decode(message, out, dtype)
        except ArchiveError:
            continue
        # A mutation may bring another whole message, which is no damage.
        assert CHECKED.encode(out, dtype, "weight").tobytes() == message.tobytes()


def test_thousands_of_damaged_messages_with_the_right_checksum_stay_in_their_memory() -> None:
    n_restored = 0
    for dtype, words, data in mutated(1):
        message = data.copy()
        if message.size >= HEADER.size and message[6] < 4:
            rest = message[HEADER.size :].tobytes()
            message[HEADER.size - 4 : HEADER.size].view("<u4")[:] = zlib.crc32(
                rest, zlib.crc32(data[: HEADER.size - 4].tobytes())
            )
        out = np.zeros(words.size + 8, words.dtype)
        with contextlib.suppress(ArchiveError):
            CHECKED.decode(message, out[: words.size], dtype)
            n_restored += 1
        assert not out[words.size :].any()
    assert n_restored > MUTATIONS // 20  # damage got as far as the kernels


def test_thousands_of_damaged_sets_are_refused_or_whole() -> None:
    rng = random.Random(2)
    data = CODEC.books.save()
    for _ in range(MUTATIONS):
        changed = mutate(rng, data, [data])
        try:
            books = CodebookSet.load(changed)
        except ArchiveError:
            continue
        assert books.save() == changed  # one form, and so one id, of each set


def test_refusals_name_what_was_expected() -> None:
    words = draw("BF16", 1000, 1)
    message = CODEC.encode(words, "BF16", "weight")
    with pytest.raises(FormatError, match="999 words of BF16, found 1000 of BF16"):
        CODEC.decode(message, np.zeros(999, np.uint16), "BF16")
    with pytest.raises(FormatError, match="1000 words of F16, found 1000 of BF16"):
        CODEC.decode(message, np.zeros(1000, np.uint16), "F16")
    with pytest.raises(FormatError, match="message of at least"):
        CODEC.decode(message[:9], np.zeros(1000, np.uint16), "BF16")
    other = TensorCodec(CodebookSet({("BF16", "grad"): CODEC.books.families["BF16", "weight"]}))
    with pytest.raises(UnsupportedError) as refused:
        other.decode(message, np.zeros(1000, np.uint16), "BF16")
    assert other.books.id.hex() in str(refused.value)
    assert CODEC.books.id.hex() in str(refused.value)
    with pytest.raises(FormatError, match="a message with a checksum, found one without"):
        CHECKED.decode(message, np.zeros(1000, np.uint16), "BF16")
    with pytest.raises(UnsupportedError, match="F64"):
        CODEC.encode(np.zeros(4, np.uint64), "F64", "weight")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_steady_stream_raises_no_alarm(dtype: str) -> None:
    coder = codec()
    for seed in range(500):
        n_words = (300, 1000, 4096, 1 << 14)[seed % 4]
        coder.encode(draw(dtype, n_words, 100 + seed), dtype, "weight")
        assert not coder.stats()[dtype, "weight"].has_drifted, seed


def test_a_drift_raises_one_within_three_messages() -> None:
    def exponents(seed: int) -> Words:
        return (100 - np.random.default_rng(seed).geometric(0.4, 1 << 15).clip(0, 60)).astype(np.uint8)

    learner = TensorCodec(CodebookSet({}))
    for seed in range(4):
        learner.observe(exponents(seed), "U8", "weight")
    coder = TensorCodec(CodebookSet.learn(learner.samples()), on_drift="raw")
    for seed in range(20):
        coder.encode(exponents(10 + seed), "U8", "weight")
    assert not coder.stats()["U8", "weight"].has_drifted
    moved = exponents(77) + np.uint8(9)
    sizes = [coder.encode(moved, "U8", "weight").size for _ in range(4)]
    assert coder.stats()["U8", "weight"].has_drifted
    assert sizes[2:] == 2 * [moved.size + HEADER.size]  # sent as it is from the third on
    coder.replace_books(CodebookSet.learn({("U8", "weight"): coder.samples()["U8", "weight"][-4:]}))
    own = huffman_bits(np.bincount(moved, minlength=256)) / 8
    assert coder.encode(moved, "U8", "weight").size - HEADER.size <= 1.01 * own


def test_a_factor_is_no_drift() -> None:
    coder = codec()
    plain = coder.encode(draw("BF16", 1 << 16, 9), "BF16", "weight").size
    for _ in range(8):
        moved = coder.encode(draw("BF16", 1 << 16, 9, scale=1e-3 * 2**-9), "BF16", "weight").size
        assert moved <= plain * 1.01
    assert not coder.stats()["BF16", "weight"].has_drifted
