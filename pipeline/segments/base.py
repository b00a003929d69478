"""Segments: contiguous ranges of a source file that together tile it, whatever the file holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

SMALL_BYTES = 4 << 10
"""Tensors below this share a segment with their neighbours: a record costs about a hundred bytes."""
GROUP_BYTES = 1 << 20
"""Largest segment of small tensors: what has to be decoded to read one of them."""

Read: TypeAlias = Callable[[int, int], bytes]
"""``read(offset_bytes, n_bytes)``: exactly these bytes of one pinned object."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous range of one source file.

    A segment of a tensor is `n_rows` rows of `row_words` words of its dtype's word. Where a row is longer
    than a segment may be, the segment is one piece of row `row_start` and `row_words` its length.

    Attributes
    ----------
    offset_bytes, n_bytes : int
        Where in the file. Never empty.
    tensor : str or None
        None for headers, gaps, tails, opaque files, and several small tensors side by side.
    dtype : str or None
        The dtype string of the header, also where `operators.words` does not know it; None for bytes.
        Small tensors side by side have one where it is the same for all of them.
    shape : tuple of int or None
        Of the whole tensor; None where `tensor` is.
    row_start, n_rows, row_words : int
        The segment as rows of a matrix; one row where there is no better view.
    n_tensors : int
        Tensors that begin here; those without bytes count in the header. The sum over a file is exact.
    """

    offset_bytes: int
    n_bytes: int
    tensor: str | None
    dtype: str | None
    shape: tuple[int, ...] | None
    row_start: int
    n_rows: int
    row_words: int
    n_tensors: int = 0

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte after the segment."""
        return self.offset_bytes + self.n_bytes


Hold: TypeAlias = Callable[[Iterable[Segment]], Sequence[Segment]]
"""Makes a sequence of segments as they come."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a file is cut.

    Attributes
    ----------
    format : str
        "safetensors", or "opaque" for anything that is stored as bytes.
    reason : str or None
        The fault that was found, by its stable name; None for a sound file of a known format, and for a
        file that never claimed to be one. A safetensors file with a harmless fault (`hole`,
        `trailing_bytes`, `unknown_dtype`) keeps its format.
    detail : str
        The fault in words, for people.
    segments : sequence of Segment
        In order of offset, tiling the file exactly; none for an empty file.
    """

    format: str
    reason: str | None
    detail: str
    segments: Sequence[Segment]


class LayoutError(Exception):
    """A file is not what it claims to be: its stable reason and a detail. Never leaves `pipeline.segments`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def byte_segments(begin: int, end: int, segment_bytes: int) -> Iterator[Segment]:
    """Cut ``[begin, end)`` of a file into segments of plain bytes."""
    for offset in range(begin, end, segment_bytes):
        n_bytes = min(segment_bytes, end - offset)
        yield Segment(offset, n_bytes, None, None, None, 0, 1, n_bytes)
