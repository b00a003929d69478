"""The safetensors container: eight bytes of header length, a JSON header, tensor data.

Offsets are never assumed aligned, ordered or gapless.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

import numpy as np
from numpy.typing import NDArray

from operators.words import DTYPES, dtype_of
from pipeline.segments.base import (
    GROUP_BYTES,
    SMALL_BYTES,
    Hold,
    Layout,
    LayoutError,
    Segment,
    byte_segments,
)
from pipeline.segments.header import Header, Tensor, short

MIN_COLUMNS = 32
"""Trailing dimensions join into a row until it has this many elements: the 3 x 3 of a kernel is no row."""
TURN_BYTES = 942_480
"""A multiple of the blocks in which weights of few bits are packed (32 bytes after a scale of 2, for one): a piece of a
row ends with a block, so that all pieces look alike."""


def layout(header: Header, data_begin: int, n_bytes: int, segment_bytes: int, hold: Hold = tuple) -> Layout:
    """Cut a file of `n_bytes` along the tensors of its header.

    Raises
    ------
    LayoutError
        The data do not fit the header: `truncated` or `overlap`.
    """
    used = np.flatnonzero(header.ends > header.begins)
    order = used[np.lexsort((header.ends[used], header.begins[used]))]
    last = int(header.ends.max(initial=data_begin))
    if last > n_bytes:
        raise LayoutError("truncated", f"{n_bytes} bytes of {last}")
    begins, ends = header.begins[order], header.ends[order]
    clash = np.flatnonzero(begins[1:] < ends[:-1])
    if clash.size:
        pair = (short(header[int(order[clash[0] + step])].name) for step in (0, 1))
        raise LayoutError("overlap", f"{' and '.join(pair)} share bytes")
    faults = []
    if order.size and (begins[0] > data_begin or np.any(begins[1:] > ends[:-1])):
        faults.append(LayoutError("hole", "bytes between tensors belong to none"))
    if last < n_bytes:
        faults.append(LayoutError("trailing_bytes", f"{n_bytes - last} bytes after the last tensor"))
    unknown = sorted(name for name in header.dtype_names if name not in DTYPES)
    if unknown:
        faults.append(LayoutError("unknown_dtype", f"{', '.join(map(short, unknown[:8]))}: coded as bytes"))
    first, *rest = byte_segments(0, data_begin, segment_bytes)
    segments = chain(
        (replace(first, n_tensors=len(header) - order.size), *rest),
        _data_segments(header, order, data_begin, segment_bytes),
        byte_segments(last, n_bytes, segment_bytes),
    )
    return Layout(
        "safetensors",
        faults[0].reason if faults else None,
        "; ".join(fault.detail for fault in faults),
        hold(segments),
    )


def _data_segments(header: Header, order: NDArray[np.int64], position: int, segment_bytes: int) -> Iterator[Segment]:
    """Yield the segments of tensors and of gaps between them, in order of offset."""
    group = _Group(header, min(GROUP_BYTES, segment_bytes))
    for index, begin, end in _triples(header, order):
        if begin > position:
            yield from group.flush()
            yield from byte_segments(position, begin, segment_bytes)
        position = end
        if end - begin < min(SMALL_BYTES, segment_bytes):
            yield from group.add(index, begin, end)
        else:
            yield from group.flush()
            yield from tensor_segments(header[index], segment_bytes)
    yield from group.flush()


def _triples(header: Header, order: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    for start in range(0, order.size, 1 << 16):  # Python integers of a slice at a time
        part = order[start : start + (1 << 16)]
        yield from zip(part.tolist(), header.begins[part].tolist(), header.ends[part].tolist(), strict=True)


@dataclass(slots=True)
class _Run:
    """Small tensors of one dtype side by side: the last one's index, how many, and their range."""

    index: int
    dtype: int
    n_tensors: int
    begin: int
    end: int


