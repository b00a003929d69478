"""The general path of `operators.run.encode`: words through a program into the payloads of its literals.

A program is cut in regions. A region is a node and those below it whose targets depend on each word alone. Words go
through it block by block, in cache, and end where all of them are wanted at once, for which they are gathered, or in
literals. These are profiled in a first pass and written in a second, but for those whose payload is known to be the
words themselves. Payloads are written where they stay, one after the other: a literal that may turn out smaller than
its room is all that makes later ones move.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import takewhile
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from operators.base import BLOCK_WORDS, Conditioned, Encoding, Plan, Profile, Stream, Target, Writer
from operators.books import Books
from operators.errors import FormatError
from operators.kernels.fields import fields_of, split_fields
from operators.literals.profile import Profiler, choose
from operators.ops.merge import Merge
from operators.program import Literal, Node
from operators.words import Words, container

Sought: TypeAlias = Words | Target
"""Words that a node has to produce."""


HEAD_BYTES = 128
"""More than the head of a record takes beside its program and the sizes of its payloads."""
NODE_BYTES, PARAM_BYTES = 8, 10
"""Most bytes of a node in a head, with the size of its payload, and of each parameter."""


def _most_program_bytes(node: Node) -> int:
    return NODE_BYTES + PARAM_BYTES * len(node.op.params) + sum(map(_most_program_bytes, node.children))


class Payloads:
    """Payloads in the buffer of a record, and the literals that they belong to.

    Parameters
    ----------
    out : uint8 array or None
        The caller's buffer; another takes its place where it is too small.
    program : Node
    stream : Stream
    books : Books or None
        Codebooks that `program` may name.

    Attributes
    ----------
    data : uint8 array
    first : int
        Where payloads begin: behind the longest head that a record of `program` may have.
    literals : list of Literal
        With the encodings that were chosen, in pre-order.
    sizes : list of (Stream, int)
        Type and payload bytes of each.
    """

    def __init__(
        self, out: NDArray[np.uint8] | None, program: Node, stream: Stream, books: Books | None = None
    ) -> None:
        self.books = books
        self.first = HEAD_BYTES + _most_program_bytes(program)
        n_bytes = self.first + stream.n_bytes + stream.n_bytes // 8
        self.data = np.empty(n_bytes, np.uint8) if out is None or out.size < self.first else out
        self.literals: list[Literal] = []
        self.sizes: list[tuple[Stream, int]] = []

    def room(self, at: int, n_bytes: int) -> NDArray[np.uint8]:
        """Return `n_bytes` from byte `at`; those before may move, those behind are lost."""
        end = at + n_bytes
        if end > self.data.size:
            grown = np.empty(end + end // 8, np.uint8)
            kept = min(at, self.data.size)
            grown[:kept] = self.data[:kept]
            self.data = grown
        return self.data[at:end]

    def add(self, literal: Literal, stream: Stream, n_bytes: int) -> None:
        """Append a literal."""
        self.literals.append(literal)
        self.sizes.append((stream, n_bytes))


def write(node: Node, sought: Sought, stream: Stream, at: int, payloads: Payloads) -> int:
    """Write what lets `node` produce `sought` from byte `at` on.

    Returns
    -------
    int
        The byte after the last payload, or -1 where `node` cannot produce `sought`, or a conditioned literal would be
        larger than its words are.

    Raises
    ------
    FormatError
        A literal that the encoding named cannot code.
    """
    op = node.op
    if isinstance(op, Literal):
        coder = op.coder if op.encoding else None
        if not isinstance(coder, Conditioned):
            return _write_region(node, sought, stream, at, payloads)
        room = payloads.room(at, coder.room(stream))
        n_bytes = coder.write(_whole(sought, stream), room, thorough=op.thorough, books=payloads.books)
        payloads.add(op, stream, n_bytes)
        return at + n_bytes if n_bytes >= 0 else -1
    if op.pointwise:
        return _write_region(node, sought, stream, at, payloads)
    targets = op.late_targets(_whole(sought, stream), stream)
    if targets is None:
        return -1
    for child, target, child_stream in zip(node.children, targets, op.children(stream), strict=True):
        at = write(child, target, child_stream, at, payloads)
        if at < 0:
            break
    return at


def _write_region(node: Node, sought: Sought, stream: Stream, at: int, payloads: Payloads) -> int:
    ends: list[_End] = []
    root = _open(node, stream, ends)
    known = list(takewhile(lambda end: end.is_known, ends))
    first_at, at = at, _settle(known, at, payloads)
    if not _feed(root, sought, stream):
        return -1
    for end in known:
        end.finish(payloads)
    rest = ends[len(known) :]
    at = _settle(rest, at, payloads)
    if at < 0:
        return -1
    if any(end.is_due for end in rest):
        _feed(root, sought, stream)
        for end in rest:
            end.finish(payloads)
    at = first_at
    for end in ends:
        if end.at != at:
            payloads.data[at : at + end.n_bytes] = payloads.data[end.at : end.at + end.n_bytes]
        at += end.n_bytes
    return at


def _settle(ends: list[_End], at: int, payloads: Payloads) -> int:
    """Give room to `ends`, one after the other from byte `at`, and start them; return where it ends, or -1."""
    for end in ends:
        at = end.settle(at, payloads)
        if at < 0:
            return -1
    payloads.room(at, 0)  # all of it, before any of it is handed out
    for end in ends:
        end.start(payloads)
    return at


def _feed(root: _Step, sought: Sought, stream: Stream) -> bool:
    """Pass all words through a region; False where it cannot produce them."""
    if isinstance(sought, np.ndarray):
        return all(root.add(sought[start : start + BLOCK_WORDS]) for start in range(0, sought.size, BLOCK_WORDS))
    source = sought.source()
    scratch = np.empty(min(BLOCK_WORDS, stream.n_words), container(stream.width_bits))
    sizes = (min(BLOCK_WORDS, stream.n_words - start) for start in range(0, stream.n_words, BLOCK_WORDS))
    return all(root.add(source.take(scratch[:n_words])) for n_words in sizes)


def _whole(sought: Sought, stream: Stream) -> Words:
    if isinstance(sought, np.ndarray):
        return sought
    words = stream.empty()
    sought.source().read(words)
    return words


class _Step(ABC):
    """A node of a region."""

    is_due: bool
    """Whether it takes words in the pass that comes."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._scratch: Words | None = None

    def place(self, n_words: int) -> Words:
        """Return where the next words of `add` may be put, so that they need not be copied."""
        if self._scratch is None:
            self._scratch = np.empty(min(BLOCK_WORDS, self.stream.n_words), container(self.stream.width_bits))
        return self._scratch[:n_words]

    @abstractmethod
    def add(self, words: Words) -> bool:
        """Take the words of the next block; False where the node cannot produce them."""


