"""What programs of the default recipe run, on a few words of each width, so that it is compiled before the first.

A kernel is compiled for types and not for sizes, and kept (`operators.kernels.cache`). `synth.warm` runs this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from operators.books import Book, Books
from operators.fields import MOST_WORDS
from operators.kernels.looks import look
from operators.literals.scaled import Scaled
from operators.literals.scaled_huffman import ScaledHuffman
from operators.ops.partition import Partition
from operators.program import LIT, Literal, Node, parse
from operators.registry import ENCODINGS_BY_NAME
from operators.run import encode, execute
from operators.words import Words

N_WORDS = 256
PROGRAMS = {
    8: ("merge[4,4](lit, lit)", "merge[1,7](lit, lit)", "deal[1,1](lit, lit)", "deal[2,32](lit, lit)", "zigzag(lit)"),
    16: ("merge[5,10,1](lit, lit, lit)", "merge[8,8](lit, lit)", "merge[6,10](lit, lit)"),
    32: (
        "merge[21,10,1](lit, lit, lit)",
        "merge[22,10](lit, lit)",
        "merge[8,8,8,8](lit, lit, lit, lit)",
        "merge[16,16](lit, lit)",
        "merge[8,8,16](lit, lit, lit)",
        "merge[1,15,16](lit, lit, lit)",
        "partition[1,52,32](lit, lit, lit)",
        "partition[2,26,1](lit, lit, lit)",
    ),
    64: ("merge[50,13,1](lit, lit, lit)", "merge[8,8,8,8,8,8,8,8](lit, lit, lit, lit, lit, lit, lit, lit)"),
}
"""Fields that the words of each width are cut into by default, and zeros, rows and turns, as the words below have.

Many words take another path than few."""


def fields(width_bits: int, n_words: int) -> None:
    """Run all encodings and the usual programs on words of a width."""
    words = np.arange(n_words, dtype=f"u{width_bits // 8}") % 5
    look(words, 0)
    # Named, so that also those run that five words in a row would not choose.
    encodings = [Node(Literal(name)) for name in ENCODINGS_BY_NAME]
    for program in (LIT, *encodings, *map(parse, PROGRAMS[width_bits])):
        if n_words > N_WORDS and isinstance(program.op, Partition):
            continue  # of another count of rows, but the same kernels
        if program in encodings and width_bits > 16 and program.op in (Literal("huffman"), Literal("rans")):
            continue
        run(program, words)


def tiles(name: str) -> None:
    """Run a conditioned encoding on words of 8 and 16 bits, and on those of 32 of which it codes the upper halves."""
    for width_bits, fraction_bits, low_bits in ((8, 2, 1), (16, 2, 5)):
        for signed in (0, 1, 2):
            # Exponents around the middle: words that such an encoding makes smaller.
            words = (np.arange(4096) % 7 + 8 << low_bits).astype(f"u{width_bits // 8}")
            run(Node(Literal(name, (16, low_bits, fraction_bits, signed, 2, 2))), words)
    # Above raw halves such words are decoded by a kernel of their own.
    run(parse(f"merge[16,16](raw, {name}[16,5,2,1,2,2])"), words.astype(np.uint32) << 16)


def books() -> None:
    """Run codebooks on words of 8 and 12 bits."""
    for width_bits, book_bits, text in ((8, 8, "{}"), (16, 12, "merge[12,4]({}, lit)")):
        book = Book(book_bits, 0, bytes((1,)), 1)
        words = (np.arange(4096) % 2).astype(f"u{width_bits // 8}")
        run(parse(text.format(f"fixed[{book.number},0]")), words, Books([book]))


def small() -> None:
    """Run programs on few words of all widths, which nearly the same kernels do."""
    for width_bits in PROGRAMS:
        fields(width_bits, N_WORDS)


JOBS: tuple[Callable[[], None], ...] = (
    small,
    partial(tiles, ScaledHuffman.name),
    partial(tiles, Scaled.name),
    *(partial(fields, width_bits, MOST_WORDS + N_WORDS) for width_bits in (16, 32, 8, 64)),
    books,
)
"""All encodings and the usual fields, both ways, in parts that compile few kernels in common, the longest first."""


def run(program: Node, words: Words, known: Books | None = None) -> None:
    """Encode words, decode them, and compare."""
    encoded = encode(program, words, books=known)
    assert encoded is not None, "these programs take these words"
    execute(encoded.record, known, expected=words)
