"""The one interface of the language. Read this page first.

A **stream** has a type ``b[n]``: `n` words of `b` bits. A **program** is a tree (`operators.program`):
inner nodes are `Operator` objects, leaves are `Const` or literals. Types run from the root down:
the type of a stream and the parameters of its operator fix the types of the children, so no length
is ever read from a payload.

An operator states one equation and gives it in both directions:

- `Operator.targets`, used to write: the words that the children must produce so that the operator
  produces `words`, or None if it cannot;
- `Operator.source`, used to restore: given sources of the children, a source of the words.

A **source** is pulled: ``source.read(out)`` fills `out` with the next ``out.size`` words. Restoring a
segment pulls its root block by block, so that intermediate words stay in cache and memory stays
bounded. An operator whose targets depend on each word alone is `pointwise`, and is written block by
block too.

A literal is coded by one of the `Encoding` objects: a first pass over its words gives a `Profile`,
each encoding states from that profile the exact bytes that it needs (`Plan.n_bytes`), the cheapest
writes in a second pass. A `Conditioned` encoding codes each word in the context of others. It has
parameters, which only a search can know, so a program names it or it is not used; and it is given all
words at once.

A new operator or encoding is one file in ``ops/`` or ``literals/``. Being there registers it
(`operators.registry`), and being registered puts it under the round-trip, damage and golden tests.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from operators.errors import FormatError
from operators.words import Bytes, Words, container

if TYPE_CHECKING:
    from operators.books import Books

BLOCK_WORDS = 1 << 17
"""Words of a block: the unit in which large literals are coded and programs are executed."""


@dataclass(frozen=True, slots=True)
class Stream:
    """The type of a stream: `n_words` words of `width_bits` (1 to 64) bits."""

    width_bits: int
    n_words: int

    def empty(self) -> Words:
        """Return uninitialised words of this type."""
        return np.empty(self.n_words, container(self.width_bits))

    @property
    def n_bytes(self) -> int:
        """Bytes of the words in memory, each in its container."""
        return self.n_words * container(self.width_bits).itemsize

    def __str__(self) -> str:
        return f"b{self.width_bits}[{self.n_words}]"


class Source(ABC):
    """Words of one stream, produced in order."""

    whole: ClassVar[bool] = False
    """Whether all words are best read at once: they are not produced in their order."""

    @abstractmethod
    def read(self, out: Words) -> None:
        """Fill `out` with the next ``out.size`` words; the caller owns `out`.

        Raises
        ------
        DamageError
            The payload behind the source is damaged.
        """

    def take(self, scratch: Words) -> Words:
        """Return the next ``scratch.size`` words, read only and only until the next call of this source.

        Parameters
        ----------
        scratch : Words
            The caller's. What is returned is `scratch`, filled, or a view of memory that holds the words already.
        """
        self.read(scratch)
        return scratch

    def take_bytes(self, scratch: Words) -> NDArray[np.uint8]:
        """As `take`, but the bytes of the words, which may lie anywhere."""
        return self.take(scratch).view(np.uint8)


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass."""
    return tuple(field.name for field in fields(kind))


class Parametric(ABC):
    """What has a name and parameters in a program: a frozen dataclass whose fields are the parameters."""

    name: ClassVar[str]
    """As in the text form."""

    @property
    def params(self) -> tuple[int, ...]:
        """Parameters as non-negative integers, in the order of the text and of the wire: the fields."""
        return tuple([getattr(self, name) for name in _names(type(self))])

    @classmethod
    def from_params(cls, params: tuple[int, ...]) -> Self:
        """Inverse of `params`. Raises FormatError for a wrong count; their ranges are checked against a stream."""
        expected = len(_names(cls))
        if len(params) != expected:
            raise FormatError(f"{expected} parameters of {cls.name}", str(len(params)))
        return cls(*params)


class Target(ABC):
    """Words that a child must produce, made as they are read: what goes through in blocks need never lie in memory."""

    @abstractmethod
    def source(self) -> Source:
        """Return a source of the words, from the first one on."""