def _open(node: Node, stream: Stream, ends: list[_End]) -> _Step:
    """Return the step of `node`; add the ends below it to `ends`."""
    op = node.op
    if isinstance(op, Literal):
        is_whole = op.encoding and isinstance(op.coder, Conditioned)
        ends.append(_Gathered(node, stream) if is_whole else _Leaf(op, stream))
        return ends[-1]
    if not op.pointwise:
        ends.append(_Gathered(node, stream))
        return ends[-1]
    children = zip(node.children, op.children(stream), strict=True)
    steps = [_open(child, child_stream, ends) for child, child_stream in children]
    return _Fields(op, stream, steps) if isinstance(op, Merge) else _Map(node, stream, steps)


class _Fields(_Step):
    """A merge. Merges below it are taken into it."""

    def __init__(self, op: Merge, stream: Stream, steps: list[_Step]) -> None:
        super().__init__(stream)
        self.parts: list[tuple[tuple[int, int], _Step]] = []
        for (shift, width), step in zip(fields_of(op.widths), steps, strict=True):
            if isinstance(step, _Fields):
                self.parts += [((shift + low, bits), below) for (low, bits), below in step.parts]
            else:
                self.parts.append(((shift, width), step))

    @property
    def is_due(self) -> bool:  # type: ignore[override]
        return any(step.is_due for _, step in self.parts)

    def add(self, words: Words) -> bool:
        due = [(field, step, step.place(words.size)) for field, step in self.parts if step.is_due]
        split_fields(words, [field for field, _, _ in due], [target for _, _, target in due])
        return all(step.add(target) for _, step, target in due)


class _Map(_Step):
    """Another operator whose targets depend on each word alone."""

    def __init__(self, node: Node, stream: Stream, steps: list[_Step]) -> None:
        super().__init__(stream)
        self._node = node
        self._steps = steps

    @property
    def is_due(self) -> bool:  # type: ignore[override]
        # One without children is there to refuse words.
        return not self._steps or any(step.is_due for step in self._steps)

    def add(self, words: Words) -> bool:
        assert not isinstance(self._node.op, Literal)
        targets = self._node.op.targets(words, self.stream)
        return targets is not None and all(step.add(target) for step, target in zip(self._steps, targets, strict=True))


