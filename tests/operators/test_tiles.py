"""The portable kernels of tiles give the bytes of the plain coder, and stand any bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kernels import tiles
from tests.operators import scaled_oracle as oracle
from tests.operators.scaled_cases import Case, cases, make_case
from tests.operators.tile_kernels import decode, encode

ROOT = Path(__file__).parents[2]
BF16 = oracle.Geometry(16, 5, 2, 1, 2, 2)
ALL_GEOMETRIES = [
    oracle.Geometry(width, low, fraction, signed, (low + fraction) % 4, 1 + (low + signed) % 2)
    for width in (8, 16)
    for signed in range(3)
    for low in range(width - (signed > 0))
    for fraction in {0, min(2, width - (signed > 0) - low), width - (signed > 0) - low}
]


def assert_same(case: Case) -> None:
    sections = encode(tiles, case)
    assert sections == case.sections()
    words = decode(tiles, case, sections)
    assert words is not None
    np.testing.assert_array_equal(words, case.words)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_bytes_are_those_of_the_plain_coder(case: Case) -> None:
    assert_same(case)


def test_all_ways_to_cut_a_word() -> None:
    for i, geometry in enumerate(ALL_GEOMETRIES):
        assert_same(make_case(geometry, 2 + 2 * (i % 3), i % 2, 130 + i, ("skewed", "flat", "escapes")[i % 3], i))


@pytest.mark.parametrize("signed", [0, 1, 2])
@pytest.mark.parametrize("columns", [254, 256, 258, 514])
def test_blocks_of_columns(columns: int, signed: int) -> None:
    assert_same(make_case(oracle.Geometry(16, 4, 3, signed, 1, 1), columns, 1, 0, seed=columns))


def test_fields_of_all_bits_above_a_low_top_are_escapes() -> None:
    """Modulo 2**16 they are as near to it as those below."""
    g, columns = oracle.Geometry(16, 0, 0, 0, 0, 1), 20
    below, above = np.arange(21, dtype=np.uint16), np.arange((1 << 16) - 60, 1 << 16).astype(np.uint16)
    words = np.random.default_rng(1).permutation(np.resize(np.concatenate((below, above)), 64 * columns))
    case = Case(words, oracle.Scales([160] * 64, [0] * columns, [0] * columns, [0] * columns, 0), [(64,) * 64], g)
    assert len(case.sections().escapes) == np.count_nonzero(words > 20)
    assert_same(case)


@pytest.mark.parametrize("n_words", [(1 << 17) - 2, 1 << 17])
def test_literals_around_the_second_group(n_words: int) -> None:
    g = replace(BF16, groups=oracle.groups_of(n_words))
    n_tiles = n_words // (64 * 130)
    assert_same(make_case(g, 130, n_tiles, n_words - 64 * 130 * n_tiles))


def test_rows_and_columns_of_extreme_scales() -> None:
    case = make_case(BF16, 6, 2, 400)
    for scale in (-(1 << 20), -1, 0, 1 << 20):
        scales = replace(case.scales, rows=[scale + row % 3 for row in range(128)], tail=scale)
        assert_same(replace(case, scales=scales, frequencies=[(64,) * 64] * BF16.n_tables))


def test_a_field_far_above_the_top_is_an_escape() -> None:
    """Sixteen bits of field: the difference to the top wraps to a symbol."""
    g = oracle.Geometry(16, 0, 2, 0, 0, 1)
    words = np.arange(65536 - 30, 65536 + 34).astype("<u2").repeat(4)
    assert_same(Case(words, oracle.Scales([0] * 64, [0] * 4, [0] * 4, [0] * 4, 0), [(64,) * 64], g))


@pytest.mark.parametrize("frequency", [1, 15, 16, 2048, 4095])
def test_the_rarest_and_the_most_frequent_symbols(frequency: int) -> None:
    g = oracle.Geometry(8, 0, 8, 0, 0, 1)
    words = np.random.default_rng(0).integers(254, 256, 64 * 8 * 4, dtype=np.uint8)
    table = (frequency, 4096 - frequency, *[0] * 62)
    assert_same(Case(words, oracle.Scales([0] * 256, [0] * 8, [0] * 8, [0] * 8, 0), [table], g))


# -- foreign bytes and little room ----------------------------------------------------------------------


def test_gives_up_where_a_pair_may_not_have_room() -> None:
    case = make_case(BF16, 8, 2, 0, "escapes")
    sections = case.sections()
    fits = [encode(tiles, case, room) is not None for room in range(0, 4096, 64)]
    needed = 64 * (fits.index(True) - 1)
    assert fits == sorted(fits)
    assert 0 <= needed - max(2 * len(sections.stream), len(sections.escapes)) <= 4 * 64


def test_a_literal_without_tiles() -> None:
    case = make_case(BF16, 8, 0, 127)
    assert_same(case)
    assert decode(tiles, case, replace(case.sections(), states=(oracle.LOWEST + 1,) * 128)) is None


def test_shortened_sections_are_refused() -> None:
    case = make_case(BF16, 8, 1, 300, "escapes")
    sections = case.sections()
    for n in range(len(sections.stream)):
        assert decode(tiles, case, replace(sections, stream=sections.stream[:n])) is None
    for n in range(len(sections.escapes)):
        assert decode(tiles, case, replace(sections, escapes=sections.escapes[:n])) is None


def test_wrong_end_states_are_refused() -> None:
    case = make_case(BF16, 2, 1, 0)
    sections = case.sections()
    (block,) = oracle.tiles(case.words.size, case.scales, BF16)
    n_seeds = oracle.seeded_bytes(8 * BF16.raw_bits * block.words.shape[1], BF16) // 2
    assert 0 < n_seeds < 128
    for lane in range(n_seeds, 128):
        states = list(sections.states)
        states[lane] ^= 1 << 12
        assert decode(tiles, case, replace(sections, states=tuple(states))) is None


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), kind=st.sampled_from(["skewed", "escapes"]), columns=st.integers(1, 6))
def test_any_bytes_stay_inside(seed: int, kind: str, columns: int) -> None:
    assert_stands_damage(make_case(BF16, 2 * columns, 1, 300, kind, seed), seed)


def assert_stands_damage(case: Case, seed: int) -> None:
    """`decode` looks for writes beyond what is the kernels'; interpreted kernels look at what they read."""
    rng = np.random.default_rng(seed)
    sections = case.sections()
    stream, states = np.array(sections.stream, np.uint16), np.array(sections.states, np.uint32)
    damaged = stream ^ np.uint16(1 << rng.integers(0, 16)) * (rng.random(stream.size) < 0.05)
    noise = rng.integers(0, 1 << 16, rng.integers(0, 2 * stream.size + 1))
    escapes = rng.integers(0, 1 << 16, rng.integers(0, case.words.size))
    for changed in (
        replace(sections, stream=tuple(damaged.tolist())),
        replace(sections, stream=tuple(noise.tolist()), escapes=tuple(escapes.tolist())),
        replace(sections, stream=(0,) * stream.size),
        replace(sections, stream=(0xFFFF,) * stream.size, states=(0xFFFFFFFF,) * states.size),
        replace(sections, states=(0,) * states.size),
        replace(sections, states=tuple(rng.integers(0, 1 << 32, states.size).tolist())),
    ):
        words = decode(tiles, case, changed)
        assert words is None or words.size == case.words.size


INTERPRETED = """
from operators.kernels.jit import JIT
from tests.operators.scaled_cases import make_case
from tests.operators.test_tiles import ALL_GEOMETRIES, assert_same, assert_stands_damage, BF16
assert not JIT
for i in range(0, len(ALL_GEOMETRIES), 17):
    assert_same(make_case(ALL_GEOMETRIES[i], 4, 1, 128, ("skewed", "escapes")[i % 2], i))
assert_stands_damage(make_case(BF16, 2, 1, 0, "escapes"), 1)
"""


def test_interpreted_kernels_give_the_same_bytes_and_stay_inside() -> None:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", INTERPRETED], env=environment, cwd=ROOT, check=True)


def test_prepared_tables_depend_on_frequencies_alone() -> None:
    """An escape without slots is in no table of an archive, but its row must not be what memory held before."""
    frequencies = np.zeros((1, 64), np.uint16)
    frequencies[0, [0, 1]] = 2048
    found = []
    for before in (0, 0xFF):
        out = np.full((1, tiles.ENCODER_BYTES), before, np.uint8)
        tiles.encoder_tables(frequencies, out)
        found.append(out.tobytes())
    assert found[0] == found[1]
