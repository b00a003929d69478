"""``dictionary[k]``: each word is one of `k` values, given by its index.

Type: ``dictionary[k](b[k], w[n]) : b[n]`` with 0 < k <= 65536 and w the bits of k - 1, at least 1. The first
child gives the values, the second one the indices; an index of `k` or more is damage. A writer gives the
values in ascending order.

Example: ``dictionary[2]`` of 5, 9 and 0, 1, 1 as ``b8[3]`` is 5, 9, 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from operators.base import BLOCK_WORDS, Operator, Source, Stream
from operators.errors import FormatError
from operators.kernels.costing import distinct_words, rank_words
from operators.words import Words, container

MOST_VALUES = 1 << 16


@dataclass(frozen=True, slots=True)
class Dictionary(Operator):
    """Few distinct values."""

    opcode = 13
    name = "dictionary"
    n_values: int

    @property
    def arity(self) -> int:
        return 2

    @property
    def index_bits(self) -> int:
        """Width of an index."""
        return max(1, (self.n_values - 1).bit_length())

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        if not 0 < self.n_values <= MOST_VALUES:
            raise FormatError(f"1 to {MOST_VALUES} values of a dictionary", str(self.n_values))
        return (Stream(stream.width_bits, self.n_values), Stream(self.index_bits, stream.n_words))

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        size = 1 << (2 * min(self.n_values, words.size)).bit_length()
        slots, counts = np.empty(size, np.uint64), np.zeros(size, np.int64)
        if distinct_words(words, self.n_values, slots, counts) != self.n_values:
            return None
        values = np.sort(slots[: self.n_values]).astype(words.dtype)
        counts[:] = 0
        indices = np.empty(words.size, container(self.index_bits))
        rank_words(words, values, slots, counts, indices)
        return values, indices

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        return _DictionarySource(children, self.children(stream))

    def scratch_bytes(self, stream: Stream) -> int:
        return self.children(stream)[0].n_bytes


class _DictionarySource(Source):
    def __init__(self, children: Sequence[Source], streams: tuple[Stream, ...]) -> None:
        self.children = children
        self.streams = streams
        self.values: Words | None = None
        self.indices = np.empty(min(BLOCK_WORDS, streams[1].n_words), container(streams[1].width_bits))

    def read(self, out: Words) -> None:
        if self.values is None:
            self.values = self.streams[0].empty()
            self.children[0].read(self.values)
        for start in range(0, out.size, BLOCK_WORDS):
            block = out[start : start + BLOCK_WORDS]
            indices = self.indices[: block.size]
            self.children[1].read(indices)
            if block.size and int(indices.max()) >= self.values.size:
                raise FormatError(f"an index below {self.values.size}", str(int(indices.max())))
            np.take(self.values, indices, out=block)
