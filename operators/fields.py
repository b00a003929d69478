"""Small records: programs over at most `MOST_WORDS` words, written and read in one compiled call.

A program is a list of steps here (`operators.kernels.steps`), made once for all words of a type. Such a record takes a
few microseconds this way, and half a millisecond by the general path of `operators.run`, which writes the same bytes
and reads the same records. Literals that no kernel codes come between two calls; tiles are read here however many they
are. Whatever this path cannot do, or finds damaged, it leaves to that one: a record that it reads is one that the
general path reads to the same words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from operators.base import Conditioned, Stream
from operators.books import Books
from operators.check import check
from operators.errors import ArchiveError
from operators.kernels import steps as kernels
from operators.kernels.leaves import MIDDLE_BITS, NARROW_BITS, UNDECIDED
from operators.kernels.steps import COLUMNS, CUT, CUT_SOME, LEAF, LEFT, OTHER_LEAF, ROOT, SLACK_WORDS
from operators.limits import RECORD_BYTES, SEGMENT_BYTES
from operators.literals.huffman import all_streams_of
from operators.literals.profile import LARGE_WORDS, RANS_GAIN
from operators.literals.rans import lanes_of
from operators.literals.tiled import BUFFERS, Tiled
from operators.ops.add import Add
from operators.ops.const import Const
from operators.ops.dictionary import Dictionary
from operators.ops.merge import Merge
from operators.ops.partition import Partition
from operators.ops.scan import ScanAdd, ScanXor
from operators.ops.xor import Xor
from operators.ops.zigzag import Zigzag
from operators.program import Literal, Node
from operators.record import DIGEST_BYTES, RECORD_MAGIC, program_head, take_program_head
from operators.registry import ENCODINGS, ENCODINGS_BY_NAME
from operators.wire import Reader
from operators.words import Bytes, Words, container
from operators.writing import write_literal

PLAIN = ("", "raw", "bitpack", "huffman", "rans")
"""Encodings that kernels write and read."""
TILED = ("scaled", "scaled_huffman")
"""Encodings of words in tiles."""
OTHER = ("lz", *TILED, "fixed")
"""Encodings whose literals come between two calls."""
MOST_WORDS = 1 << 20
"""More are written and read block by block, so that they stay in cache."""
MOST_ARENA_BYTES = 32 << 20
_KEPT = 1 << 12
"""Programs, each with a number of words, of which the steps are kept."""
_NOTHING = np.empty(0, np.uint8)

Integers = NDArray[np.int64]
Step = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A literal of a program.

    Attributes
    ----------
    literal : Literal
    stream : Stream
    at : int
        Where its words lie, or `ROOT`.
    """

    literal: Literal
    stream: Stream
    at: int

    def words(self, arena: NDArray[np.uint8], root: Words) -> Words:
        """Return its words in their smallest container."""
        if self.at == ROOT:
            return root
        return arena[self.at : self.at + self.stream.n_bytes].view(container(self.stream.width_bits))


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """A program, and what it takes to code a number of words by it.

    Attributes
    ----------
    stream : Stream
        Type of the words, at least one of them.
    program : Node
    leaves : tuple of Leaf
        In pre-order, which is the order of their payloads.
    streams : tuple of Stream
        Of the leaves.
    down, up : int64 arrays, shape (s, COLUMNS)
        Steps from words to payloads and back.
    others : tuple of int
        Leaves that no kernel reads.
    arena_bytes : int
        Memory for the words between steps.
    head : uint8 array
        The record up to its program and with it.
    places : int64 array, shape (k,)
        Where the codes of the encodings are in `head`.
    in_halves : bool
        Whether words of 32 bits are a raw half below another one, which is to be decoded where it belongs.
    """

    stream: Stream
    program: Node
    leaves: tuple[Leaf, ...]
    streams: tuple[Stream, ...]
    down: Integers
    up: Integers
    others: tuple[int, ...]
    arena_bytes: int
    head: NDArray[np.uint8]
    places: Integers
    in_halves: bool
    _coded: dict[bytes, Node] = field(default_factory=dict)

    def coded(self, codes: Integers) -> Node:
        """Return the program with the encodings that were chosen, by their codes. Raises LimitError."""
        key = codes.tobytes()
        program = self._coded.get(key)
        if program is None:
            decided = (
                leaf.literal if leaf.literal.encoding else Literal(ENCODINGS[code].name)
                for leaf, code in zip(self.leaves, codes.tolist(), strict=True)
            )
            program = self.program.with_literals(decided)
            check(program, self.stream)  # the encodings that were chosen need memory too
            self._coded[key] = program
        return program


