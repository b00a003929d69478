"""Small tensors by fixed codebooks: what of their words is coded, the books of a checkpoint, and the one that fits.

The table of a small tensor, and what it costs to know few words too well, is saved by a book that was made from others.
Of floats the exponent is coded with the first bits of the mantissa, as a book can afford a larger alphabet than a table
can; sign and rest stand as they are. Words of 8 bits without an exponent are coded whole.

Source: as `synth.books`. That a book beats an own table below about 128 KiB was measured on public weights.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
from blake3 import blake3

from operators.books import ID_BYTES, MAX_WIDTH_BITS, Book, Books, head_bytes
from operators.kernels.fields import split_field
from operators.literals.fixed import Fixed
from operators.ops.merge import Merge
from operators.program import Literal, Node
from operators.words import Dtype, Words, container, dtype_of
from synth.books import Counts, Family, learn
from synth.options import SearchOptions

MOST_BYTES: Final = 128 << 10
"""Of a tensor, or of its segment, that is tried: above, a table of its own is worth its bytes."""
FRACTION_BITS: Final = 2
"""Bits of the mantissa that are coded; words of 8 bits have all of them coded."""
NAME_BYTES: Final = 4
"""About what a program takes in a record for naming a book and a shift."""
N_BOOKS: Final = 16
"""Most books for one dtype."""
LEAST_SAMPLES, MOST_SAMPLES = 8, 128
"""Tensors of a dtype that are learned from."""


def is_offered(options: SearchOptions) -> bool:
    """Whether books are learned and used."""
    return Fixed.name not in options.disable


@functools.cache
def coded_field(dtype: Dtype) -> tuple[int, int] | None:
    """Return the lowest bit and the bits of the field of a word that a book codes, None of words that have none."""
    if not dtype.exponent_bits:
        return (0, 8) if dtype.word_bits == 8 else None
    fraction_bits = dtype.mantissa_bits if dtype.word_bits == 8 else min(FRACTION_BITS, dtype.mantissa_bits)
    width_bits = min(dtype.exponent_bits + fraction_bits, MAX_WIDTH_BITS)
    return dtype.word_bits - 1 - width_bits, width_bits


def step_of(dtype: Dtype) -> int:
    """Return what a factor of 2 adds to the coded field, 0 without exponents: as `Family.step`."""
    field = coded_field(dtype)
    return 1 << (field[1] - dtype.exponent_bits) if field is not None and dtype.exponent_bits else 0


def counts_of(words: Words, dtype: Dtype) -> Counts | None:
    """Return how often each word of the coded field occurs, or None of words that are not those of `dtype`."""
    field = coded_field(dtype)
    if field is None or not words.size or 8 * words.itemsize != dtype.word_bits:
        return None
    shift, width_bits = field
    coded = np.empty(words.size, container(width_bits))
    split_field(words, shift, width_bits, coded)
    return np.bincount(coded, minlength=1 << width_bits).astype(np.int64, copy=False)


@functools.lru_cache(1 << 12)
def program_of(dtype: Dtype, book: Book, shift: int) -> Node:
    """Return the program that codes the field of words of `dtype` by `book`."""
    field = coded_field(dtype)
    assert field is not None
    low_bits, width_bits = field
    coded = Node(Literal(Fixed.name, (book.number, shift)))
    if width_bits == dtype.word_bits:
        return coded
    plain = Node(Literal("bitpack"))
    below = ((low_bits, plain),) if low_bits else ()
    widths, children = zip(*below, (width_bits, coded), (1, plain), strict=True)
    return Node(Merge(widths), children)


@dataclass(frozen=True, slots=True)
class Booked:
    """A program with a codebook.

    Attributes
    ----------
    program : Node
    book : Book
        The one that it names.
    n_bytes : int
        That its payloads take at least, unless the bits that are not coded are zero.
    """

    program: Node
    book: Book
    n_bytes: int


class Shelf:
    """The books of a run.

    Parameters
    ----------
    books : Books
        With numbers of their own.
    """

    def __init__(self, books: Books) -> None:
        self.books = books
        self._by_width: dict[int, tuple[Book, ...]] = {}
        for book in books:
            self._by_width[book.width_bits] = (*self._by_width.get(book.width_bits, ()), book)
        self._families: dict[Dtype, Family | None] = {}

    def choose(self, words: Words, name: str | None) -> Booked | None:
        """Return what codes small `words` of a dtype in the fewest bytes, None without a book for them.

        Parameters
        ----------
        words : Words, shape (n,)
        name : str or None
            The dtype.
        """
        dtype = dtype_of(name)
        family = self._family(dtype) if 0 < words.nbytes <= MOST_BYTES else None
        if family is None or 8 * words.itemsize != dtype.word_bits:
            return None
        choice = family.choose_of(words, 1 if dtype.exponent_bits else 0)
        rest_bits = (dtype.word_bits - choice.book.width_bits) * words.size
        n_bytes = (choice.bits + rest_bits >> 3) + head_bytes(words.size, choice.bits >> 3)
        return Booked(program_of(dtype, choice.book, choice.shift), choice.book, n_bytes)

    def _family(self, dtype: Dtype) -> Family | None:
        if dtype not in self._families:
            field = coded_field(dtype)
            books = () if field is None else self._by_width.get(field[1], ())
            self._families[dtype] = Family(books, step_of(dtype)) if books else None
        return self._families[dtype]


class Lessons:
    """Counts of small tensors, from which the books of a checkpoint are learned."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[bytes, Counts]] = {}

    def add(self, words: Words, name: str | None) -> None:
        """Take a sample of a small tensor of a dtype; of many those with the lowest digests stay, equal ones once."""
        counts = counts_of(words, dtype_of(name))
        if counts is None:
            return
        known = self._counts.setdefault(name or "", {})
        known[blake3(words.data.cast("B")).digest(ID_BYTES)] = counts
        if len(known) > MOST_SAMPLES:
            del known[max(known)]

    def learn(self) -> Books:
        """Return books for each dtype that has been seen often enough."""
        found: dict[int, Book] = {}
        for name in sorted(self._counts):
            samples = [self._counts[name][digest] for digest in sorted(self._counts[name])]
            if len(samples) >= LEAST_SAMPLES:
                for book in learn(samples, N_BOOKS, step=step_of(dtype_of(name))).books:
                    found.setdefault(book.number, book)  # a second book of one number could not be named
        return Books(found.values())
