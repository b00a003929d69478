"""No input grows: neither noise that looks like weights in parts, nor a segment for which a program was not made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from configs.recipe import load
from operators.program import parse
from operators.run import digest_of, encode
from operators.words import DTYPES
from pipeline.encoder import Encoder
from pipeline.rows import Row
from synth.prior import Prior
from tests.strategies import KINDS, make_words

GROWTH_PART, GROWTH_BYTES = 1000, 4 << 10
"""An input may grow by one part in so many, and so many bytes."""
PIECES = (*KINDS, "weights", "integers", "blocks")
EVERY_DTYPE = tuple(DTYPES)


def piece(kind: str, dtype: str, n_bytes: int, seed: int) -> NDArray[np.uint8]:
    """Return bytes of one kind: words, upper bytes of floats, integers about zero, or blocks."""
    rng = np.random.Generator(np.random.PCG64(seed))
    word_bytes = DTYPES[dtype].word_bits // 8
    if kind == "weights":
        top = min(4, word_bytes)
        floats = rng.standard_normal(n_bytes // top + 1).astype(np.float32) * np.float32(0.02)
        return floats.view(np.uint8).reshape(-1, 4)[:, 4 - top :].reshape(-1)[:n_bytes]
    if kind == "integers":
        return np.clip(np.rint(rng.normal(0, 6, n_bytes)), -127, 127).astype(np.int8).view(np.uint8)
    if kind == "blocks":
        blocks = rng.integers(0, 256, (n_bytes // 34 + 1, 34)).astype(np.uint8)
        blocks[:, :2] %= 3
        return blocks.reshape(-1)[:n_bytes]
    return make_words(kind, 8 * word_bytes, n_bytes // word_bytes + 1, seed).view(np.uint8)[:n_bytes]


@dataclass(frozen=True)
class Tensor:
    """Segments of one tensor, each made of pieces that alternate every few rows."""

    dtype: str
    columns: int
    rows: int
    every: int
    segments: tuple[tuple[tuple[str, ...], int], ...]

    def data(self, index: int) -> bytes:
        kinds, seed = self.segments[index]
        n_bytes = self.rows * self.columns * DTYPES[self.dtype].word_bits // 8
        parts = [piece(kind, self.dtype, n_bytes, seed + i).reshape(self.rows, -1) for i, kind in enumerate(kinds)]
        which = np.arange(self.rows) // self.every % len(parts)
        return np.stack(parts)[which, np.arange(self.rows)].tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(EVERY_DTYPE))
    columns = draw(st.sampled_from((1, 2, 31, 64, 100, 384, 4096)))
    most = (1 << 20) // (columns * DTYPES[dtype].word_bits // 8)
    kinds = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map(tuple)
    return Tensor(
        dtype,
        columns,
        draw(st.integers(1, most)),
        draw(st.sampled_from((1, 2, 7, 64))),
        draw(st.lists(st.tuples(kinds, st.integers(0, 99)), min_size=1, max_size=3).map(tuple)),
    )


def grown(tensor: Tensor, encoder: Encoder) -> None:
    """Check that no segment of a tensor grows beyond the bound."""
    encoder.start()
    for index in range(len(tensor.segments)):
        data = tensor.data(index)
        row = Row(
            "a", index * len(data), len(data), "t", tensor.dtype, None, index * tensor.rows, tensor.rows,
            tensor.columns, int(index == 0), "safetensors", None, 0, digest=digest_of(data),
        )  # fmt: skip
        encoded, _ = encoder.record(row, memoryview(data))
        assert len(encoded.record) <= len(data) + len(data) // GROWTH_PART + GROWTH_BYTES
        assert encoder.alarms == []


@pytest.fixture(scope="module", params=["fast", "default", "max", "portable"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return Encoder(load(request.param).recipe.synth, Prior.shipped())


@settings(max_examples=20, deadline=None)
@given(tensor=tensors())
def test_nothing_grows(encoder: Encoder, tensor: Tensor) -> None:
    grown(tensor, encoder)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I8", "U8", "I32"])
@pytest.mark.parametrize("first", ["weights", "integers", "blocks", "few", "runs", "constant"])
def test_a_program_of_another_segment_does_no_harm(encoder: Encoder, first: str, dtype: str) -> None:
    segments = (((first,), 1), (("random",), 2), ((first, "random"), 3), (("random", first), 4))
    grown(Tensor(dtype, 384, 300, 1, segments), encoder)


def test_a_program_that_makes_more_of_words_than_they_are_is_not_taken(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_words = 1 << 15
    tensor = Tensor("U32", n_words, 1, 1, ((("distinct",), 0),))
    program = parse(f"dictionary[{n_words}](raw, bitpack)")
    words = np.frombuffer(tensor.data(0), np.uint32)
    larger = encode(program, words)
    assert larger is not None
    assert len(larger.record) > 1.3 * words.nbytes
    monkeypatch.setattr(encoder, "_coded", lambda *_: (larger, 7))
    grown(tensor, encoder)
