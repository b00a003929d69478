"""Programs at work: words to records, records to words.

`encode` is the only emitter: what it writes is what the search weighs, so a cost cannot drift from the
bytes. `execute` is the only interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, Conditioned, Source, Stream
from operators.books import Books
from operators.check import check
from operators.errors import DigestError, FormatError
from operators.fields import encode_small, execute_small
from operators.kernels.equal import equal_bytes
from operators.program import Literal, Node
from operators.record import Record, record_head, take_record
from operators.words import Bytes, Words, container
from operators.writing import Payloads, write

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
    body_bytes : int
        Of all payloads.
    """

    record: Bytes
    stream: Stream
    program: Node
    literals: tuple[tuple[Stream, int], ...]
    body_bytes: int


def digest_of(data: Bytes | Words) -> bytes:
    """Return the BLAKE3-256 digest of `data`."""
    return blake3(bytes_of(data)).digest()


def bytes_of(data: Bytes | Words) -> memoryview:
    """View `data` as bytes; shares its memory."""
    if not len(data):
        return memoryview(b"")  # an empty view cannot be cast
    return (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")


def encode(
    program: Node,
    words: Words,
    digest: bytes | None = None,
    *,
    out: NDArray[np.uint8] | None = None,
    books: Books | None = None,
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
    books : Books, optional
        Codebooks that `program` may name.

    Returns
    -------
    Encoded or None
        None where `program` cannot produce `words`, or a conditioned literal would be larger than they are.

    Raises
    ------
    FormatError, LimitError
        `program` is ill-typed for `words`, or needs more than the format allows with the encodings that were chosen.
    UnsupportedError
        It names a codebook that is not among `books`.
    """
    digest = digest or digest_of(words)
    small = encode_small(program, words, digest, out, books)
    if small is not None:
        return Encoded(*small)
    stream = Stream(words.dtype.itemsize * 8, words.size)
    check(program, stream)
    payloads = Payloads(out, program, stream, books)
    end = write(program, words, stream, payloads.first, payloads)
    if end < 0:
        return None
    coded = program.with_literals(iter(payloads.literals))
    check(coded, stream)  # the encodings that were chosen need memory too
    head = record_head(stream, coded, digest, [n_bytes for _, n_bytes in payloads.sizes])
    first = payloads.first - len(head)
    payloads.data[first : payloads.first] = np.frombuffer(head, np.uint8)
    return Encoded(payloads.data[first:end].data, stream, coded, tuple(payloads.sizes), end - payloads.first)


def execute(
    record: Bytes,
    books: Books | None = None,
    *,
    n_bytes: int | None = None,
    digest: bytes | None = None,
    out: NDArray[np.uint8] | None = None,
    expected: Bytes | Words | None = None,
) -> Words:
    """Restore the words of a record.

    Parameters
    ----------
    record : bytes-like
        One whole record. Read only.
    books : Books, optional
        Codebooks that the record may name.
    n_bytes : int, optional
        What the manifest promises; anything else is refused before allocation.
    digest : bytes, optional
        BLAKE3 of the decoded bytes that the manifest promises, beside that of the record's header.
    out : uint8 array, shape (n_bytes,), optional
        Caller's buffer, aligned for words of 64 bits, exactly as long as the decoded bytes. By default a
        new array.
    expected : bytes-like or Words, optional
        The decoded bytes, where the caller has them and their digest: compared, which is faster than hashing.

    Returns
    -------
    Words
        A view of `out`, or the new array.

    Raises
    ------
    DamageError
        The record is malformed, over a limit, or decodes to words of another digest, or to others than `expected`.
    UnsupportedError
        The record needs a newer reader, or a codebook that is not among `books`.
    """
    wanted = None if expected is None else np.frombuffer(bytes_of(expected), np.uint8)
    small = execute_small(record, n_bytes, out, books)
    if small is not None:
        words, stored = small
        is_right = digest_of(words) == stored if wanted is None else _is_same(words, wanted)
        if is_right and digest in (None, stored):
            return words
    parsed = take_record(record)
    stream = parsed.stream
    if n_bytes is not None and stream.n_bytes != n_bytes:
        raise FormatError(f"a record of {n_bytes} decoded bytes", str(stream.n_bytes))
    if digest is not None and digest != parsed.digest:
        raise DigestError(digest.hex(), parsed.digest.hex(), "record header", "restore this segment from another copy")
    root = open_source(parsed, books)
    if out is not None and out.size != stream.n_bytes:
        raise FormatError(f"a record of {out.size} decoded bytes", str(stream.n_bytes))
    words = stream.empty() if out is None else out.view(container(stream.width_bits))
    hasher, step = blake3(), max(1, words.size) if root.whole else READ_WORDS
    for start in range(0, words.size, step):
        block = words[start : start + step]
        root.read(block)
        if wanted is None:
            hasher.update(bytes_of(block))
        elif not _is_same(block, wanted[start * words.itemsize :][: block.nbytes]):
            raise DigestError("the words that were written", "others", "record", "write this segment anew")
    if wanted is None and hasher.digest() != parsed.digest:
        raise DigestError(parsed.digest.hex(), hasher.hexdigest(), "record", "restore this segment from another copy")
    if wanted is not None and wanted.size != words.nbytes:
        raise FormatError(f"{wanted.size} decoded bytes", str(words.nbytes))
    return words


def _is_same(words: Words, wanted: NDArray[np.uint8]) -> bool:
    found = words.view(np.uint8)
    return found.size == wanted.size and equal_bytes(found, wanted)


def open_source(record: Record, books: Books | None = None) -> Source:
    """Check the program of `record` and return the source of its words.

    Parameters
    ----------
    record : Record
    books : Books, optional
        Codebooks that its literals may name.
    """
    streams = check(record.program, record.stream)
    return _open(record.program, record.stream, zip(record.payloads, streams, strict=True), books)


def _open(node: Node, stream: Stream, leaves: Iterator[tuple[memoryview, Stream]], books: Books | None) -> Source:
    """Return the source of a node; `leaves` yields the payloads of its literals, with their types, in pre-order."""
    if isinstance(node.op, Literal):
        payload, leaf_stream = next(leaves)
        coder = node.op.coder
        if isinstance(coder, Conditioned):
            return coder.source(payload, leaf_stream, books)
        return coder.source(payload, leaf_stream)
    children = zip(node.children, node.op.children(stream), strict=True)
    return node.op.source([_open(child, child_stream, leaves, books) for child, child_stream in children], stream)