class Operator(Parametric):
    """One production of the language."""

    opcode: ClassVar[int]
    """1 to 63, append-only: never reused, never renumbered."""
    pointwise: ClassVar[bool] = False
    """Whether word i of each target depends on word i alone."""

    @property
    def arity(self) -> int:
        """Number of children; it depends on the parameters alone."""
        return 1

    @abstractmethod
    def children(self, stream: Stream) -> tuple[Stream, ...]:
        """Return the types of the children of a node that produces `stream`.

        Raises
        ------
        FormatError
            The parameters do not fit `stream`.
        """

    @abstractmethod
    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        """Return what the children must produce, or None where this operator cannot produce `words`.

        Parameters
        ----------
        words : Words, shape (stream.n_words,); a block of it where the operator is pointwise
            Read only. The targets may share its memory.
        """

    def late_targets(self, words: Words, stream: Stream) -> tuple[Words | Target, ...] | None:
        """Return as `targets` does what the children must produce, some of it not made yet."""
        return self.targets(words, stream)

    @abstractmethod
    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        """Return the source of `stream`, given one source per child, in order."""

    def scratch_bytes(self, stream: Stream) -> int:
        """Bytes beyond blocks that `source` holds while it is read, children not counted."""
        return 0


@dataclass(frozen=True, slots=True)
class Profile:
    """What one pass over the words of a literal tells.

    Attributes
    ----------
    stream : Stream
    counts : int64 array, shape (2**width_bits,), or None where a word is wider than 16 bits
        How often each word occurs.
    largest : int
        The largest word, 0 for an empty stream.
    lz_payload : bytes or None
        The whole LZ payload, where a trial on the first block made it worth while.
    live : int64 array, shape (m,), or None
        The words that occur, ascending, where they have been found already.
    """

    stream: Stream
    counts: NDArray[np.int64] | None
    largest: int
    lz_payload: bytes | None = None
    live: NDArray[np.int64] | None = None


class Writer(ABC):
    """Codes the words of one literal, block by block."""

    @abstractmethod
    def add(self, words: Words) -> None:
        """Code the next block: `BLOCK_WORDS` words, fewer only in the last one. `words` is not kept."""

    @abstractmethod
    def finish(self) -> Bytes:
        """Return the payload, at most as long as the plan says: the first bytes of the buffer it was written to."""


class Plan(ABC):
    """One way to code a literal whose profile is known."""

    n_bytes: int
    """Bytes of the payload: exact, or an upper bound that exceeds it by the padding of blocks."""

    @property
    def room(self) -> int:
        """Bytes of the buffer that a writer needs."""
        return self.n_bytes

    @abstractmethod
    def writer(self, out: NDArray[np.uint8] | None = None) -> Writer:
        """Return a writer of the payload.

        Parameters
        ----------
        out : uint8 array, shape (room,), optional
            The caller's buffer, written to from its start on: the record, so that nothing is copied. By
            default a new array.
        """


class Encoding(ABC):
    """How the words of a literal become bytes."""

    code: ClassVar[int]
    """64 to 127, append-only; shares the byte with `Operator.opcode`."""
    name: ClassVar[str]

    @abstractmethod
    def plan(self, profile: Profile) -> Plan | None:
        """Return how this encoding would code the literal, or None where it does not apply."""

    @abstractmethod
    def source(self, payload: memoryview, stream: Stream) -> Source:
        """Return the source of a payload; every table and length in it is checked before use.

        Raises
        ------
        FormatError
            The payload cannot be one of this encoding for `stream`.
        """

    def scratch_bytes(self, stream: Stream) -> int:
        """Bytes beyond blocks, tables and the payload that `source` holds, whatever the payload."""
        return 0