def steps_of(program: Node, width_bits: int, n_words: int) -> Steps | None:
    """Return the steps of `program` as a producer of words, or None where it has other nodes than there are steps for.

    Parameters
    ----------
    program : Node
    width_bits, n_words : int
        8, 16, 32 or 64 bits; 1 to `MOST_WORDS` words.
    """
    return _steps_of(program, Stream(width_bits, n_words)) if 0 < n_words <= MOST_WORDS else None


@functools.lru_cache(maxsize=_KEPT)
def _steps_of(program: Node, stream: Stream) -> Steps | None:
    try:
        check(program, stream)
    except ArchiveError:
        return None
    made = _Maker()
    if not made.visit(program, stream, ROOT) or made.arena_bytes > MOST_ARENA_BYTES:
        return None
    # Undecided literals are written as raw ones until they are decided: all take a byte.
    literals = [leaf.literal for leaf in made.leaves]
    raw = program.with_literals(each if each.encoding else Literal("raw") for each in literals)
    head, places = program_head(stream, raw)
    return Steps(
        stream, program, tuple(made.leaves), tuple(leaf.stream for leaf in made.leaves), _table(made.down),
        _table(made.up),
        tuple(index for index, each in enumerate(literals) if each.encoding in OTHER), made.arena_bytes,
        np.frombuffer(head, np.uint8), np.array(places, np.int64), _is_in_halves(program),
    )  # fmt: skip


def _is_in_halves(program: Node) -> bool:
    lower_and_upper = [child.op.encoding for child in program.children if isinstance(child.op, Literal)]
    is_cut = isinstance(program.op, Merge) and program.op.widths == (16, 16)
    return is_cut and lower_and_upper in [["raw", tiled] for tiled in TILED]


def _table(steps: list[Step]) -> Integers:
    return np.array([step + (0,) * (COLUMNS - len(step)) for step in steps], np.int64).reshape(-1, COLUMNS)


class _Maker:
    """Steps of a program, as its nodes are visited."""

    def __init__(self) -> None:
        self.down: list[Step] = []
        self.up: list[Step] = []
        self.leaves: list[Leaf] = []
        self.arena_bytes = 0

    def place(self, stream: Stream, slack_words: int = 0) -> int:
        """Return where words of `stream` may lie."""
        at = self.arena_bytes
        self.arena_bytes += (stream.n_words + slack_words) * _size(stream.width_bits) + 7 & ~7
        return at

    def visit(self, node: Node, stream: Stream, at: int) -> bool:
        """Append the steps of a node whose words lie at `at`; return whether there are any."""
        op = node.op
        if isinstance(op, Literal) and (op.encoding in OTHER or (op.encoding in PLAIN and at != ROOT)):
            step = self._leaf(op, stream, at)
            self.leaves.append(Leaf(op, stream, at))
            self.down.append(step)
            self.up.append(step)
            return True
        if isinstance(op, Merge):
            return self._fields(list(_fields(node, 0)), stream, at)
        if at == ROOT:  # its words are to be changed
            return self._field(node, stream, 0, stream.width_bits, ROOT)
        make = None if isinstance(op, Literal) else _MAKERS.get(type(op))
        return make is not None and make(self, node, stream, at)

    def _fields(self, fields: list[tuple[Node, int, int]], stream: Stream, source: int) -> bool:
        """Append the steps of the fields of words that lie at `source`: in one pass the first two or three."""
        together = 1
        word_bytes = stream.width_bits // 8 if source == ROOT else _size(stream.width_bits)
        while word_bytes in (2, 4) and together < min(3, len(fields)) and fields[together][2] <= NARROW_BITS:
            together += 1
        if together > 1:
            some = [(child, Stream(width, stream.n_words)) for child, _, width in fields[:together]]
            places = [(child, field, self.place(field)) for child, field in some]
            (_, first, at), *rest = places
            step = CUT_SOME, first.n_words, first.width_bits, at, source, word_bytes
            if not self._around(sum(((field.width_bits, at) for _, field, at in rest), step), places):
                return False
            fields = fields[together:]
        return all(
            self._field(child, Stream(width, stream.n_words), shift, stream.width_bits, source)
            for child, shift, width in fields
        )

    def _field(self, node: Node, field: Stream, shift: int, width_bits: int, source: int) -> bool:
        """Append the steps of a field of words of `width_bits` that lie at `source`."""
        at = self.place(field)
        step = CUT, field.n_words, field.width_bits, at, source, _size(width_bits), shift
        return self._around(step, [(node, field, at)])

    def _leaf(self, literal: Literal, stream: Stream, at: int) -> Step:
        n_words, width_bits = stream.n_words, stream.width_bits
        if literal.encoding in OTHER:
            return OTHER_LEAF, n_words, width_bits, at
        code = ENCODINGS_BY_NAME[literal.encoding].code if literal.encoding else UNDECIDED
        gain = RANS_GAIN if n_words >= LARGE_WORDS else 0
        return LEAF, n_words, width_bits, at, code, all_streams_of(stream), lanes_of(n_words), gain

    def operator(self, node: Node, step: Step, children: list[tuple[Stream, int]]) -> bool:
        """Append the step of an operator, and those of its children, whose words lie where it puts them."""
        return self._around(step, [(child, *where) for child, where in zip(node.children, children, strict=True)])

    def _around(self, step: Step, below: list[tuple[Node, Stream, int]]) -> bool:
        self.down.append(step)
        if not all(self.visit(*one) for one in below):
            return False
        self.up.append(step)
        return True


