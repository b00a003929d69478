"""Samples: the words on which a stream is judged.

A small stream is its own sample. A large matrix is sampled as pairs of adjacent rows, crossed with
windows of adjacent columns, both spread evenly: one gather that holds neighbours at a lag of one word and
of one row. What has no rows is sampled as windows.

Positions are never stored. A sample is laid out as (groups, rows, windows, run), and a neighbour is a
shift along one axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from operators.base import Operator, Stream
from operators.kernels.costing import gather_runs
from operators.words import Words

WINDOW_WORDS = 64
"""Adjacent columns of a window of a matrix."""
WINDOWS = 2
"""Windows of a row, more only where the matrix has too few rows."""
FLAT_WINDOW_WORDS = 1024
"""Adjacent words of a window where there are no rows."""
MIN_PAIRS = 256
"""Fewest neighbours on which a scan of a sample is judged."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Words of a stream.

    Attributes
    ----------
    words : Words
        The sampled words, in the order of the stream.
    stream : Stream
        Type of the whole stream.
    columns : int
        Words of a row of the whole stream; 0 where it has no rows.
    layout : tuple of int or None
        (groups, rows, windows, run) of `words`; None where they are the whole stream.
    """

    words: Words
    stream: Stream
    columns: int
    layout: tuple[int, int, int, int] | None

    @property
    def exact(self) -> bool:
        """Whether the sample is the whole stream."""
        return self.layout is None

    @property
    def row_below(self) -> tuple[int, int]:
        """Return how far apart in `words` a word and the one a row below are, and the block whose first half has one.

        (0, 0) where there are no rows, or none in the sample.
        """
        if self.layout is None:
            return (self.columns, 0) if 0 < self.columns < self.words.size else (0, 0)
        _, rows, windows, run = self.layout
        return (windows * run, rows * windows * run) if rows == 2 else (0, 0)

    def lagged(self, op: Operator, lag: int) -> Sample | None:
        """Return the deltas that the scan `op` leaves at `lag`, or None where the sample holds too few pairs.

        `op` itself computes them, of the words of all windows at once, laid out along an axis of their own.
        """
        n_words, layout = self.stream.n_words - lag, None
        if n_words < 1:
            return None
        grid = self.words
        if self.layout is not None:
            groups, rows, windows, run = self.layout
            if lag < run // 2:
                grid, layout = self.words.reshape(-1, run).T, (groups, rows, windows, run - lag)
            elif lag == self.columns and rows == 2:
                grid, layout = self.words.reshape(groups, 2, -1).swapaxes(0, 1), (groups, 1, windows, run)
                op = type(op).from_params((1,))
            else:
                return None
            if math.prod(layout) < MIN_PAIRS:
                return None
        targets = op.targets(grid, Stream(self.stream.width_bits, self.words.size))
        assert targets is not None
        deltas = targets[1].T if grid.ndim == 2 else targets[1]  # windows one after the other again
        return Sample(deltas.ravel(), Stream(self.stream.width_bits, n_words), self.columns, layout)

    def unpacked(self, op: Operator) -> Sample:
        """Return the narrower words of which `op` makes these; of a sample about as many as there are words in it."""
        below = op.children(self.stream)[0]
        factor = below.n_words // self.stream.n_words
        words, layout = self.words, None
        if self.layout is not None:
            groups, rows, windows, run = self.layout
            words = np.ascontiguousarray(words.reshape(groups, -1)[::factor]).ravel()
            layout = (-(-groups // factor), rows, windows, run * factor)
        targets = op.targets(words, Stream(self.stream.width_bits, words.size))
        assert targets is not None
        return Sample(targets[0], below, self.columns * factor, layout)

    def with_words(self, words: Words, width_bits: int) -> Sample:
        """Return other words at the same places."""
        return Sample(words, Stream(width_bits, self.stream.n_words), self.columns, self.layout)


def take_sample(
    words: Words,
    width_bits: int,
    columns: int,
    n_sample: int,
    n_exact: int,
    *,
    kept: NDArray[np.int64] | None = None,
) -> Sample:
    """Sample a region.

    Parameters
    ----------
    words : Words
        The region; a small one is not copied.
    width_bits : int
    columns : int
        Words of a row, 0 or 1 where there are none.
    n_sample : int
        Words to take from a region of more than `n_exact`.
    n_exact : int
    kept : int64 array, optional
        Rows that are sampled as if they were all; the others do not belong to the stream.
    """
    if kept is not None and (kept.size < 8 or kept.size * columns <= max(n_exact, n_sample)):
        words, kept = words.reshape(-1, columns)[kept].reshape(-1), None
    stream = Stream(width_bits, words.size if kept is None else kept.size * columns)
    columns = columns if 1 < columns < stream.n_words else 0
    if stream.n_words <= max(n_exact, n_sample):
        return Sample(words, stream, columns, None)
    rows = stream.n_words // columns if columns else 0
    if rows < 8 or columns < 8:
        run = min(FLAT_WINDOW_WORDS, n_sample)
        starts = spread(n_sample // run, words.size - run)
        return Sample(gathered(words, starts, run), stream, columns, (1, 1, starts.size, run))
    run = min(columns, WINDOW_WORDS)
    windows = min(columns // run, WINDOWS)
    pairs = min(rows // 2, max(1, n_sample // (2 * run * windows)))
    windows = min(columns // run, max(windows, n_sample // (2 * run * pairs)))
    first_rows = spread(pairs, rows // 2 - 1) * 2
    picked_rows = (first_rows[:, None] + np.arange(2)).ravel()
    if kept is not None:
        picked_rows = kept[picked_rows]
    starts = (picked_rows[:, None] * columns + apart(windows, columns, run)).ravel()
    return Sample(gathered(words, starts, run), stream, columns, (pairs, 2, windows, run))


def gathered(words: Words, starts: NDArray[np.int64], run: int) -> Words:
    """Return the `run` words from each of `starts` on."""
    picked = np.empty(starts.size * run, words.dtype)
    gather_runs(words, starts, picked)
    return picked


def apart(count: int, size: int, run: int) -> NDArray[np.int64]:
    """Return where `count` runs start that are evenly spread over `size` words: words of two would seem to repeat."""
    part = size // count
    return np.arange(count) * part + (part - run) // 2


def spread(count: int, last: int) -> NDArray[np.int64]:
    """Return `count` integers from 0 to `last`, evenly spread, the ends left out: first and last rows are special."""
    return (2 * np.arange(count) + 1) * (last + 1) // (2 * count)
