"""Records of bit fields: programs that cut the words of one block into fields, written and read in one call.

Nearly all programs of small tensors are trees of ``merge`` over plain literals, and a tree of them is a list of
contiguous bit fields. Such a record takes a few microseconds this way, and half a millisecond by the general path of
`operators.run`, which writes the same bytes and reads the same records. Whatever this one cannot do, or finds
damaged, it leaves to that one: a record that it reads is one that the general path reads to the same words.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, Stream
from operators.check import check
from operators.errors import ArchiveError
from operators.kernels.field_coder import UNDECIDED, decode_fields, encode_fields
from operators.literals.huffman import streams_of
from operators.literals.profile import LARGE_WORDS, RANS_GAIN
from operators.literals.rans import lanes_of
from operators.ops.merge import Merge
from operators.program import Literal, Node
from operators.record import DIGEST_BYTES, RECORD_MAGIC, program_head, take_program_head
from operators.registry import ENCODINGS, ENCODINGS_BY_NAME
from operators.wire import Reader
from operators.words import Bytes, Words, container

_PLAIN = ("", "raw", "bitpack", "huffman", "rans")
_KEPT = 1 << 12
"""Programs, each with a number of words, of which the arrays are kept."""
_NO_DIGEST = bytes(DIGEST_BYTES)
_NOTHING = np.empty(0, np.uint8)

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """A program of bit fields, and what it takes to code a number of words by it.

    Attributes
    ----------
    stream : Stream
        Type of the words, at least one of them and at most a block.
    program : Node
    literals : tuple of Stream
        Types of the fields, the lowest first, which is the order of their payloads.
    shifts, widths, codes : int64 arrays, shape (k,)
        Lowest bit, bits and code of the encoding of each field; 0 is undecided.
    traits : int64 array
        See `operators.kernels.field_coder.encode_fields`.
    head : uint8 array
        The record up to its program and with it.
    places : int64 array, shape (k,)
        Where the codes of the encodings are in `head`.
    """

    stream: Stream
    program: Node
    literals: tuple[Stream, ...]
    shifts: Integers
    widths: Integers
    codes: Integers
    traits: Integers
    head: NDArray[np.uint8]
    places: Integers
    _coded: dict[bytes, Node] = field(default_factory=dict)

    def coded(self, codes: bytes) -> Node:
        """Return the program with the encodings that were chosen, by their codes as int64."""
        program = self._coded.get(codes)
        if program is None:
            names = (Literal(ENCODINGS[code].name) for code in np.frombuffer(codes, np.int64).tolist())
            program = self._coded[codes] = self.program.with_literals(names)
        return program


@functools.lru_cache(maxsize=_KEPT)
def fields_of(program: Node, width_bits: int, n_words: int) -> Fields | None:
    """Return the bit fields of `program` as a producer of words, or None where it is not made of them.

    Parameters
    ----------
    program : Node
    width_bits, n_words : int
        8, 16, 32 or 64 bits; 1 to `BLOCK_WORDS` words.
    """
    stream = Stream(width_bits, n_words)
    if not 0 < n_words <= BLOCK_WORDS:
        return None
    try:
        literals = check(program, stream).literals
    except ArchiveError:
        return None
    names = list(_encodings(program))
    if any(name not in _PLAIN for name in names):
        return None
    # Undecided literals are written as raw ones until they are decided: all take a byte.
    raw = program.with_literals(Literal(name or "raw") for name in names)
    head, places = program_head(stream, raw)
    widths = np.array([literal.width_bits for literal in literals], np.int64)
    codes = np.array([ENCODINGS_BY_NAME[name].code if name else UNDECIDED for name in names], np.int64)
    traits = (streams_of(n_words), lanes_of(n_words), RANS_GAIN if n_words >= LARGE_WORDS else 0)
    return Fields(
        stream, program, literals, np.cumsum(widths) - widths, widths, codes, np.array(traits, np.int64),
        np.frombuffer(head, np.uint8), np.array(places, np.int64),
    )  # fmt: skip


def _encodings(node: Node) -> Iterator[str]:
    """Yield the encodings of the fields; one that is not known where a node is neither a merge nor a literal."""
    if isinstance(node.op, Literal):
        yield node.op.encoding
    elif isinstance(node.op, Merge):
        for child in node.children:
            yield from _encodings(child)
    else:
        yield node.op.name


def payload_bytes(program: Node, words: Words) -> int | None:
    """Return the bytes of all payloads of `program`, or None where only `operators.run.encode` can tell.

    Parameters
    ----------
    program : Node
    words : Words, shape (n,)
        Read only.

    Returns
    -------
    int or None
        As `operators.run.encode` plans them: payloads of Huffman codes and rANS may be a few bytes shorter. None
        where `program` is not made of bit fields, there are no words or more than a block of them, or words repeat
        others, so that LZ has to be tried.
    """
    fields = fields_of(program, 8 * words.itemsize, words.size)
    if fields is None:
        return None
    found = np.empty(2 * fields.codes.size + 1, np.int64)
    if _encode(fields, words, _NO_DIGEST, found, _NOTHING) < 0:
        return None
    return int(found[fields.codes.size : -1].sum())


def encode_small(
    program: Node, words: Words, digest: bytes, out: NDArray[np.uint8] | None
) -> tuple[memoryview, Stream, Node, tuple[tuple[Stream, int], ...]] | None:
    """Return what `operators.run.Encoded` holds, or None where the general path has to write the record.

    Parameters as for `operators.run.encode`.
    """
    fields = fields_of(program, 8 * words.itemsize, words.size)
    if fields is None:
        return None
    k = fields.codes.size
    found = np.empty(2 * k + 1, np.int64)
    room = fields.head.size + fields.stream.n_bytes + 64 * k + DIGEST_BYTES
    if out is None or out.size < room:
        out = np.empty(room, np.uint8)
    first = _encode(fields, words, digest, found, out)
    if first < 0:
        return None
    codes_and_sizes = found.tolist()
    literals = tuple(zip(fields.literals, codes_and_sizes[k:-1], strict=True))
    return out[first : codes_and_sizes[-1]].data, fields.stream, fields.coded(found[:k].tobytes()), literals


def _encode(fields: Fields, words: Words, digest: bytes, found: Integers, out: NDArray[np.uint8]) -> int:
    return encode_fields(
        words.view(np.uint8), words.itemsize, fields.shifts, fields.widths, fields.codes, fields.traits, fields.head,
        fields.places, np.frombuffer(digest, np.uint8), found, out,
    )  # fmt: skip


def execute_small(record: Bytes, n_bytes: int | None, out: NDArray[np.uint8] | None) -> tuple[Words, bytes] | None:
    """Return the words of a record and the digest that they ought to have, or None where it is for the general path.

    Parameters as for `operators.run.execute`. That one reads everything, and says what is wrong with a record.
    """
    buffer = memoryview(record)
    head_bytes = _head_bytes(buffer)
    fields = _read_fields(bytes(buffer[:head_bytes])) if head_bytes else None
    if fields is None:
        return None
    stream = fields.stream
    if (n_bytes is not None and n_bytes != stream.n_bytes) or (out is not None and out.size != stream.n_bytes):
        return None
    words = stream.empty() if out is None else out.view(container(stream.width_bits))
    start = decode_fields(
        np.frombuffer(buffer, np.uint8), head_bytes, DIGEST_BYTES, words.itemsize, fields.shifts, fields.widths,
        fields.codes, fields.traits, words.view(np.uint8),
    )  # fmt: skip
    if start < 0:
        return None
    return words, bytes(buffer[start : start + DIGEST_BYTES])


def _head_bytes(buffer: memoryview) -> int:
    """Return the bytes of a record up to its program and with it, or 0 where it cannot be a small one."""
    at = len(RECORD_MAGIC) + 2
    if len(buffer) < at + 3 + DIGEST_BYTES:
        return 0
    while buffer[at] > 127 and at < len(RECORD_MAGIC) + 5:
        at += 1
    at += 1  # the number of words
    return at + 1 + buffer[at] if buffer[at] < 128 and at + 1 + buffer[at] <= len(buffer) else 0


@functools.lru_cache(maxsize=_KEPT)
def _read_fields(head: bytes) -> Fields | None:
    """Return the fields of a record that begins with `head`, or None where it is not made of them."""
    try:
        stream, program = take_program_head(Reader(head))
    except ArchiveError:
        return None
    fields = fields_of(program, stream.width_bits, stream.n_words)
    return None if fields is None or UNDECIDED in fields.codes or fields.head.tobytes() != head else fields
