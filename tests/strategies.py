"""Hypothesis strategies shared by the tests: words, parameters of operators, checkpoints, damage.

Words come with structure as often as without: most mistakes show on runs, repetitions and edges, and
most operators accept only words that have what they look for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise, product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from operators.base import Conditioned, Operator, Stream
from operators.books import Book, Books
from operators.errors import ArchiveError
from operators.literals.fixed import Fixed
from operators.words import DTYPES, Words, container, mask_of
from tests.checkpoints import Tensor

WIDTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64)
SIZES = (0, 1, 2, 3, 7, 16, 33, 257, 1024)
KINDS = ("random", "constant", "ramp", "periodic", "few", "skewed", "distinct", "edges", "runs")

_LENGTHS = bytes((3, 2, 2, 3, 3, 4, 5, 6))
BOOKS = Books(Book(width_bits, (1 << width_bits) - 2, _LENGTHS, 6) for width_bits in (7, 8, 9, 12))
"""Codebooks of small words and the two largest. Golden records name them."""


def make_words(kind: str, width_bits: int, n_words: int, seed: int) -> Words:
    """Return read-only words of one kind, the same for the same arguments on every machine."""
    rng = np.random.Generator(np.random.PCG64(seed))
    mask = mask_of(width_bits)
    dtype = container(width_bits)

    def uniform(count: int) -> Words:
        return (rng.integers(0, 1 << 64, count, np.uint64, endpoint=False) if count else np.empty(0, np.uint64)) & mask

    if kind == "constant":
        values = np.full(n_words, uniform(1)[0])
    elif kind in ("ramp", "distinct"):
        step = 1 if kind == "distinct" else int(rng.integers(1, 300))
        values = np.arange(n_words, dtype=np.uint64) * np.uint64(step) + uniform(1)[0]
        if kind == "distinct":
            values = rng.permutation(values)
    elif kind == "periodic":
        values = np.resize(uniform(int(rng.integers(1, 12))), n_words)
    elif kind == "few":
        pool = uniform(int(rng.integers(2, 20)))
        values = pool[rng.integers(0, pool.size, n_words)]
    elif kind == "skewed":
        values = np.minimum(rng.geometric(0.3, n_words).astype(np.uint64), np.uint64(mask))
    elif kind == "edges":
        edges = np.array([0, 1, mask, mask >> 1, (mask >> 1) + 1], np.uint64)
        values = edges[rng.integers(0, edges.size, n_words)]
    elif kind == "runs":
        values = np.repeat(uniform(n_words), rng.integers(1, 9, n_words))[:n_words]
    else:
        values = uniform(n_words)
    words = (values & np.uint64(mask)).astype(dtype)
    words.flags.writeable = False
    return words


@dataclass(frozen=True)
class Case:
    """Words with their type; printed so that a failure can be repeated."""

    kind: str
    stream: Stream
    seed: int

    @property
    def words(self) -> Words:
        return make_words(self.kind, self.stream.width_bits, self.stream.n_words, self.seed)


def cases(widths: tuple[int, ...] = WIDTHS, max_words: int = 3000) -> st.SearchStrategy[Case]:
    """Words of any kind."""
    sizes = st.one_of(st.sampled_from(SIZES), st.integers(0, max_words))
    streams = st.builds(Stream, st.sampled_from(widths), sizes)
    return st.builds(Case, st.sampled_from(KINDS), streams, st.integers(0, 1 << 32))


def applications(operator: type[Operator], case: Case) -> Iterator[Operator]:
    """Yield instances of `operator` that can produce the words of `case`, one per choice of parameters tried.

    The choices are what parameters of this language are: nothing, one number that has to do with the words
    (a constant, a count, a distance, a period), several that divide the width or the length, or a row, the number
    of rows that end in zeros, and of zeros.
    """
    words, stream = case.words, case.stream
    for params in _choices(words, stream):
        try:
            op = operator.from_params(params)
            op.children(stream)
        except ArchiveError:
            continue
        if op.targets(words, stream) is not None:
            yield op


def conditions(encoding: type[Conditioned], stream: Stream) -> Iterator[Conditioned]:
    """Yield instances of a conditioned encoding that fit `stream`: every combination of a few small numbers.

    A codebook is one of `BOOKS`.
    """
    if encoding is Fixed:
        numbers = [book.number for book in BOOKS if book.width_bits == stream.width_bits]
        yield from (Fixed(number, shift) for number in numbers for shift in (0, 3, mask_of(stream.width_bits)))
        return
    choices = ((2, 6, 16), (0, 1, 3), (0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 3))
    for params in product(*choices[: len(fields(encoding))]):  # type: ignore[arg-type]
        one = encoding.from_params(params)
        try:
            one.check(stream)
        except ArchiveError:
            continue
        yield one


def _choices(words: Words, stream: Stream) -> list[tuple[int, ...]]:
    numbers = {0, 1, 2, 3, 4, 8, 16, stream.width_bits // 2, stream.width_bits - 1, mask_of(stream.width_bits)}
    numbers |= {stream.n_words // 2, stream.n_words - 1, np.unique(words).size, int(words[0]) if words.size else 0}
    period = next((p for p in range(1, min(words.size, 16)) if np.array_equal(words[p:], words[:-p])), 5)
    numbers |= {period, period + 1}
    divisions = [
        parts
        for total in (stream.width_bits, stream.n_words)
        for cuts in ((1,), (total // 2,), (total // 4, total - 1), tuple(range(8, total, 8))[:8])
        if (parts := tuple(stop - start for start, stop in pairwise((0, *cuts, total)))) and min(parts) > 0
    ]
    divisions += [parts[:-1] for parts in divisions]
    ends = [
        (row, int(((words.reshape(-1, row) & words.dtype.type(mask_of(low))) == 0).all(1).sum()), low)
        for row in (1, 3)
        for low in (1, stream.width_bits)
        if words.size and words.size % row == 0
    ]
    return sorted({(), *((number,) for number in numbers if number >= 0), *divisions, *ends})


def flips(n_bytes: int) -> st.SearchStrategy[tuple[int, int]]:
    """A position in a buffer and the bits to change there."""
    return st.tuples(st.integers(0, n_bytes - 1), st.integers(1, 255))


def damage(data: bytes) -> st.SearchStrategy[bytes]:
    """`data` with some of it flipped, cut off, left out, doubled or overwritten; never `data` itself."""

    def flip(place: tuple[int, int]) -> bytes:
        position, bits = place
        return data[:position] + bytes((data[position] ^ bits,)) + data[position + 1 :]

    positions = st.integers(0, len(data) - 1)
    spans = st.tuples(positions, st.integers(1, 16))
    return st.one_of(
        flips(len(data)).map(flip),
        positions.map(lambda cut: data[:cut]),
        spans.map(lambda span: data[: span[0]] + data[span[0] + span[1] :]),
        spans.map(lambda span: data[: span[0] + span[1]] + data[span[0] :]),
        st.tuples(positions, st.binary(min_size=1, max_size=12)).map(
            lambda patch: data[: patch[0]] + patch[1] + data[patch[0] + len(patch[1]) :]
        ),
        st.binary(min_size=1, max_size=8).map(lambda tail: data + tail),
    ).filter(lambda damaged: damaged != data)


def tensors() -> st.SearchStrategy[Tensor]:
    """A small tensor of any dtype and kind, sometimes empty or without dimensions."""

    @st.composite
    def build(draw: st.DrawFn) -> Tensor:
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
        n_elements = int(np.prod(shape, dtype=np.int64))
        if n_elements * dtype.element_bits % 8:
            shape, n_elements = (*shape, 8), n_elements * 8
        n_words = n_elements * dtype.element_bits // dtype.word_bits
        words = make_words(draw(st.sampled_from(KINDS)), dtype.word_bits, n_words, draw(st.integers(0, 99)))
        return Tensor(dtype.name, shape, words.tobytes())

    return build()


def safetensors_files() -> st.SearchStrategy[bytes]:
    """A well-formed file: any names, metadata or none, any padding of the header."""
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")

    def build(named: dict[str, Tensor], metadata: dict[str, str] | None, padding: int, ascii_only: bool) -> bytes:
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        offset = 0
        for name, tensor in named.items():
            stop = offset + len(tensor.data)
            header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, stop)}
            offset = stop
        text = json.dumps(header, ensure_ascii=ascii_only).encode() + b" " * padding
        return b"".join((len(text).to_bytes(8, "little"), text, *(tensor.data for tensor in named.values())))

    return st.builds(
        build,
        st.dictionaries(names, tensors(), max_size=6),
        st.none() | st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=3),
        st.integers(0, 9),
        st.booleans(),
    )
