"""The steps of tiles with AVX2 do what the plain ones do, for any states, tables, streams, and touch nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from operators.kernels import rans_avx2, tiles
from operators.kernels.jit import kernel
from operators.kernels.vectors import HAS_AVX2

pytestmark = pytest.mark.skipif(not HAS_AVX2, reason="needs a CPU with AVX2, and compiled kernels")
put_plain, put_vector = tiles._put_vector_plain, rans_avx2.put_vector
take_plain, take_vector = tiles._take_vector_plain, rans_avx2.take_vector
GUARD = 0xA5
ROOM = 2 * tiles.LANES


@kernel("states", "stream")
def _put(
    is_plain: bool,
    symbols: NDArray[np.uint8],
    entries: NDArray[np.uint64],
    states: NDArray[np.uint32],
    stream: NDArray[np.uint8],
) -> Any:
    first, none, at = np.uint64(0), np.int64(0), np.uint64(stream.size)
    if is_plain:
        at = put_plain(symbols, none, entries, first, states, first, stream, at)
    else:
        at = put_vector(symbols, none, entries, first, states, first, stream, at)
    return np.int64(at)


@kernel("states", "scratch")
def _take(
    is_plain: bool,
    payload: NDArray[np.uint8],
    entries: NDArray[np.uint32],
    states: NDArray[np.uint32],
    scratch: NDArray[np.uint8],
) -> Any:
    first, to = np.uint64(0), np.int64(tiles.LANES)
    if is_plain:
        at, escaped = take_plain(payload, first, entries, first, states, first, scratch, to)
    else:
        at, escaped = take_vector(payload, first, entries, first, states, first, scratch, to)
    return np.int64(at), escaped != first


def _frequencies(rng: np.random.Generator, spread: float) -> NDArray[np.uint16]:
    """Return a table that often has symbols of one slot, of nearly all, and of none."""
    weights = np.exp(spread * rng.standard_normal(64)) * (rng.random(64) < rng.choice([0.05, 0.5, 1.0]))
    weights[rng.integers(64)] += 1
    live = np.flatnonzero(weights)
    live = live[: max(2, live.size)] if live.size > 1 else np.array([live[0], (live[0] + 1) % 64])
    counts = np.zeros(64, np.int64)
    counts[live] = 1 + ((4096 - live.size) * weights[live] / weights.sum()).astype(np.int64)
    counts[live[0]] += 4096 - counts.sum()
    return counts.astype(np.uint16)[None]


def _just_full(slots: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return states that become the lowest one when a symbol is taken."""
    frequency, place = slots >> 20, slots >> 8 & 0xFFF
    chosen = np.flatnonzero(place == rans_avx2.LOWEST % np.maximum(frequency, 1))
    return ((rans_avx2.LOWEST - place[chosen]) // frequency[chosen] << rans_avx2.BITS | chosen).astype(np.uint32)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_symbols_are_put_as_by_the_plain_steps(spread: float) -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        frequencies = _frequencies(rng, spread)
        entries = np.empty((1, tiles.ENCODER_BYTES), np.uint8)
        tiles.encoder_tables(frequencies, entries)
        rows = entries.reshape(-1).view(np.uint64)
        symbols = rng.choice(64, 64, p=frequencies[0] / 4096).astype(np.uint8)
        states = rng.integers(rans_avx2.LOWEST, 1 << 32, 64, np.uint64).astype(np.uint32)
        states[::4] = np.minimum(frequencies[0, symbols[::4]].astype(np.uint64) << 20, (1 << 32) - 1)  # just full
        whole = np.full(ROOM + 64, GUARD, np.uint8)
        stream, expected, after = whole[64:], np.zeros(ROOM, np.uint8), states.copy()
        at = _put(False, symbols, rows, states, stream)
        assert at == _put(True, symbols, rows, after, expected)
        np.testing.assert_array_equal(states, after)
        np.testing.assert_array_equal(stream[at:], expected[at:])
        assert (whole[:64] == GUARD).all()


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_symbols_are_taken_as_by_the_plain_steps(spread: float) -> None:
    rng = np.random.default_rng(2)
    seen = set()
    for _ in range(200):
        entries = np.empty((1, tiles.DECODER_BYTES), np.uint8)
        tiles.decoder_tables(_frequencies(rng, spread), entries)
        slots = entries.reshape(-1).view(np.uint32)
        # A broken stream has any states.
        states = rng.integers(rng.choice([0, rans_avx2.LOWEST]), 1 << rng.integers(17, 33), 64, np.uint64).astype(
            np.uint32
        )
        states[::4] = rng.choice(_just_full(slots), 16)
        payload = rng.integers(0, 256, ROOM, np.uint8)
        scratch, after = np.full(3 * tiles.LANES, GUARD, np.uint8), states.copy()
        expected = scratch.copy()
        taken = _take(False, payload, slots, states, scratch)
        assert taken == _take(True, payload, slots, after, expected)
        np.testing.assert_array_equal(states, after)
        np.testing.assert_array_equal(scratch, expected)
        seen.add(taken[1])
    assert seen == {False, True}


def test_every_frequency_divides_right() -> None:
    """Reciprocals stand beside true division, around multiples up to the highest state."""
    symbols = np.zeros(64, np.uint8)
    entries = np.empty((1, tiles.ENCODER_BYTES), np.uint8)
    for f in range(1, 4096):
        frequencies = np.zeros((1, 64), np.uint16)
        frequencies[0, :2] = f, 4096 - f
        tiles.encoder_tables(frequencies, entries)
        multiples = f * np.arange(1, 9, dtype=np.uint64) * np.uint64(((1 << 20) - 1) // 8)
        near = (multiples[:, None] + np.arange(8, dtype=np.uint64) - np.uint64(4)).reshape(-1)
        states = np.clip(near, rans_avx2.LOWEST, (f << 20) - 1).astype(np.uint32)
        start = 4096 - f if f < 2048 else 0  # frequent symbols come first
        expected = (states.astype(np.uint64) // f << 12) + states % f + start
        _put(False, symbols, entries.reshape(-1).view(np.uint64), states, np.zeros(ROOM, np.uint8))
        if f != 2048:
            np.testing.assert_array_equal(states, expected.astype(np.uint32))
