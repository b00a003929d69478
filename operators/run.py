"""Programs at work: words to records, records to words.

`encode` is the only emitter: what it writes is what the search weighs, so a cost cannot drift from the
bytes. `execute` is the only interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, Conditioned, Encoding, Plan, Source, Stream, Writer
from operators.check import check
from operators.errors import DigestError, FormatError, UnsupportedError
from operators.literals.profile import Profiler, choose
from operators.program import Literal, Node
from operators.record import Record, record_head, take_record
from operators.words import Bytes, Words, container

Books = Mapping[bytes, object]
"""Codebooks by id. No encoding of this version uses one."""

READ_WORDS = BLOCK_WORDS
"""Words pulled from the root at once: intermediate words stay in cache."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A record and what it is made of.

    Attributes
    ----------
    record : bytes-like
    stream : Stream
        Type of the words.
    program : Node
        With the encodings that were chosen.
    literals : tuple of (Stream, int)
        Type and payload bytes of each literal, in pre-order.
    """

    record: Bytes
    stream: Stream
    program: Node
    literals: tuple[tuple[Stream, int], ...]

    @property
    def body_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(n_bytes for _, n_bytes in self.literals)


def digest_of(data: Bytes | Words) -> bytes:
    """Return the BLAKE3-256 digest of `data`."""
    return blake3(bytes_of(data)).digest()


def bytes_of(data: Bytes | Words) -> memoryview:
    """View `data` as bytes; shares its memory."""
    if not len(data):
        return memoryview(b"")  # an empty view cannot be cast
    return (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")


def encode(
    program: Node, words: Words, digest: bytes | None = None, *, out: NDArray[np.uint8] | None = None
) -> Encoded | None:
    """Write `words` as a record of `program`.

    Literals without an encoding get the one whose payload is smallest.

    Parameters
    ----------
    program : Node
    words : Words, shape (n,)
        Read only, at most `limits.SEGMENT_BYTES`.
    digest : bytes, optional
        BLAKE3 of the bytes of `words`, where the caller has it already.
    out : uint8 array, optional
        Caller's buffer. The record is a view of it where it is large enough, and then lasts until the
        buffer is used again: fresh memory costs as much as the coding.

    Returns
    -------
    Encoded or None
        None where `program` cannot produce `words`, or a conditioned literal would be larger than they are.

    Raises
    ------
    FormatError, LimitError
        `program` is ill-typed for `words`.
    """
    stream = Stream(words.dtype.itemsize * 8, words.size)
    literals = [literal.op for literal in program.literals() if isinstance(literal.op, Literal)]
    leaves = list(map(_Leaf, check(program, stream).literals, literals))
    by_block = _by_block(program) and words.size > BLOCK_WORDS
    for leaf in leaves:
        # Targets of a whole stream are worth keeping between the passes, those of a block are not.
        leaf.kept = None if by_block else []
    if not _feed(program, words, stream, leaves):
        return None
    chosen = [leaf.plan() for leaf in leaves]
    coded = program.with_literals(iter(chosen))
    digest = digest or digest_of(words)
    # Payloads are written into the record. Room is made for the largest that they can be.
    rooms = [leaf.room for leaf in leaves]
    starts = list(accumulate(rooms, initial=len(record_head(stream, coded, digest, rooms))))
    if out is None or out.size < starts[-1]:
        out = np.empty(starts[-1], np.uint8)
    for leaf, start, room in zip(leaves, starts, rooms, strict=False):
        leaf.start(out[start : start + room])
    if by_block:
        _feed(program, words, stream, leaves)
    sizes = [leaf.finish() for leaf in leaves]
    if min(sizes, default=0) < 0:
        return None
    end = starts[0]
    for start, size in zip(starts, sizes, strict=False):
        if start != end:
            out[end : end + size] = out[start : start + size]
        end += size
    head = record_head(stream, coded, digest, sizes)
    first = starts[0] - len(head)
    out[first : starts[0]] = np.frombuffer(head, np.uint8)
    payloads = tuple((leaf.stream, size) for leaf, size in zip(leaves, sizes, strict=True))
    return Encoded(out[first:end].data, stream, coded, payloads)


def execute(
    record: Bytes,
    books: Books | None = None,
    *,
    n_bytes: int | None = None,
    digest: bytes | None = None,
    out: NDArray[np.uint8] | None = None,
) -> Words:
    """Restore the words of a record.

    Parameters
    ----------
    record : bytes-like
        One whole record. Read only.
    books : mapping, optional
        Codebooks that the record may name.
    n_bytes : int, optional
        What the manifest promises; anything else is refused before allocation.
    digest : bytes, optional
        BLAKE3 of the decoded bytes that the manifest promises, beside that of the record's header.
    out : uint8 array, shape (n_bytes,), optional
        Caller's buffer, aligned for words of 64 bits, exactly as long as the decoded bytes. By default a
        new array.

    Returns
    -------
    Words
        A view of `out`, or the new array.

    Raises
    ------
    DamageError
        The record is malformed, over a limit, or decodes to words of another digest.
    UnsupportedError
        The record needs a newer reader, or a codebook that is not among `books`.
    """
    parsed = take_record(record)
    for book_id in parsed.book_ids:
        if book_id not in (books or {}):
            raise UnsupportedError("the codebooks of the record", f"none with id {book_id.hex()}", "record header")
    stream = parsed.stream
    if n_bytes is not None and stream.n_bytes != n_bytes:
        raise FormatError(f"a record of {n_bytes} decoded bytes", str(stream.n_bytes))
    if digest is not None and digest != parsed.digest:
        raise DigestError(digest.hex(), parsed.digest.hex(), "record header", "restore this segment from another copy")
    root = open_source(parsed)
    if out is not None and out.size != stream.n_bytes:
        raise FormatError(f"a record of {out.size} decoded bytes", str(stream.n_bytes))
    words = stream.empty() if out is None else out.view(container(stream.width_bits))
    hasher = blake3()
    step = max(1, words.size) if root.whole else READ_WORDS
    for start in range(0, words.size, step):
        block = words[start : start + step]
        root.read(block)
        hasher.update(bytes_of(block))
    if hasher.digest() != parsed.digest:
        raise DigestError(parsed.digest.hex(), hasher.hexdigest(), "record", "restore this segment from another copy")
    return words


def open_source(record: Record) -> Source:
    """Check the program of `record` and return the source of its words."""
    streams = check(record.program, record.stream).literals
    leaves = iter(zip(record.payloads, streams, strict=True))

    def open_node(node: Node, stream: Stream) -> Source:
        if isinstance(node.op, Literal):
            payload, leaf_stream = next(leaves)
            return node.op.coder.source(payload, leaf_stream)
        children = node.op.children(stream)
        return node.op.source([open_node(*pair) for pair in zip(node.children, children, strict=True)], stream)

    return open_node(record.program, record.stream)


class _Leaf:
    """One literal on its way to bytes: profiled in a first pass, written in a second.

    One of a conditioned encoding is gathered in the first and written when it ends.
    """

    def __init__(self, stream: Stream, literal: Literal) -> None:
        self.stream = stream
        self.literal = literal
        self.coder: Encoding | Conditioned | None = literal.coder if literal.encoding else None
        self.whole = isinstance(self.coder, Conditioned)
        self.kept: list[Words] | None = None
        self._profiler = None if self.whole else Profiler(stream, literal.encoding)
        self._plan: Plan | None = None
        self._writer: Writer | None = None
        self._out: NDArray[np.uint8] | None = None
        self._gathered: Words | None = None
        self._n_gathered = 0

    @property
    def room(self) -> int:
        """Bytes of the buffer that the payload is written to."""
        return self.stream.n_bytes if self._plan is None else self._plan.room

    def add(self, words: Words) -> None:
        if self.whole:
            self._gather(words)
        elif self._profiler is not None:
            self._profiler.add(words)
            if self.kept is not None:
                self.kept.append(words)
        elif self._writer is not None:
            self._writer.add(words)

    def _gather(self, words: Words) -> None:
        if self._out is not None:
            return  # the second pass: they are all there
        if words.size == self.stream.n_words:
            self._gathered = words
            return
        if self._gathered is None:
            self._gathered = self.stream.empty()
        self._gathered[self._n_gathered : self._n_gathered + words.size] = words
        self._n_gathered += words.size

    def plan(self) -> Literal:
        """End the first pass; return the literal with the encoding that will write."""
        if self._profiler is None:
            return self.literal
        profile = self._profiler.finish()
        self._profiler = None
        if isinstance(self.coder, Encoding):
            self._plan = self.coder.plan(profile)
            if self._plan is None:
                raise FormatError(f"an encoding of {self.stream}", self.literal.encoding)
            return self.literal
        name, self._plan = choose(profile)
        return Literal(name)

    def start(self, out: NDArray[np.uint8]) -> None:
        """Begin the second pass, which writes to `out`."""
        self._out = out
        if self._plan is not None:
            self._writer = self._plan.writer(out)

    def finish(self) -> int:
        """End the second pass; return the bytes of the payload, or -1 where it could not be made."""
        if isinstance(self.coder, Conditioned):
            assert self._out is not None
            return self.coder.write(self.stream.empty() if self._gathered is None else self._gathered, self._out)
        assert self._writer is not None
        for words in self.kept or ():
            self._writer.add(words)
        return len(self._writer.finish())


def _by_block(node: Node) -> bool:
    """Whether the targets of every node below depend on each word alone."""
    return isinstance(node.op, Literal) or (node.op.pointwise and all(map(_by_block, node.children)))


def _blocks(words: Words) -> Iterator[Words]:
    for start in range(0, words.size, BLOCK_WORDS):
        yield words[start : start + BLOCK_WORDS]


def _feed(node: Node, words: Words, stream: Stream, leaves: Sequence[_Leaf]) -> bool:
    """Hand the targets of the literals below `node` to `leaves`; False where `node` cannot produce `words`."""
    if isinstance(node.op, Literal) and leaves[0].whole:
        leaves[0].add(words)
        return True
    if _by_block(node):
        return all(_feed_block(node, block, stream, iter(leaves)) for block in _blocks(words))
    assert not isinstance(node.op, Literal)
    targets = node.op.targets(words, stream)
    if targets is None:
        return False
    first = 0
    for child, target, child_stream in zip(node.children, targets, node.op.children(stream), strict=True):
        count = sum(1 for _ in child.literals())
        if not _feed(child, target, child_stream, leaves[first : first + count]):
            return False
        first += count
    return True


def _feed_block(node: Node, block: Words, stream: Stream, leaves: Iterator[_Leaf]) -> bool:
    if isinstance(node.op, Literal):
        next(leaves).add(block)
        return True
    targets = node.op.targets(block, stream)
    if targets is None:
        return False
    children = node.op.children(stream)
    return all(
        _feed_block(child, target, child_stream, leaves)
        for child, target, child_stream in zip(node.children, targets, children, strict=True)
    )
