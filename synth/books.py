"""Learning of fixed codebooks, and the choice of one from a sample.

A family is a few books for one kind of words. It is learned from counts of samples: of books made for samples, that
is taken next which saves most bits of all of them, and then books and samples are brought to fit by turns, each
sample choosing a book and each book being made for those that chose it. All of it is integers.

Source: Agrawal et al., arXiv 2601.10673, where one book codes one kind of tensor. Families are learned as in facility
location, greedily (Cornuejols, Fisher and Nemhauser, 1977), then as by Lloyd; shifts and escapes are ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from operators.books import ID_BYTES, MAX_LENGTH, Book, Books
from operators.errors import FormatError
from operators.kernels.fixed import choose_book, code_lengths, count_sample
from operators.kernels.huffman import limited_lengths
from operators.wire import Reader, put_varint
from operators.words import Bytes, Words

RUNS, RUN_WORDS = 64, 64
"""A sample is 64 runs of 64 words."""
WIDE_RUN_WORDS = 256
"""Of words that have no rare values, whole bytes of integers, a sample is four times as large."""
SHIPPED = Path(__file__).with_name("books.json")
SET_MAGIC: Final = b"BRVS"
MAX_FAMILIES, MAX_BOOKS, MAX_NAME, MAX_BOOK_BYTES = 256, 256, 64, 1 << 12
REFINEMENTS = 4
CANDIDATES = 256
"""Samples of which books are made that a family may begin with."""
LEAST_GAIN_PPM = 100
"""A family grows while one more book saves this much."""
WHOLE_BITS_Q8 = 10
"""What codes of whole bits lose for each word, about: 0.04 bits."""
RARE_BITS = range(8, 16)
"""A word outside the run of words with codes is rarer than ``2**-bits``; which bits, the cost decides."""

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choice:
    """A book for some words.

    Attributes
    ----------
    index : int
        Of the book in its family.
    book : Book
    shift : int
    sample_words : int
    bits : int
        That the sample takes.
    escapes : int
        Words of the sample without a code.
    excess_q8 : int
        What it takes beyond a code of its own, about, in 1/256 bit: of words like those that the book was made
        from 0, but for noise.
    """

    index: int
    book: Book
    shift: int
    sample_words: int
    bits: int
    escapes: int
    excess_q8: int

    @property
    def regret_ppm(self) -> int:
        """Excess in millionths of the coded sample."""
        return self.excess_q8 * 1_000_000 // max(1, self.bits << 8)


@dataclass(frozen=True)
class Family:
    """Books for words of one kind.

    Parameters
    ----------
    books : tuple of Book
        Of one width.
    step : int
        Words may be those of the books plus a multiple of this: what a factor of 2 adds to words with exponents. 0
        where they may not.
    """

    books: tuple[Book, ...]
    step: int

    @cached_property
    def _costs(self) -> NDArray[np.int32]:
        return np.stack([book.costs for book in self.books])

    @cached_property
    def _means(self) -> Counts:
        return np.array([book.mean for book in self.books], np.int64)

    @cached_property
    def _runs(self) -> Counts:
        return np.array([(book.first, len(book.lengths)) for book in self.books], np.int64)

    def measure(self, counts: Counts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return bits and shifts, shape (n, n_books), of samples with these counts, shape (n, 2**width_bits)."""
        bits = np.empty((len(counts), len(self.books)), np.int64)
        shifts = np.empty_like(bits)
        code_lengths(counts, self._costs, self._means, self.step, bits, shifts)
        return bits, shifts

    def choose(self, counts: Counts) -> Choice:
        """Return the book that takes the fewest bits of words with these counts, shape (2**width_bits,)."""
        found = np.empty(7, np.int64)
        choose_book(counts, self._costs, self._means, self._runs, self.step, found)
        index, shift, bits, n_words, n_distinct, entropy_q16, escapes = found.tolist()
        # A sample's own entropy is too low by (m - 1) / (2 ln 2) bits, about 0.72 for each word that occurs; and a
        # Huffman code takes whole bits, one at least.
        own_q8 = max((entropy_q16 >> 8) + 185 * max(0, n_distinct - 1) + WHOLE_BITS_Q8 * n_words, n_words << 8)
        return Choice(index, self.books[index], shift, n_words, bits, escapes, (bits << 8) - own_q8)


def fit(counts: Counts) -> Book:
    """Return the book that codes words with these counts in the fewest bits.

    Parameters
    ----------
    counts : int64 array, shape (2**width_bits,)
        Not all zero; their sum below 2**40.
    """
    tried = dict.fromkeys(_run(counts, bits) for bits in RARE_BITS)
    books = [_fit_run(counts, *run) for run in tried if run[1] < 1 << MAX_LENGTH]
    return min(books, key=lambda book: int(counts @ book.costs))


