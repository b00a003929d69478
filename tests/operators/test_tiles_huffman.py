"""The kernels of tiles with Huffman codes give the bytes of the plain coder, and stand any bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kernels import tiles_huffman
from operators.words import Words
from tests.operators import scaled_oracle as oracle
from tests.operators.oracle import code_lengths
from tests.operators.scaled_cases import Case, cases, make_case
from tests.operators.tile_kernels import GUARD, NO_LOWS, SLACK, calls_of

ROOT = Path(__file__).parents[2]
kernels: Any = tiles_huffman  # given arguments that are shared with the other families
BF16 = oracle.Geometry(16, 5, 2, 1, 2, 1)


def lengths_of(case: Case) -> list[dict[int, int]]:
    """A code for each table that is there, from its frequencies."""
    every = [{symbol: f for symbol, f in enumerate(table) if f} for table in case.frequencies]
    return [code_lengths(live, 12) if live else {} for live in every]


def table_of(lengths: list[dict[int, int]]) -> Words:
    return np.array([[table.get(symbol, 0) for symbol in range(64)] for table in lengths], np.uint8)


def encode(case: Case, room: int | None = None) -> oracle.HuffmanSections | None:
    """Return the sections, or None for want of `room` (bytes of stream, words of escapes)."""
    g, n_words = case.geometry, case.words.size
    tables = np.empty((g.n_tables, kernels.ENCODER_BYTES), np.uint8)
    kernels.encoder_tables(table_of(lengths_of(case)), tables)
    room = 2 * n_words + 4096 if room is None else room
    stream, escapes = np.full(room + SLACK, GUARD, np.uint8), np.full(room + SLACK, GUARD, np.uint16)
    at = n_escapes = 0
    raws = b""
    calls = calls_of(case)
    for start, stop, *arguments in calls:
        raw = np.full(8 * g.raw_bits * arguments[0] * arguments[2].size + SLACK, GUARD, np.uint8)
        scratch = np.full(kernels.SCRATCH_BYTES_PER_COLUMN * arguments[0] + kernels.SCRATCH_BYTES, GUARD, np.uint8)
        at, n_escapes = kernels.encode_tiles(
            case.words[start:stop], *arguments, tables, raw, stream[:room], at, escapes[:room], n_escapes, scratch
        )
        for written in (raw, stream, escapes):
            assert (written[-SLACK:] == GUARD).all()
        if at < 0:
            return None
        raws += raw[:-SLACK].tobytes()
    return oracle.HuffmanSections(
        raws, case.words[calls[-1][1] :].tobytes(), tuple(escapes[:n_escapes].tolist()), stream[:at].tobytes()
    )


def decode(case: Case, sections: oracle.HuffmanSections) -> Words | None:
    """Return the words, or None where the sections are found damaged."""
    g = case.geometry
    tables = np.empty((g.n_tables, kernels.DECODER_BYTES), np.uint8)
    assert kernels.decoder_tables(table_of(lengths_of(case)), tables) == 0
    payload = np.frombuffer(sections.raw + sections.groups, np.uint8)
    escapes = np.array(sections.escapes, np.uint16)
    found = np.empty_like(case.words)
    raw_at, at, n_escapes = 0, len(sections.raw), 0
    calls = calls_of(case)
    for start, stop, *arguments in calls:
        n_scratch = kernels.SCRATCH_BYTES_PER_COLUMN * arguments[0] + kernels.SCRATCH_BYTES
        scratch = np.full(n_scratch + SLACK, GUARD, np.uint8)
        words = np.full(stop - start + SLACK, GUARD, found.dtype)
        at, n_escapes = kernels.decode_tiles(
            payload, *arguments, tables, raw_at, at, payload.size, escapes, n_escapes, scratch[:-SLACK], NO_LOWS,
            words[:-SLACK],
        )  # fmt: skip
        assert (scratch[-SLACK:] == GUARD).all()
        assert (words[-SLACK:] == GUARD).all()
        if at < 0:
            return None
        assert at <= payload.size
        found[start:stop] = words[:-SLACK]
        raw_at += 8 * g.raw_bits * arguments[0] * arguments[2].size
    if at != payload.size or n_escapes != escapes.size:
        return None
    found[calls[-1][1] :] = np.frombuffer(sections.rest, found.dtype)
    return found


def assert_same(case: Case) -> None:
    sections = encode(case)
    assert sections is not None
    assert sections == oracle.encode_huffman(case.words.tolist(), case.scales, lengths_of(case), case.geometry)
    words = decode(case, sections)
    assert words is not None
    np.testing.assert_array_equal(words, case.words)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_bytes_are_those_of_the_plain_coder(case: Case) -> None:
    assert_same(case)


@pytest.mark.parametrize("columns", [1000, 8190, 8194])
def test_groups_of_tiles_are_coded_on_their_own(columns: int) -> None:
    step = max(1, kernels.GROUP_COLUMNS // columns)
    rng, g = np.random.default_rng(columns), oracle.Geometry(8, 1, 3, 1, 0, 1)
    scales = rng.integers(0, 9, columns).tolist()
    words = rng.geometric(0.03, 64 * columns * (step + 1)).clip(0, 255).astype(np.uint8)

    def case(first: int, last: int) -> Case:
        zeros = [0] * columns
        part = oracle.Scales([40] * (64 * (last - first)), scales, zeros, zeros, 0)
        return Case(words[64 * columns * first : 64 * columns * last], part, [(64,) * 64], g)

    whole, one, two = encode(case(0, step + 1)), encode(case(0, step)), encode(case(step, step + 1))
    assert whole is not None
    assert one is not None
    assert two is not None
    assert whole.groups == one.groups + two.groups
    assert whole.escapes == one.escapes + two.escapes
    np.testing.assert_array_equal(decode(case(0, step + 1), whole), words)


def test_streams_longer_than_two_bytes_can_count() -> None:
    """Codes of 12 bits throughout: the streams take over 64 KiB."""
    columns, g = 2816, oracle.Geometry(8, 0, 8, 0, 0, 1)
    words = np.full(64 * columns, 255 - 62, np.uint8)
    table = (2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, *[0] * 51, 1, 1)
    case = Case(words, oracle.Scales([0] * 64, [0] * columns, [0] * columns, [0] * columns, 0), [table], g)
    assert_same(case)
    assert len(case.words) * 12 // 8 // 4 > 1 << 16


# -- foreign bytes and little room ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths",
    [{0: 1}, {0: 1, 1: 2}, {0: 1, 1: 1, 2: 1}, {i: min(i + 1, 13) for i in range(14)}, {0: 255, 1: 1}, {5: 12}],
)
def test_codes_that_are_not_complete_or_too_long_are_refused(lengths: dict[int, int]) -> None:
    good = {i: min(i + 1, 12) for i in range(13)}
    tables = np.empty((3, kernels.DECODER_BYTES), np.uint8)
    assert kernels.decoder_tables(table_of([good, {}, good]), tables) == 0
    assert kernels.decoder_tables(table_of([good, {}, lengths]), tables) == -1


def test_gives_up_for_want_of_room() -> None:
    case = make_case(BF16, 8, 2, 0, "escapes")
    sections = encode(case)
    assert sections is not None
    fits = [encode(case, room) is not None for room in range(0, 4096, 64)]
    assert fits == sorted(fits)
    assert len(sections.groups) < 64 * fits.index(True) < 4096


def test_shortened_sections_are_refused() -> None:
    case = make_case(BF16, 8, 1, 300, "escapes")
    sections = encode(case)
    assert sections is not None
    for n in range(0, len(sections.groups), 3):
        assert decode(case, replace(sections, groups=sections.groups[:n])) is None
    for n in range(len(sections.escapes)):
        assert decode(case, replace(sections, escapes=sections.escapes[:n])) is None


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), kind=st.sampled_from(["skewed", "escapes"]), columns=st.integers(1, 6))
def test_any_bytes_stay_inside(seed: int, kind: str, columns: int) -> None:
    assert_stands_damage(make_case(BF16, 2 * columns, 1, 300, kind, seed), seed)


def assert_stands_damage(case: Case, seed: int) -> None:
    """`decode` looks for writes beyond what is the kernels'; interpreted kernels look at what they read."""
    rng = np.random.default_rng(seed)
    sections = encode(case)
    assert sections is not None
    groups = np.frombuffer(sections.groups, np.uint8)
    for _ in range(4):
        flipped, noise = groups.copy(), rng.integers(0, 256, groups.size + rng.integers(0, 99), np.uint8)
        flipped[rng.integers(0, flipped.size, 3)] ^= np.uint8(1 << rng.integers(0, 8))
        # The directory of the group comes first.
        with_directory = np.concatenate((groups[:48], noise))
        for changed in (flipped, noise, with_directory, np.zeros_like(groups)):
            words = decode(case, replace(sections, groups=changed.tobytes()))
            assert words is None or words.size == case.words.size


INTERPRETED = """
from operators.kernels.jit import JIT
from tests.operators.scaled_cases import make_case
from tests.operators.test_tiles import ALL_GEOMETRIES
from tests.operators.test_tiles_huffman import BF16, assert_same, assert_stands_damage
assert not JIT
for i in range(5, len(ALL_GEOMETRIES), 25):
    assert_same(make_case(ALL_GEOMETRIES[i], 4, 1, 128, ("skewed", "escapes")[i % 2], i))
assert_stands_damage(make_case(BF16, 2, 1, 0, "escapes"), 1)
"""


def test_interpreted_kernels_give_the_same_bytes_and_stay_inside() -> None:
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", INTERPRETED], env=environment, cwd=ROOT, check=True)