class _End(_Step):
    """Where words leave a region.

    Attributes
    ----------
    at, n_bytes : int
        Where its payloads begin, and their bytes.
    is_known : bool
        Whether the bytes are known before the words are.
    """

    at = 0
    n_bytes = 0
    is_known = False
    is_due = True

    @abstractmethod
    def settle(self, at: int, payloads: Payloads) -> int:
        """End the first pass; return where the room ends that begins `at`, or -1."""

    def start(self, payloads: Payloads) -> None:
        """Begin the pass that writes."""

    def finish(self, payloads: Payloads) -> None:
        """End it."""


class _Leaf(_End):
    """A literal that is written block by block."""

    def __init__(self, literal: Literal, stream: Stream) -> None:
        super().__init__(stream)
        self._literal = literal
        self._profiler: Profiler | None = None
        self._plan: Plan | None = None
        self._writer: Writer | None = None
        self._index = 0
        if literal.encoding == "raw":
            self.is_known = True
        else:
            self._profiler = Profiler(stream, literal.encoding)

    def add(self, words: Words) -> bool:
        if self._writer is not None:
            self._writer.add(words)
        elif self._profiler is not None:
            self._profiler.add(words)
        return True

    def settle(self, at: int, payloads: Payloads) -> int:
        profile = Profile(self.stream, None, 0) if self._profiler is None else self._profiler.finish()
        self._profiler = None
        literal, self._plan = _planned(self._literal, profile)
        self.at = at
        self._index = len(payloads.sizes)
        payloads.add(literal, self.stream, self._plan.room)
        return at + self._plan.room

    def start(self, payloads: Payloads) -> None:
        assert self._plan is not None
        self._writer = self._plan.writer(payloads.room(self.at, self._plan.room))

    def finish(self, payloads: Payloads) -> None:
        assert self._writer is not None
        self.n_bytes = len(self._writer.finish())
        payloads.sizes[self._index] = self.stream, self.n_bytes
        self._writer, self.is_due = None, False


def _planned(literal: Literal, profile: Profile) -> tuple[Literal, Plan]:
    """Return a literal with the encoding that it has, or that takes the fewest bytes, and how that would code it."""
    if not literal.encoding:
        name, plan = choose(profile)
        return Literal(name), plan
    coder = literal.coder
    found = coder.plan(profile) if isinstance(coder, Encoding) else None
    if found is None:
        raise FormatError(f"an encoding of {profile.stream}", literal.encoding)
    return literal, found


class _Gathered(_End):
    """A node that needs all its words at once, and is written when they are there."""

    def __init__(self, node: Node, stream: Stream) -> None:
        super().__init__(stream)
        self._node = node
        self._words = self._next = stream.empty()
        self._n_words = 0

    def place(self, n_words: int) -> Words:
        self._next = self._words[self._n_words : self._n_words + n_words]
        return self._next

    def add(self, words: Words) -> bool:
        if words is not self._next:
            self.place(words.size)[:] = words
        self._n_words += words.size
        return True

    def settle(self, at: int, payloads: Payloads) -> int:
        self.is_due = False
        end = write(self._node, self._words, self.stream, at, payloads)
        self.at, self.n_bytes = at, end - at
        return end


def write_literal(
    literal: Literal, words: Words, stream: Stream, out: NDArray[np.uint8], books: Books | None = None
) -> tuple[int, int] | None:
    """Write one literal to `out`.

    Parameters
    ----------
    literal : Literal
    words : Words
        All of `stream`, in its container.
    out : uint8 array
        The caller's, with room for what comes after.
    books : Books, optional
        Codebooks that the literal may name.

    Returns
    -------
    (int, int) or None
        Code of the encoding, and bytes of the payload; None where `out` has no room for it, or a conditioned one would
        be larger than the words are.

    Raises
    ------
    FormatError
        As `write`.
    """
    coder = literal.coder if literal.encoding else None
    if isinstance(coder, Conditioned):
        n_bytes = -1
        room = coder.room(stream)
        if out.size >= room:
            n_bytes = coder.write(words, out[:room], thorough=literal.thorough, books=books)
        return None if n_bytes < 0 else (coder.code, n_bytes)
    profiler = Profiler(stream, literal.encoding)
    for start in range(0, words.size, BLOCK_WORDS):
        profiler.add(words[start : start + BLOCK_WORDS])
    literal, plan = _planned(literal, profiler.finish())
    if plan.room > out.size:
        return None
    writer = plan.writer(out[: plan.room])
    for start in range(0, words.size, BLOCK_WORDS):
        writer.add(words[start : start + BLOCK_WORDS])
    return literal.coder.code, len(writer.finish())