def _fields(node: Node, shift: int) -> Iterator[tuple[Node, int, int]]:
    """Yield the fields of a merge with their lowest bits and their bits; those of a field are fields of the word."""
    assert isinstance(node.op, Merge)
    for child, width in zip(node.children, node.op.widths, strict=True):
        if isinstance(child.op, Merge):
            yield from _fields(child, shift)
        else:
            yield child, shift, width
        shift += width


def _size(width_bits: int) -> int:
    """Return the bytes in which a word lies between steps."""
    return 2 if width_bits <= NARROW_BITS else 4 if width_bits <= MIDDLE_BITS else 8


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant


def _map(made: _Maker, node: Node, stream: Stream, at: int) -> bool:
    op = node.op
    constant = _signed(op.constant) if isinstance(op, Add | Xor) else 0
    kind = kernels.ADD if isinstance(op, Add) else kernels.XOR if isinstance(op, Xor) else kernels.ZIGZAG
    return made.operator(node, (kind, stream.n_words, stream.width_bits, at, constant), [(stream, at)])


def _const(made: _Maker, node: Node, stream: Stream, at: int) -> bool:
    assert isinstance(node.op, Const)
    return made.operator(node, (kernels.CONST, stream.n_words, stream.width_bits, at, _signed(node.op.value)), [])


def _scan(made: _Maker, node: Node, stream: Stream, at: int) -> bool:
    op = node.op
    assert isinstance(op, ScanAdd | ScanXor)
    first, rest = op.children(stream)
    kind, deltas = kernels.SCAN_ADD if isinstance(op, ScanAdd) else kernels.SCAN_XOR, made.place(rest)
    step = kind, stream.n_words, stream.width_bits, at, op.lag, deltas
    return made.operator(node, step, [(first, at), (rest, deltas)])


def _partition(made: _Maker, node: Node, stream: Stream, at: int) -> bool:
    op = node.op
    assert isinstance(op, Partition)
    mask, *parts = op.children(stream)
    places = [made.place(mask), *(made.place(one, SLACK_WORDS) for one in parts)]
    step = kernels.PARTITION, stream.n_words, stream.width_bits, at, *op.params, *places
    return made.operator(node, step, list(zip((mask, *parts), places, strict=True)))


def _dictionary(made: _Maker, node: Node, stream: Stream, at: int) -> bool:
    op = node.op
    assert isinstance(op, Dictionary)
    if stream.width_bits > NARROW_BITS:
        return False
    children = [(child, made.place(child)) for child in op.children(stream)]
    step = kernels.DICTIONARY, stream.n_words, stream.width_bits, at, op.n_values, *(place for _, place in children)
    return made.operator(node, step, children)


