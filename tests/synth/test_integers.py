"""Bytes about zero: found, weighed by what they take, and never offered to anything else."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from operators.words import dtype_of
from synth.conditioned import KINDS
from synth.hole import Setting
from synth.integers import LAYOUTS, Folded, is_centred, is_integer
from synth.structured import Structured
from tests.synth.support import encoded, literal_bytes, search

ROWS, COLUMNS = 512, 384
coders = pytest.mark.parametrize("coder", ["rans", "huffman"])


def quantised(per_row: bool, dtype: str = "I8") -> Structured:
    """Return weights of heavy tails, whose rows and columns differ, as symmetric integers of 8 bits."""
    rng = np.random.Generator(np.random.PCG64(4))
    scales = np.exp2(rng.normal(0, 0.5, (ROWS, 1)) + rng.normal(0, 0.3, (1, COLUMNS)))
    weights = rng.standard_t(5, (ROWS, COLUMNS)) * scales
    most = np.abs(weights).max(axis=1, keepdims=True) if per_row else np.abs(weights).max()
    words = np.rint(weights / most * 127).astype(np.int8).view(np.uint8).ravel()
    return Structured("quantised", dtype, ROWS, COLUMNS, words)


def entropy_bytes(counts: NDArray[np.int64]) -> float:
    total = counts.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(counts > 0, counts * np.log2(total / counts), 0).sum() / 8)


@coders
@pytest.mark.parametrize("per_row", [False, True])
def test_weights_of_8_bits_take_less_than_their_entropy(*, per_row: bool, coder: Literal["rans", "huffman"]) -> None:
    tensor = quantised(per_row)
    found = search(tensor, coder=coder)
    assert str(found.program).startswith(f"zigzag({KINDS[coder].name}[{COLUMNS},")
    size = len(encoded(found, tensor.words).record)
    assert size < (0.9985 if coder == "rans" else 1.002) * entropy_bytes(np.bincount(tensor.words, minlength=256))


@coders
def test_costs_are_those_of_the_bytes(coder: str) -> None:
    tensor = quantised(per_row=False)
    hole = Setting(dtype_of("I8"), 16384, 32768, coder).root(tensor.words, COLUMNS)
    for layout in LAYOUTS:
        for scales in (0, 1, 2):
            for tables in range(4):
                step = Folded(scales, 0, 0, layout, KINDS[coder], tables)
                costs = step.costs(hole)
                exact = step.exact_q8(tensor.words, hole.stream, COLUMNS)
                assert costs is not None
                assert exact is not None
                assert 66 * abs(costs[tables] - exact) < exact


def test_noise_text_and_other_bytes_are_none() -> None:
    rng = np.random.Generator(np.random.PCG64(4))
    setting = Setting(dtype_of("I8"), 16384, 32768)
    noise = rng.integers(0, 256, 1 << 17).astype(np.uint8)
    letters = rng.integers(97, 123, 1 << 17).astype(np.uint8)
    assert not is_integer(setting.root(noise, 512))
    assert not is_centred(setting.root(letters, 512))
    integers = quantised(per_row=True)
    assert is_integer(setting.root(integers.words, COLUMNS))
    assert not is_integer(setting.root(integers.words, 0))
    assert not is_integer(Setting(dtype_of("U8"), 16384, 32768).root(integers.words, COLUMNS))


def test_a_segment_of_few_words_has_a_literal() -> None:
    tensor = quantised(per_row=False)
    found = search(tensor)
    assert str(found.program_for(tensor.words[: 5 * COLUMNS])) == "lit"
    assert len(encoded(found, tensor.words).record) < literal_bytes(tensor.words)