def learn(samples: Sequence[Counts], n_books: int, *, step: int = 0) -> Family:
    """Return a family of up to `n_books` books for words like those of the samples.

    Parameters
    ----------
    samples : sequence of int64 arrays, shape (2**width_bits,)
        Counts of words of one tensor each, none without words. Each word counts alike.
    n_books : int
    step : int
    """
    parts = np.stack(samples)
    family = Family(_spread(parts, n_books, step), step)
    for _ in range(REFINEMENTS):
        bits, shifts = family.measure(parts)
        choices = bits.argmin(axis=1)
        books = [_refit(parts, shifts[:, k], choices == k, book) for k, book in enumerate(family.books)]
        family = Family(tuple(dict.fromkeys(books)), step)
    return family


def _spread(parts: NDArray[np.int64], n_books: int, step: int) -> tuple[Book, ...]:
    """Return the books, of one for all samples and some made for one each, that take the fewest bits together."""
    some = parts[:: -(-len(parts) // CANDIDATES)]
    books = tuple(dict.fromkeys([fit(parts.sum(axis=0)), *map(fit, some)]))
    bits, _ = Family(books, step).measure(parts)
    chosen = [int(bits.sum(axis=0).argmin())]
    taken = bits[:, chosen[0]]
    while len(chosen) < n_books:
        totals = np.minimum(bits, taken[:, np.newaxis]).sum(axis=0)
        best, total = int(totals.argmin()), int(taken.sum())
        if (total - int(totals[best])) * 1_000_000 <= total * LEAST_GAIN_PPM:
            break
        chosen.append(best)
        taken = np.minimum(taken, bits[:, best])
    return tuple(books[k] for k in chosen)


def _refit(parts: NDArray[np.int64], shifts: NDArray[np.int64], has_chosen: NDArray[np.bool_], book: Book) -> Book:
    """Return the best book for the samples that chose one, each shifted as it was chosen."""
    own = [np.roll(part, -int(shift)) for part, shift in zip(parts[has_chosen], shifts[has_chosen], strict=True)]
    return fit(np.sum(own, axis=0)) if own else book


def _run(counts: Counts, rare_bits: int) -> tuple[int, int]:
    """Return the first and the number of the words outside the longest run of rare ones."""
    size = counts.size
    is_rare = counts << rare_bits <= int(counts.sum())
    is_rare[int(counts.argmin())] = True  # one has no code
    kept = np.flatnonzero(~is_rare)
    if not kept.size:
        return int(counts.argmax()), 1
    gaps = np.diff(kept, append=kept[0] + size)
    widest = int(gaps.argmax())
    first = int(kept[(widest + 1) % kept.size])
    return first, size - int(gaps[widest]) + 1


def _fit_run(counts: Counts, first: int, n_words: int) -> Book:
    """Return the best book with codes for `n_words` words from `first` on."""
    size = counts.size
    run = counts[(first + np.arange(n_words)) % size]
    total = int(counts.sum())
    weights = np.maximum(np.append(run, total - int(run.sum())), max(1, total >> 16))
    order = np.argsort(weights, kind="stable")
    by_weight, lengths = np.empty(order.size, np.int64), np.empty(order.size, np.int64)
    limited_lengths(weights[order], MAX_LENGTH, by_weight)
    lengths[order] = by_weight
    return Book(size.bit_length() - 1, first, lengths[:-1].astype(np.uint8).tobytes(), int(lengths[-1]))


# -- the kinds of words that there are -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """Which byte of a word is coded by a book; the others stand as they are.

    Attributes
    ----------
    number : int
        As in a message, append-only.
    word_bytes : int
    rotate : int
        Bits that a word is rotated left by, before its highest byte is coded: 1 takes the sign away from the exponent.
    step : int
        As for `Family`.
    run_words : int
    """

    number: int
    word_bytes: int
    rotate: int
    step: int
    run_words: int = RUN_WORDS


LAYOUTS: Mapping[str, Layout] = {
    "F32": Layout(1, 4, 1, 1),
    "BF16": Layout(2, 2, 1, 1),
    "F16": Layout(3, 2, 1, 8),
    "F8_E4M3": Layout(4, 1, 1, 16),
    "F8_E5M2": Layout(5, 1, 1, 8),
    "I8": Layout(6, 1, 0, 0, WIDE_RUN_WORDS),
    "U8": Layout(7, 1, 0, 0, WIDE_RUN_WORDS),
    "F4": Layout(8, 1, 0, 0, WIDE_RUN_WORDS),
}
"""By dtype of safetensors. Words of 4 bits are coded in pairs, as bytes: packed integers are U8."""


def sample_counts(words: Words, layout: Layout) -> Counts:
    """Return how often each byte occurs in a sample of the coded bytes of `words`, shape (n,); shape (256,)."""
    counts = np.zeros(256, np.int64)
    count_sample(words, layout.rotate, RUNS, layout.run_words, counts)
    return counts


class CodebookSet:
    """Families of books by what they code: a dtype, and a kind of tensor such as ``weight``, ``grad``, ``activation``.

    Parameters
    ----------
    families : mapping of (str, str) to Family
        By dtype and kind.
    """

    def __init__(self, families: Mapping[tuple[str, str], Family]) -> None:
        self.families = {key: families[key] for key in sorted(families)}
        self.books = tuple(book for family in self.families.values() for book in family.books)
        sizes = (len(family.books) for family in self.families.values())
        self._first = dict(zip(self.families, accumulate(sizes, initial=0), strict=False))

    @classmethod
    def learn(cls, samples: Mapping[tuple[str, str], Sequence[Counts]], *, k: int = 8) -> CodebookSet:
        """Return up to `k` books for each dtype and kind, from counts of coded planes (`sample_counts`)."""
        families = {}
        for dtype, kind in sorted(samples):
            layout = LAYOUTS[dtype]
            counts = [one for one in samples[dtype, kind] if one.any()]
            if counts:
                families[dtype, kind] = learn(counts, k, step=layout.step)
        return cls(families)

    @classmethod
    def shipped(cls) -> CodebookSet:
        """Return the books that come with the package: of weights, in the dtypes of `LAYOUTS`."""
        return cls.load(bytes.fromhex(json.loads(SHIPPED.read_bytes())["books"]))

    def dump(self, provenance: Sequence[Mapping[str, str]]) -> bytes:
        """Return the set as the package keeps it: JSON, with what it was learned from."""
        return json.dumps({"provenance": list(provenance), "books": self.save().hex()}, indent=1).encode() + b"\n"

    @cached_property
    def id(self) -> bytes:
        """First 8 bytes of the digest of the set as it is stored."""
        return blake3(self.save()).digest(ID_BYTES)

    def choose(self, dtype: str, kind: str, counts: Counts) -> tuple[int, Choice] | None:
        """Return the number of a book in the set for words of which `counts` were sampled; None without a family."""
        family = self.families.get((dtype, kind))
        if family is None:
            return None
        choice = family.choose(counts)
        return self._first[dtype, kind] + choice.index, choice

    def save(self) -> bytes:
        """Return the set as it is stored."""
        out = bytearray(SET_MAGIC)
        put_varint(out, len(self.families))
        for (dtype, kind), family in self.families.items():
            for text in (dtype.encode(), kind.encode()):
                put_varint(out, len(text))
                out += text
            put_varint(out, len(family.books))
            for book in family.books:
                data = book.to_bytes()
                put_varint(out, len(data))
                out += book.id + data
        return bytes(out)

    @classmethod
    def load(cls, data: Bytes) -> CodebookSet:
        """Inverse of `save`. Raises FormatError for anything else, and for a book that is not the one of its id."""
        reader = Reader(data)
        if bytes(reader.take(len(SET_MAGIC))) != SET_MAGIC:
            raise FormatError(f"a set of codebooks ({SET_MAGIC!r})", "something else", "@0")
        families = {}
        for _ in range(reader.varint(MAX_FAMILIES)):
            dtype, kind = (str(reader.take(reader.varint(MAX_NAME)), "ascii", "replace") for _ in range(2))
            if dtype not in LAYOUTS:
                raise FormatError(f"one of {', '.join(LAYOUTS)}", dtype, f"@{reader.position}")
            books = Books()
            for _ in range(reader.varint(MAX_BOOKS)):
                size = reader.varint(MAX_BOOK_BYTES)
                book_id = bytes(reader.take(ID_BYTES))
                books.add(book_id, reader.take(size))
            if not len(books) or any(book.width_bits != 8 for book in books):
                raise FormatError("books of bytes", "others", f"{dtype} {kind}")
            layout = LAYOUTS[dtype]
            families[dtype, kind] = Family(tuple(books), layout.step)
        reader.end()
        found = cls(families)
        if found.save() != bytes(data):
            raise FormatError("families in order, books without doubles", "another form of the set", "codebooks")
        return found