_MAKERS: dict[type, Callable[[_Maker, Node, Stream, int], bool]] = {
    Add: _map, Xor: _map, Zigzag: _map, Const: _const, ScanAdd: _scan, ScanXor: _scan, Partition: _partition,
    Dictionary: _dictionary,
}  # fmt: skip


def payload_bytes(programs: Sequence[Node], words: Words) -> list[int | None]:
    """Return the bytes of all payloads of each program, or None where only `operators.run.encode` can tell.

    Parameters
    ----------
    programs : sequence of Node
    words : Words, shape (n,)
        Read only.

    Returns
    -------
    list of int or None
        As `operators.run.encode` plans them: payloads of Huffman codes and rANS may be a few bytes shorter. None
        where there are no steps for a program, no words or more than `MOST_WORDS`, it cannot produce them, or one of
        its literals is not coded by kernels.
    """
    counted = _counted(tuple(programs), 8 * words.itemsize, words.size)
    n_bytes: list[int | None] = [None] * len(programs)
    if not counted.which:
        return n_bytes
    k = counted.places.size
    found = np.empty(2 * k + 2, np.int64)
    arena = BUFFERS.take("arena", counted.arena_bytes)
    end = kernels.encode_steps(
        words.view(np.uint8),
        words.itemsize,
        counted.down,
        0,
        _NOTHING,
        counted.places,
        _NOTHING,
        found,
        arena,
        _NOTHING,
    )
    if end < 0:  # one of them cannot produce the words
        if len(programs) > 1:
            return [one for program in programs for one in payload_bytes((program,), words)]
        return n_bytes
    sizes: list[int] = found[k : 2 * k].tolist()
    first = 0
    for index, last in zip(counted.which, counted.ends, strict=True):
        n_bytes[index] = sum(sizes[first:last])
        first = last
    return n_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """Programs of which the payloads are counted in one call.

    Attributes
    ----------
    which : tuple of int
        Those of which a kernel can tell, by their places among all.
    ends : tuple of int
        The literal after those of each.
    down : int64 array, shape (s, COLUMNS)
        The steps of each, one after the other.
    places : int64 array, shape (k,)
        Zeros, one for each literal.
    arena_bytes : int
    """

    which: tuple[int, ...]
    ends: tuple[int, ...]
    down: Integers
    places: Integers
    arena_bytes: int


@functools.lru_cache(maxsize=_KEPT)
def _counted(programs: tuple[Node, ...], width_bits: int, n_words: int) -> _Counted:
    every = [steps_of(program, width_bits, n_words) for program in programs]
    told = {index: steps for index, steps in enumerate(every) if steps is not None and not steps.others}
    ends = tuple(accumulate(len(steps.leaves) for steps in told.values()))
    return _Counted(
        tuple(told), ends, np.concatenate([_table([]), *(steps.down for steps in told.values())]),
        np.zeros(max(ends, default=0), np.int64), max((steps.arena_bytes for steps in told.values()), default=0),
    )  # fmt: skip


def encode_small(
    program: Node, words: Words, digest: bytes, out: NDArray[np.uint8] | None, books: Books | None = None
) -> tuple[memoryview, Stream, Node, tuple[tuple[Stream, int], ...], int] | None:
    """Return what `operators.run.Encoded` holds, or None where the general path has to write the record.

    Parameters and errors as for `operators.run.encode`.
    """
    steps = steps_of(program, 8 * words.itemsize, words.size)
    if steps is None:
        return None
    k = steps.places.size
    found = np.empty(2 * k + 2, np.int64)
    room = steps.head.size + steps.stream.n_bytes + 64 * k + DIGEST_BYTES
    if out is None or out.size < room:
        out = np.empty(room, np.uint8)
    arena = BUFFERS.take("arena", steps.arena_bytes)
    first = _encode(steps, words, 0, digest, found, arena, out)
    while first <= LEFT:
        index, at = int(found[2 * k + 1]), int(found[2 * k])
        leaf = steps.leaves[index]
        try:
            written = write_literal(leaf.literal, leaf.words(arena, words), leaf.stream, out[at:], books)
        except ArchiveError:
            return None
        if written is None:
            return None
        found[index], found[k + index] = written
        found[2 * k], found[2 * k + 1] = at + written[1], index + 1
        first = _encode(steps, words, LEFT - first + 1, digest, found, arena, out)
    if first < 0:
        return None
    *sizes, end, _ = found[k:].tolist()
    literals = tuple(zip(steps.streams, sizes, strict=True))
    return out[first:end].data, steps.stream, steps.coded(found[:k]), literals, sum(sizes)


