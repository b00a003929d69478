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
from typing import Final, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from operators.books import ID_BYTES, MAX_LENGTH, Book, Books
from operators.errors import FormatError
from operators.kernels.choice import choose_book, code_lengths
from operators.kernels.huffman import limited_lengths
from operators.wire import Reader, put_varint
from operators.words import Bytes, Words

RUNS, RUN_WORDS = 64, 64
"""A sample is 64 runs of 64 words."""
WIDE_RUN_WORDS = 256
"""Of words of which all bits are coded a sample is four times as large: more of them differ."""
MAX_PARTS, LEAST_PART_WORDS = 16, 1 << 13
"""Parts of a tensor that may have books of their own, and the words of the smallest."""
PART_RUNS = 16
"""A sample of a part has as many runs."""
LEAST_PARTS_GAIN_PPM = 5_000
SHIPPED = Path(__file__).with_name("books.json")
SET_MAGIC: Final = b"BRVS"
MAX_FAMILIES, MAX_BOOKS, MAX_NAME, MAX_BOOK_BYTES = 256, 256, 64, 1 << 12
REFINEMENTS = 4
CANDIDATES = 256
"""Samples of which books are made that a family may begin with."""
LEAST_GAIN_PPM = 50
"""A family grows while one more book saves this much."""
RARE_BITS = range(8, 16)
"""A word outside the run of words with codes is rarer than ``2**-bits``; which bits, the cost decides."""

Counts = NDArray[np.int64]
Tables = tuple[NDArray[np.uint8], NDArray[np.int64], int]
"""What kernels know of books: bits of words, twice in a row; means and runs of words with codes; and the step."""
NO_WORDS = np.empty(0, np.uint8)
NO_TABLES: Tables = np.empty((0, 512), np.uint8), np.empty((0, 3), np.int64), 0


class Choice(NamedTuple):
    """A book for some words.

    Attributes
    ----------
    book : Book
    place : int
        Of the book in its family.
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

    book: Book
    place: int
    shift: int
    sample_words: int
    bits: int
    escapes: int
    excess_q8: int


def regret_ppm(choices: Sequence[Choice]) -> int:
    """Return the excess of books for all parts of some words, in millionths of the coded samples."""
    return sum(one.excess_q8 for one in choices) * 1_000_000 // max(1, sum(one.bits for one in choices) << 8)


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
    def _tables(self) -> Tables:
        costs = np.stack([np.tile(book.costs, 2) for book in self.books]).astype(np.uint8)
        traits = np.array([(book.mean, book.first, len(book.lengths)) for book in self.books], np.int64)
        return costs, traits, self.step

    def measure(self, counts: Counts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return bits and shifts, shape (n, n_books), of samples with these counts, shape (n, 2**width_bits)."""
        bits = np.empty((len(counts), len(self.books)), np.int64)
        shifts = np.empty_like(bits)
        code_lengths(counts, *self._tables, bits, shifts)
        return bits, shifts

    def choose(self, counts: Counts) -> Choice:
        """Return the book that takes the fewest bits of words with these counts, shape (2**width_bits,)."""
        return self._choice(choose_book(NO_WORDS, 0, 0, 0, counts[np.newaxis], *self._tables))

    def choose_of(self, words: Words, rotate: int) -> Choice:
        """Return the book that takes the fewest bits of the highest bits of all `words`, rotated left."""
        counts = np.empty((1, self.books[0].size), np.int64)
        return self._choice(choose_book(words, rotate, 1, words.size, counts, *self._tables))

    def choose_parts(self, samples: Counts) -> list[Choice]:
        """Return books for words of which `take_samples` has returned these counts: one, or one for each part."""
        whole, *parts = map(self.choose, samples)
        return _better(whole, parts)

    def select(self, words: Words, layout: Layout) -> tuple[Counts, list[Choice]]:
        """Return what `take_samples` returns for words, shape (n,), and `choose_parts` for that."""
        counts = np.empty((1, 256), np.int64)
        found = choose_book(words, layout.rotate, RUNS, layout.run_words, counts, *self._tables)
        whole = self._choice(found)
        if found[0]:
            parts = _count_parts(words, layout)
            return np.concatenate((counts, parts)), _better(whole, list(map(self.choose, parts)))
        return counts, [whole]

    def _choice(self, found: Sequence[int]) -> Choice:
        """Return what the kernel has found."""
        return Choice(self.books[found[1]], *found[1:])


def _better(whole: Choice, parts: list[Choice]) -> list[Choice]:
    """Return books for parts where their samples promise that they save `LEAST_PARTS_GAIN_PPM`, or the one for all."""
    n_words, bits = sum(one.sample_words for one in parts), sum(one.bits for one in parts)
    most = whole.bits * n_words * (1_000_000 - LEAST_PARTS_GAIN_PPM)
    return parts if bits * whole.sample_words * 1_000_000 < most else [whole]


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
    "F8_E4M3": Layout(4, 1, 1, 16, WIDE_RUN_WORDS),
    "F8_E5M2": Layout(5, 1, 1, 8, WIDE_RUN_WORDS),
    "I8": Layout(6, 1, 0, 0, WIDE_RUN_WORDS),
    "U8": Layout(7, 1, 0, 0, WIDE_RUN_WORDS),
    "F4": Layout(8, 1, 0, 0, WIDE_RUN_WORDS),
}
"""By dtype of safetensors. Words of 4 bits are coded in pairs, as bytes: packed integers are U8."""


def _count_parts(words: Words, layout: Layout) -> Counts:
    """Return counts of samples of parts that may have books of their own where they are unlike, if there are any."""
    n_parts = min(MAX_PARTS, words.size // LEAST_PART_WORDS) if layout.step else 0
    parts = np.empty((n_parts if n_parts > 1 else 0, 256), np.int64)
    if len(parts):
        choose_book(words, layout.rotate, PART_RUNS, layout.run_words, parts, *NO_TABLES)
    return parts


def take_samples(words: Words, layout: Layout) -> Counts:
    """Return how often each coded byte occurs in runs all over `words`, and where these are unlike in each part.

    Returns
    -------
    int64 array, shape (1 + n_parts, 256)
        `n_parts` is 0 where words are alike everywhere, or few.
    """
    whole = np.empty((1, 256), np.int64)
    is_uneven, *_ = choose_book(words, layout.rotate, RUNS, layout.run_words, whole, *NO_TABLES)
    return np.concatenate((whole, _count_parts(words, layout))) if is_uneven else whole


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
        """Return up to `k` books for each dtype and kind, from counts of coded planes (`take_samples`)."""
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

    def select(self, dtype: str, kind: str, words: Words) -> tuple[Counts, list[tuple[int, Choice]]]:
        """Return samples of words, and the number in the set of a book for them, or of one for each of their parts.

        As `Family.select`; no books without a family.
        """
        family = self.families.get((dtype, kind))
        if family is None:
            return take_samples(words, LAYOUTS[dtype]), []
        samples, choices = family.select(words, LAYOUTS[dtype])
        first = self._first[dtype, kind]
        return samples, [(first + choice.place, choice) for choice in choices]

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
