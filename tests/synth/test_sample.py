"""Samples: which words they hold, and that neighbours in them are neighbours in the stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.ops.scan import ScanAdd, ScanXor
from operators.ops.unpack import Unpack
from synth.sample import take_sample


def positions(n_words: int) -> np.ndarray:
    return np.arange(n_words, dtype=np.uint32)


@given(st.integers(1, 3000), st.integers(0, 400), st.sampled_from((256, 512, 4096)))
def test_a_small_region_is_its_own_sample(n_words: int, columns: int, limit: int) -> None:
    words = positions(min(n_words, limit))
    sample = take_sample(words, 32, columns, limit, limit)
    assert sample.exact
    assert sample.words is words


@given(st.integers(8, 900), st.integers(2, 900), st.sampled_from((1024, 4096)))
def test_a_sample_is_in_order_within_its_size_and_spread(rows: int, columns: int, n_sample: int) -> None:
    words = positions(rows * columns)
    sample = take_sample(words, 32, columns, n_sample, n_sample)
    if sample.exact:
        return
    assert sample.layout is not None
    assert np.prod(sample.layout) == sample.words.size <= n_sample
    assert sample.words.size >= n_sample // 4
    assert sample.words.max() < words.size
    assert sample.words[-1] - sample.words[0] > words.size // 2
    if sample.layout[1] == 2:
        grid = sample.words.reshape(sample.layout)
        assert (grid[:, 1] - grid[:, 0] == columns).all()
        assert (np.diff(grid, axis=3) == 1).all()


@given(
    st.integers(8, 600), st.integers(2, 600), st.sampled_from((1024, 8192)), st.booleans(), st.sampled_from((1, 0, 3))
)
def test_neighbours_at_a_lag_are_those_of_the_stream(
    rows: int, columns: int, n_sample: int, add: bool, lag: int
) -> None:
    lag = lag or columns
    words = positions(rows * columns)
    sample = take_sample(words, 32, columns, n_sample, n_sample)
    op = ScanAdd(lag) if add else ScanXor(lag)
    deltas = sample.lagged(op, lag)
    if deltas is None:
        return
    assert deltas.stream.n_words == words.size - lag
    if add:
        assert (deltas.words == lag).all()
    else:
        later = deltas.words  # p ^ (p - lag) for some p: the sum of both is odd only if the xor is
        assert ((later & 1) == (lag & 1)).all()
    if sample.exact:
        assert deltas.exact
        assert np.array_equal(deltas.words, op.deltas(words, 32))


def test_narrow_words_keep_their_places() -> None:
    words = positions(64 * 4096)
    sample = take_sample(words, 32, 4096, 2048, 2048)
    narrow = sample.unpacked(Unpack(8))
    assert narrow.columns == 4 * 4096
    assert narrow.stream.n_words == 4 * words.size
    assert sample.layout is not None
    kept = sample.words.reshape(sample.layout[0], -1)[::4]
    assert np.array_equal(narrow.words.view(np.uint32), kept.ravel())
    assert narrow.layout is not None
    assert narrow.lagged(ScanAdd(narrow.columns), narrow.columns) is not None


def test_the_row_below_is_where_the_sample_says() -> None:
    for rows, columns in ((64, 4096), (16, 100)):
        sample = take_sample(positions(rows * columns), 32, columns, 2048, 2048)
        lag, block = sample.row_below
        below = [
            int(sample.words[i + lag]) - int(sample.words[i])
            for i in range(sample.words.size - lag)
            if not block or 2 * (i % block) < block
        ]
        assert below
        assert set(below) == {columns}


@pytest.mark.parametrize("columns", [0, 4096])
def test_deltas_stand_in_the_order_of_their_windows(columns: int) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 16, 1 << 17).astype(np.uint16)
    sample = take_sample(words, 16, columns, 4096, 4096)
    assert sample.layout is not None
    windows = sample.words.reshape(-1, sample.layout[3])
    for op in (ScanAdd(3), ScanXor(3)):
        deltas = sample.lagged(op, 3)
        assert deltas is not None
        assert np.array_equal(deltas.words, np.concatenate([op.deltas(window, 16) for window in windows]))
    if columns:
        below = sample.lagged(ScanXor(columns), columns)
        assert below is not None
        pairs = sample.words.reshape(-1, 2, below.words.size // sample.layout[0])
        assert np.array_equal(below.words, (pairs[:, 0] ^ pairs[:, 1]).reshape(-1))


@pytest.mark.parametrize("columns", [8, 63, 64, 96, 128, 200, 4096])
def test_no_word_is_sampled_twice(columns: int) -> None:
    """Matches are looked for in samples: what is there twice would seem to repeat."""
    words = np.arange(1024 * columns, dtype=np.uint32)
    sample = take_sample(words, 32, columns, words.size // 4, 0)
    assert np.unique(sample.words).size == sample.words.size < words.size