def _encode(
    steps: Steps, words: Words, first: int, digest: bytes, found: Integers, arena: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> int:  # fmt: skip
    return kernels.encode_steps(
        words.view(np.uint8), words.itemsize, steps.down, first, steps.head, steps.places,
        np.frombuffer(digest, np.uint8), found, arena, out,
    )  # fmt: skip


def execute_small(
    record: Bytes, n_bytes: int | None, out: NDArray[np.uint8] | None, books: Books | None = None
) -> tuple[Words, bytes] | None:
    """Return the words of a record and the digest that they ought to have, or None where it is for the general path.

    Parameters as for `operators.run.execute`. That one reads everything, and says what is wrong with a record.
    """
    buffer = memoryview(record)
    head_bytes = _head_bytes(buffer) if len(buffer) <= RECORD_BYTES else 0
    steps = _read_steps(bytes(buffer[:head_bytes])) if head_bytes else None
    if steps is None:
        return None
    stream = steps.stream
    if (n_bytes is not None and n_bytes != stream.n_bytes) or (out is not None and out.size != stream.n_bytes):
        return None
    data = np.frombuffer(buffer, np.uint8)
    sizes = np.empty(steps.places.size, np.int64)
    digest_at = kernels.take_sizes(data, head_bytes, DIGEST_BYTES, sizes)
    if digest_at < 0:
        return None
    start = digest_at + DIGEST_BYTES
    words = stream.empty() if out is None else out.view(container(stream.width_bits))
    if steps.in_halves:
        return (words, bytes(buffer[digest_at:start])) if _read_halves(steps, data[start:], sizes, words) else None
    arena = BUFFERS.take("arena", steps.arena_bytes)
    if steps.others and not _read_others(steps, buffer[start:], sizes.tolist(), arena, words, books):
        return None
    is_read = len(steps.others) == len(steps.up)  # no step but literals that are read by now
    if not is_read and not kernels.decode_steps(
        data, start, sizes, steps.up, words.itemsize, arena, words.view(np.uint8)
    ):
        return None
    return words, bytes(buffer[digest_at:start])


def _read_others(
    steps: Steps, payloads: memoryview, sizes: list[int], arena: NDArray[np.uint8], words: Words, books: Books | None
) -> bool:
    """Decode the literals that no kernel reads; return whether they can be read."""
    try:
        for index in steps.others:
            leaf, start = steps.leaves[index], sum(sizes[:index])
            payload, coder = payloads[start : start + sizes[index]], leaf.literal.coder
            known = (books,) if isinstance(coder, Conditioned) else ()
            coder.source(payload, leaf.stream, *known).read(leaf.words(arena, words))
    except ArchiveError:
        return False
    return True


def _read_halves(steps: Steps, payloads: NDArray[np.uint8], sizes: Integers, words: Words) -> bool:
    """Decode the upper halves of words above their raw ones, which are not moved; return whether they can be read."""
    lower, upper = steps.leaves
    n_bytes, coder = lower.stream.n_bytes, upper.literal.coder
    if sizes[0] != n_bytes:
        return False
    assert isinstance(coder, Tiled)
    try:
        coder.source(payloads[n_bytes:].data, upper.stream).decode_above(payloads[:n_bytes], words)
    except ArchiveError:
        return False
    return True


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
def _read_steps(head: bytes) -> Steps | None:
    """Return the steps of a record that begins with `head`, or None where there are none.

    Tiles are read at once however many they are, and where they belong: then there are more words than usual.
    """
    try:
        stream, program = take_program_head(Reader(head))
    except ArchiveError:
        return None
    is_tiled = isinstance(program.op, Literal) and program.op.encoding in TILED
    if not 0 < stream.n_words <= (SEGMENT_BYTES if is_tiled or _is_in_halves(program) else MOST_WORDS):
        return None
    steps = _steps_of(program, stream)
    return None if steps is None or steps.head.tobytes() != head else steps
