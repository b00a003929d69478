"""``partition[row, n_marked, low_bits]``: rows of `row` words, each from one of two children, as a mask says.

The stream is a sequence of rows. The first child has one bit for each of them: the rows whose bit is 0 are those of
the second child, in order, the rows whose bit is 1 those of the third. A mask with another number of ones than
`n_marked` is damage.

A writer marks the rows in which the lowest `low_bits` bits of every word are zero; a reader does not look at
`low_bits`. With all bits it is rows of zeros that are marked (unused tokens), or single words (a moment of an
optimiser); with 16 or 13 bits rows of an F32 matrix that were BF16 or F16, while the others keep their noise.

Type: ``partition[row, n_marked, low_bits](b1[n/row], b[n - row*n_marked], b[row*n_marked]) : b[n]`` with `row` a
divisor of n, 0 < n_marked < n/row and 0 < low_bits <= b.

Example: ``partition[2,1,8]`` of 0, 1, 0 and 5, 6, 7, 8 and 0, 0 as ``b8[6]`` is 5, 6, 0, 0, 7, 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from operators.base import BLOCK_WORDS, Operator, Source, Stream, Target
from operators.errors import FormatError
from operators.kernels.rows import flag_rows, join_rows, join_words, part_rows, part_words
from operators.words import Words, container


@dataclass(frozen=True, slots=True)
class Partition(Operator):
    """Two classes of rows."""

    opcode = 15
    name = "partition"
    row_words: int
    n_marked: int
    low_bits: int

    @property
    def arity(self) -> int:
        return 3

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        row, n_marked = self.row_words, self.n_marked
        if not 0 < row <= stream.n_words or stream.n_words % row:
            raise FormatError(f"a row that divides {stream.n_words} words", str(row))
        n_rows = stream.n_words // row
        if not 0 < n_marked < n_rows:
            raise FormatError(f"some of {n_rows} rows marked", str(n_marked))
        if not 0 < self.low_bits <= stream.width_bits:
            raise FormatError(f"1 to {stream.width_bits} low bits", str(self.low_bits))
        width = stream.width_bits
        return Stream(1, n_rows), Stream(width, (n_rows - n_marked) * row), Stream(width, n_marked * row)

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        targets = self.late_targets(words, stream)
        if targets is None:
            return None
        flags, *rows = targets
        made = [child.empty() for child in self.children(stream)[1:]]
        for target, out in zip(rows, made, strict=True):
            target.source().read(out)
        return flags, *made

    def late_targets(self, words: Words, stream: Stream) -> tuple[Words, _Rows, _Rows] | None:
        flags, n_marked = marks(words, self.row_words, self.low_bits)
        if n_marked != self.n_marked:
            return None
        return flags, _Rows(words, flags, 0, self.row_words), _Rows(words, flags, 1, self.row_words)

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        return _PartitionSource(children, self.row_words, self.children(stream))


def marks(words: Words, row_words: int, low_bits: int) -> tuple[Words, int]:
    """Return the mask of the rows whose words all end in `low_bits` zeros, as bytes, and how many they are."""
    flags = np.empty(words.size // row_words, np.uint8)
    return flags, int(flag_rows(words, row_words, low_bits, flags))


@dataclass(frozen=True, slots=True, eq=False)
class _Rows(Target):
    """The rows of `words` whose flag is `flag`."""

    words: Words
    flags: Words
    flag: int
    row_words: int

    def source(self) -> Source:
        return _RowsSource(self)


class _RowsSource(Source):
    def __init__(self, rows: _Rows) -> None:
        self.rows = rows
        self.first = 0
        """The word, or byte, that has not been looked at yet."""

    def read(self, out: Words) -> None:
        rows = self.rows
        if rows.row_words == 1:
            self.first = part_words(rows.words, rows.flags, rows.flag, self.first, out)
        else:
            row_bytes = rows.row_words * out.itemsize
            data = rows.words.view(np.uint8)
            self.first = part_rows(data, rows.flags, rows.flag, row_bytes, self.first, out.view(np.uint8))


class _PartitionSource(Source):
    def __init__(self, children: Sequence[Source], row_words: int, streams: tuple[Stream, ...]) -> None:
        self.mask, self.plain, self.marked = children
        self.row_words = row_words
        mask, plain, marked = streams
        self.plain_left, self.marked_left = plain.n_words, marked.n_words
        dtype = container(plain.width_bits)
        # One more than is read: the kernel looks one word ahead, and a block may begin and end within a row.
        self.flags = np.empty(min(BLOCK_WORDS, mask.n_words) + 1, np.uint8)
        self.plain_words = np.empty(min(BLOCK_WORDS, plain.n_words) + 1, dtype)
        self.marked_words = np.empty(min(BLOCK_WORDS, marked.n_words) + 1, dtype)
        self.first = 0
        """Words of the row of ``flags[0]`` that have been given already."""

    def read(self, out: Words) -> None:
        for start in range(0, out.size, BLOCK_WORDS):
            self._read_block(out[start : start + BLOCK_WORDS])

    def _read_block(self, out: Words) -> None:
        row, first = self.row_words, self.first
        begun = int(first > 0)
        n_rows = -(-(first + out.size) // row)
        flags = self.flags[:n_rows]
        self.mask.read(flags[begun:])
        after = n_rows * row - first - out.size
        n_marked = int(np.count_nonzero(flags)) * row - first * int(flags[0]) - after * int(flags[-1])
        n_plain = out.size - n_marked
        if n_marked > self.marked_left or n_plain > self.plain_left:
            found = "more" if n_marked > self.marked_left else "fewer"
            raise FormatError("a mask that marks as many rows as there are", found)
        self.marked_left -= n_marked
        self.plain_left -= n_plain
        if n_plain == 0:
            self.marked.read(out)
        elif n_marked == 0:
            self.plain.read(out)
        elif row == 1:
            self.plain.read(self.plain_words[:n_plain])
            self.marked.read(self.marked_words[:n_marked])
            join_words(flags, self.plain_words, self.marked_words, out)
        else:
            size = out.itemsize
            plain = self.plain.take(self.plain_words[:n_plain]).view(np.uint8)
            marked = self.marked.take(self.marked_words[:n_marked]).view(np.uint8)
            join_rows(flags, first * size, row * size, plain, marked, out.view(np.uint8))
        self.first = (row - after) % row
        self.flags[0] = flags[-1]