class _Group:
    """Gathers small tensors that lie side by side.

    A run of one dtype that is large enough is a segment of that dtype. Shorter runs share a segment, of
    bytes where their dtypes differ.
    """

    def __init__(self, header: Header, max_bytes: int) -> None:
        self._header = header
        self._max_bytes = max_bytes
        self._run: _Run | None = None
        self._mixed: list[_Run] = []

    def add(self, index: int, begin: int, end: int) -> Iterator[Segment]:
        """Take the next small tensor; yield what is complete."""
        dtype, run = int(self._header.dtypes[index]), self._run
        if run and run.dtype == dtype and end - run.begin <= self._max_bytes:
            run.index, run.end = index, end
            run.n_tensors += 1
            return
        yield from self._close_run()
        self._run = _Run(index, dtype, 1, begin, end)

    def flush(self) -> Iterator[Segment]:
        """Yield all that is left."""
        yield from self._close_run()
        yield from self._close_mixed()

    def _close_run(self) -> Iterator[Segment]:
        run, self._run = self._run, None
        if run is None:
            return
        if run.end - run.begin >= SMALL_BYTES:
            yield from self._close_mixed()
            yield self._segment([run])
            return
        if self._mixed and run.end - self._mixed[0].begin > self._max_bytes:
            yield from self._close_mixed()
        self._mixed.append(run)

    def _close_mixed(self) -> Iterator[Segment]:
        if self._mixed:
            yield self._segment(self._mixed)
            self._mixed = []

    def _segment(self, runs: list[_Run]) -> Segment:
        begin, end = runs[0].begin, runs[-1].end
        if len(runs) == 1 and runs[0].n_tensors == 1:
            return next(tensor_segments(self._header[runs[0].index], end - begin))
        names = {self._header.dtype_names[run.dtype] for run in runs}
        dtype = names.pop() if len(names) == 1 else None
        n_tensors = sum(run.n_tensors for run in runs)
        return Segment(begin, end - begin, None, dtype, None, 0, 1, _n_words(end - begin, dtype), n_tensors)


def _n_words(n_bytes: int, dtype: str | None) -> int:
    return n_bytes * 8 // dtype_of(dtype).word_bits


def row_elements(shape: Iterable[int]) -> int:
    """Return the elements of a row: the last dimensions, joined until they are `MIN_COLUMNS` or all but one.

    A vector is one row.
    """
    sizes = tuple(shape)
    columns = 1
    for size in reversed(sizes[1:]):
        columns *= size
        if columns >= MIN_COLUMNS:
            break
    return columns if len(sizes) > 1 else prod(sizes)


def tensor_segments(tensor: Tensor, segment_bytes: int) -> Iterator[Segment]:
    """Cut one tensor at whole rows, evenly; a row longer than a segment is cut by itself, at whole turns of blocks.

    A tensor whose rows are no whole bytes, or whose dtype is unknown, is one row of bytes.
    """
    n_bytes = tensor.end - tensor.begin
    known = DTYPES.get(tensor.dtype)
    row_bits = row_elements(tensor.shape) * known.element_bits if known else 1
    row_bytes = row_bits // 8 if row_bits % 8 == 0 else n_bytes
    if row_bytes <= segment_bytes:
        n_rows = n_bytes // row_bytes
        n_pieces = -(-n_rows // (segment_bytes // row_bytes))
        step = -(-n_rows // n_pieces)
        for row in range(0, n_rows, step):
            rows = min(step, n_rows - row)
            yield _piece(tensor, row * row_bytes, rows * row_bytes, row, rows)
        return
    most = segment_bytes // TURN_BYTES * TURN_BYTES or segment_bytes
    for row in range(n_bytes // row_bytes):
        for offset in range(0, row_bytes, most):
            yield _piece(tensor, row * row_bytes + offset, min(most, row_bytes - offset), row, 1)


def _piece(tensor: Tensor, offset: int, n_bytes: int, row_start: int, n_rows: int) -> Segment:
    row_words = _n_words(n_bytes, tensor.dtype) // n_rows
    return Segment(
        tensor.begin + offset,
        n_bytes,
        tensor.name,
        tensor.dtype,
        tensor.shape,
        row_start,
        n_rows,
        row_words,
        n_tensors=int(offset == 0),
    )
