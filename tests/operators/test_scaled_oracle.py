"""The plain coder of `scaled` is its own inverse and does what its format says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.operators import scaled_oracle as oracle
from tests.operators.scaled_cases import Case, cases, make_case

BF16 = oracle.Geometry(16, 5, 2, 1, 2, 1)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_decodes_what_it_encoded(case: Case) -> None:
    sections = case.sections()
    n_words = case.words.size
    assert oracle.decode(sections, n_words, case.scales, case.frequencies, case.geometry) == case.words.tolist()


@pytest.mark.parametrize("section", ["raw", "states", "stream", "escapes"])
def test_a_changed_bit_is_noticed_or_changes_words(section: str) -> None:
    case = make_case(BF16, 8, 1, 200, "escapes", seed=1)
    sections = case.sections()
    values = list(getattr(sections, section))
    values[len(values) // 2] ^= 1
    changes: dict[str, Any] = {section: type(getattr(sections, section))(values)}
    try:
        words = oracle.decode(
            replace(sections, **changes), case.words.size, case.scales, case.frequencies, case.geometry
        )
    except (AssertionError, StopIteration):
        assert section in ("states", "stream")
    else:
        assert words != case.words.tolist()


def _end_states(case: Case) -> list[int]:
    """Decode the vectors alone, word by word."""
    sections, g = case.sections(), case.geometry
    states, stream = list(sections.states), iter(sections.stream)
    for tile in oracle.tiles(case.words.size, case.scales, g):
        for vector in tile.vectors:
            for j in range(64):
                lane = 64 * vector.group + j
                _, states[lane] = oracle.take(states[lane], case.frequencies[vector.table], stream)
    return states


@pytest.mark.parametrize("word", [0x3F9A, 0xBF9A, 0x0000, 0xFFFF])
def test_bits_of_a_bf16_word(word: int) -> None:
    field, raw = oracle.split(word, 0, BF16)
    assert field == word >> 5 & 0x3FF
    assert raw == word & 31 | word >> 15 << 5
    in_sign_mode = oracle.Geometry(16, 5, 2, 2, 2, 1)
    field, raw = oracle.split(word, 1, in_sign_mode)
    assert field == (word >> 6 & 0x1FF) << 1 | (word >> 15 ^ 1)
    assert raw == word & 63


def test_scales_order_rows_and_columns_and_pick_the_context() -> None:
    assert oracle.row_order([3, -1, 3, -2]) == [3, 1, 0, 2]
    assert oracle.column_order([0, 1, 0, 0], [5, -9, 4, 4]) == [2, 3, 0, 1]
    assert oracle.tile_scale([-1] * 33 + [0] * 31) == -1
    assert oracle.tile_scale([-1] * 32 + [0] * 32) == 0
    assert oracle.context(8 * 127, 5, 0, BF16) == (2, 127 << 2 | 3)
    assert oracle.context(-9, 0, 0, BF16) == (3, 3)
    assert oracle.context(8 * 300, 0, 0, BF16) == (0, 0x3FF)


def test_parts_of_a_raw_field() -> None:
    assert oracle.parts(6) == [(0, 4), (4, 2)]
    assert oracle.parts(9) == [(0, 8), (8, 1)]
    raws = np.arange(128).reshape(64, 2) % 64
    block = oracle.raw_block(raws, BF16)
    assert len(block) == 8 * 6 * 2
    assert block[0] == raws[0, 0] & 15 | (raws[32, 0] & 15) << 4
    assert block[64 + 1] == raws[0, 1] >> 4 | raws[16, 1] >> 4 << 2 | raws[32, 1] >> 4 << 4 | raws[48, 1] >> 4 << 6


def test_size_is_that_of_the_table() -> None:
    """States of 16 bits and more lose nothing to speak of, and seeds are no loss."""
    case = make_case(BF16, 64, 4, 0)
    sections = case.sections()
    bits = 0.0
    for tile in oracle.tiles(case.words.size, case.scales, BF16):
        for vector in tile.vectors:
            for i in vector.words:
                field, _ = oracle.split(int(case.words[i]), vector.flip, BF16)
                bits += 12 - np.log2(case.frequencies[vector.table][oracle.symbol_of(field, vector.top)])
    spent = 16 * len(sections.stream) + sum(float(np.log2(state)) for state in sections.states)
    spent -= sum(float(np.log2(state)) for state in _end_states(case))
    assert abs(spent - bits) < 16
