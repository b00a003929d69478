"""Records and packs as bytes; FORMAT.md is the specification.

A record is one segment: its header, its program, the digest of its decoded bytes and the payloads of
its literals. It decodes from itself plus the codebooks that its program names. A pack is an object that
holds records one after the other, and at its end an index of them and the codebooks that they name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from operators import limits
from operators.base import Stream
from operators.errors import FormatError, LimitError, UnsupportedError
from operators.program import Node, put_program, take_program
from operators.wire import Reader, put_varint
from operators.words import Bytes

FORMAT_VERSION = 0
"""Version of record and pack; 0 is not frozen yet."""
WRITER_REVISION = 8
"""Grows whenever the same input and recipe may give other bytes; part of the recipe's digest."""
RECORD_MAGIC = b"BRVr"
PACK_MAGIC = b"BRVP"
PACK_END_MAGIC = b"BRVE"
PACK_HEADER_BYTES = 8
PACK_FOOTER_BYTES = 20
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Record:
    """A parsed record; payloads share the memory of the buffer it was read from."""

    stream: Stream
    program: Node
    digest: bytes
    payloads: tuple[memoryview, ...]


def record_head(stream: Stream, program: Node, digest: bytes, sizes: Sequence[int]) -> bytearray:
    """Return the bytes of a record up to its payloads, which follow one another.

    Parameters
    ----------
    stream : Stream
        Type of the decoded words; `width_bits` is 8, 16, 32 or 64.
    program : Node
        All literals have an encoding.
    digest : bytes, length 32
        BLAKE3 of the decoded bytes.
    sizes : sequence of int
        Bytes of the payloads, one per literal, in pre-order.
    """
    header, _ = program_head(stream, program)
    for size in sizes:
        put_varint(header, size)
    header += digest
    return header


def program_head(stream: Stream, program: Node) -> tuple[bytearray, list[int]]:
    """Return the first bytes of a record, up to its program and with it, and where in them its literals are.

    All literals have an encoding.
    """
    text = bytearray()
    places = put_program(text, program)
    header = bytearray(RECORD_MAGIC)
    header.append(FORMAT_VERSION)
    header.append(stream.width_bits)
    put_varint(header, stream.n_words)
    put_varint(header, len(text))
    places = [len(header) + place for place in places]
    header += text
    return header, places


def take_record(buffer: Bytes) -> Record:
    """Parse one record that fills `buffer` exactly.

    Raises
    ------
    FormatError, LimitError
        The bytes are not a record.
    UnsupportedError
        A newer version, opcode or feature.
    """
    if len(buffer) > limits.RECORD_BYTES:
        raise LimitError(f"a record of at most {limits.RECORD_BYTES} bytes", str(len(buffer)))
    reader = Reader(buffer)
    stream, program = take_program_head(reader)
    sizes = [reader.varint(limits.RECORD_BYTES) for _ in program.literals()]
    digest = bytes(reader.take(DIGEST_BYTES))
    payloads = tuple(reader.take(size) for size in sizes)
    reader.end()
    return Record(stream, program, digest, payloads)


def take_program_head(reader: Reader) -> tuple[Stream, Node]:
    """Read a record up to its program and with it; return its type and its program.

    Raises
    ------
    FormatError, LimitError, UnsupportedError
        As `take_record`.
    """
    _magic(reader, RECORD_MAGIC, "a record")
    width_bits = reader.byte()
    if width_bits not in (8, 16, 32, 64):
        raise FormatError("words of 8, 16, 32 or 64 bits", str(width_bits), f"@{reader.position - 1}")
    stream = Stream(width_bits, reader.varint(limits.SEGMENT_BYTES * 8 // width_bits))
    return stream, _program(bytes(reader.take(reader.varint(limits.PROGRAM_BYTES))))


@functools.lru_cache(maxsize=1 << 10)
def _program(text: bytes) -> Node:
    """Return the program of a wire form, nothing but that."""
    reader = Reader(text)
    program = take_program(reader)
    reader.end()
    return program


def pack_header() -> bytes:
    """Return the first bytes of a pack."""
    return PACK_MAGIC + bytes((FORMAT_VERSION, 0, 0, 0))


def pack_footer(index_offset: int, index_bytes: int) -> bytes:
    """Return the last bytes of a pack, which say where its index lies; codebooks are what is between the two."""
    return index_offset.to_bytes(8, "little") + index_bytes.to_bytes(8, "little") + PACK_END_MAGIC


def index_range(header: Bytes, footer: Bytes, n_bytes: int) -> tuple[int, int]:
    """Return (start, stop) of the index of a pack of `n_bytes`, from its first and last bytes.

    Raises
    ------
    FormatError
        The bytes are not those of a pack.
    UnsupportedError
        A newer version.
    """
    reader = Reader(header)
    _magic(reader, PACK_MAGIC, "a pack")
    if any(reader.take(3)):
        raise FormatError("reserved bytes of zero", "others", "pack header")
    stop, _ = books_range(footer, n_bytes)
    return int.from_bytes(footer[:8], "little"), stop


def books_range(footer: Bytes, n_bytes: int) -> tuple[int, int]:
    """Return (start, stop) of the codebooks of a pack of `n_bytes`, from its last bytes.

    Raises
    ------
    FormatError
        The bytes are not those of a pack.
    """
    if bytes(footer[16:]) != PACK_END_MAGIC:
        raise FormatError("the end mark of a pack", repr(bytes(footer[16:])), "pack footer")
    start, stop = int.from_bytes(footer[:8], "little"), n_bytes - PACK_FOOTER_BYTES
    index_stop = start + int.from_bytes(footer[8:16], "little")
    if not PACK_HEADER_BYTES <= start <= index_stop <= stop:
        raise FormatError(f"an index that ends at {stop} or before", f"[{start}, {index_stop})", "pack footer")
    return index_stop, stop


def _magic(reader: Reader, magic: bytes, what: str) -> None:
    found = bytes(reader.take(len(magic)))
    if found != magic:
        raise FormatError(f"{what} ({magic!r})", repr(found), "@0")
    version = reader.byte()
    if version > FORMAT_VERSION:
        raise UnsupportedError(f"version {FORMAT_VERSION} or older", str(version), "@4", "read it with a newer version")