class Conditioned(Parametric):
    """How the words of a literal become bytes, each in the context of others."""

    code: ClassVar[int]
    """64 to 127, append-only; shares the byte with `Operator.opcode`."""

    @abstractmethod
    def check(self, stream: Stream) -> None:
        """Verify that the parameters fit `stream`.

        Raises
        ------
        FormatError
            They do not.
        """

    def room(self, stream: Stream) -> int:
        """Bytes of the buffer that `write` needs."""
        return stream.n_bytes

    @abstractmethod
    def write(self, words: Words, out: NDArray[np.uint8], *, thorough: bool = False, books: Books | None = None) -> int:
        """Code all words of a literal.

        Parameters
        ----------
        words : Words, shape (n,)
            Read only.
        out : uint8 array, shape (at least `room` of them,)
            The caller's buffer, written to from its start on.
        thorough : bool
            Whether the payload may take longer to plan than to code.
        books : Books, optional
            Codebooks that the parameters may name.

        Returns
        -------
        int
            Bytes of the payload, or -1 where it would not be smaller than the words are.

        Raises
        ------
        UnsupportedError
            A codebook is not among `books`.
        """

    @abstractmethod
    def source(self, payload: memoryview, stream: Stream, books: Books | None = None) -> Source:
        """Return the source of a payload; every table and length in it is checked before use.

        Raises
        ------
        FormatError
            The payload cannot be one of this encoding for `stream`.
        UnsupportedError
            A codebook is not among `books`.
        """

    @abstractmethod
    def scratch_bytes(self, stream: Stream) -> int:
        """Bytes beyond blocks and the payload that `source` holds, whatever the payload."""


class WholeSource(Source):
    """A source that decodes all words at once, into the caller's buffer where that takes them all.

    Subclasses give `decode`.
    """

    whole = True
    takes_lows: ClassVar[bool] = False
    """Whether `decode_above` is there, for words of 16 bits."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._position = 0
        self._words: Words | None = None

    @abstractmethod
    def decode(self, out: Words) -> None:
        """Fill `out` with all words of the stream. Raises DamageError."""

    def decode_above(self, lows: NDArray[np.uint8], out: Words) -> None:
        """Fill `out`, words of 32 bits: those of the stream above their lower halves, which are the bytes `lows`."""
        raise NotImplementedError

    def read(self, out: Words) -> None:
        if out.size == self.stream.n_words and not self._position:
            self._position = out.size
            self.decode(out)
        else:
            out[:] = self._next(out.size)

    def take(self, scratch: Words) -> Words:
        return self._next(scratch.size)

    def _next(self, n_words: int) -> Words:
        """Return the next words; all are decoded at the first call, and forgotten with the last."""
        end = self._position + n_words
        if end > self.stream.n_words:
            raise FormatError(f"at most {self.stream.n_words} words", f"a read of {end}")
        if self._words is None:
            self._words = self.stream.empty()
            self.decode(self._words)
        words = self._words[self._position : end]
        self._position = end
        if end == self.stream.n_words:
            self._words = None
        return words


class BlockSource(Source):
    """A source that decodes whole blocks, whatever the sizes it is read in.

    Subclasses give `decode_block`; reads that fall on block boundaries decode into the caller's
    buffer, others go through one block of scratch.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._position = 0
        self._scratch: Words | None = None

    @abstractmethod
    def decode_block(self, index: int, out: Words) -> None:
        """Fill `out` with block `index`, whole."""

    def read(self, out: Words) -> None:
        if self._position + out.size > self.stream.n_words:
            raise FormatError(f"at most {self.stream.n_words} words", f"a read of {self._position + out.size}")
        done = 0
        while done < out.size:
            index, offset = divmod(self._position, BLOCK_WORDS)
            block_words = min(BLOCK_WORDS, self.stream.n_words - index * BLOCK_WORDS)
            if offset == 0 and out.size - done >= block_words:
                self.decode_block(index, out[done : done + block_words])
                taken = block_words
            else:
                if self._scratch is None:
                    self._scratch = np.empty(min(BLOCK_WORDS, self.stream.n_words), container(self.stream.width_bits))
                block = self._scratch[:block_words]
                if offset == 0:
                    self.decode_block(index, block)
                taken = min(block_words - offset, out.size - done)
                out[done : done + taken] = block[offset : offset + taken]
            done += taken
            self._position += taken
