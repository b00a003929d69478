"""The one table of rules that every program passes before anything is allocated for it.

Programs that the search made and programs read from an archive go through the same `check`. What a literal
needs is known once its encoding is chosen, so a program that is to be stored is checked again then.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from operators import limits
from operators.base import BLOCK_WORDS, Conditioned, Stream
from operators.errors import ArchiveError, FormatError, LimitError
from operators.program import Literal, Node, count_node
from operators.words import container

WORD_BITS = (8, 16, 32, 64)
"""Widths of the words of a segment."""


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Name the node in the errors raised inside."""
    try:
        yield
    except ArchiveError as error:
        raise type(error)(error.expected, error.found, where, error.next_step) from None


@functools.lru_cache(maxsize=1 << 12)
def check(program: Node, stream: Stream) -> tuple[Stream, ...]:
    """Verify types, exact lengths and limits of `program` as a producer of `stream`; return the types of its literals.

    They are in pre-order.

    Raises
    ------
    FormatError
        A node does not fit its type; the message names the node by its path.
    LimitError
        The program, or what it would need, is beyond a limit of the format.
    """
    if stream.width_bits not in WORD_BITS:
        raise FormatError(f"words of {WORD_BITS} bits", str(stream.width_bits))
    if not 0 <= stream.n_bytes <= limits.SEGMENT_BYTES:
        raise LimitError(f"a segment of at most {limits.SEGMENT_BYTES} bytes", str(stream.n_bytes))
    needs = _Needs()
    needs.visit(program, stream, "", 1)
    if len(needs.literals) > limits.PROGRAM_LITERALS:
        raise LimitError(f"at most {limits.PROGRAM_LITERALS} literals", str(len(needs.literals)))
    most_scratch = 2 * stream.n_bytes + limits.SCRATCH_FIXED_BYTES
    if needs.scratch_bytes > most_scratch:
        raise LimitError(f"a program that needs at most {most_scratch} bytes of scratch", str(needs.scratch_bytes))
    most_work = limits.WORK_FACTOR * stream.n_words + limits.WORK_FIXED_WORDS
    if needs.work_words > most_work:
        raise LimitError(f"a program that writes at most {most_work} words", str(needs.work_words))
    return tuple(needs.literals)


class _Needs:
    """What the nodes that were visited need together.

    Attributes
    ----------
    literals : list of Stream
        Types of the literals, in pre-order.
    nodes : int
    scratch_bytes : int
        Upper bound of the memory that restoring holds beside the payloads and the result.
    work_words : int
        Words that all nodes together write.
    """

    def __init__(self) -> None:
        self.literals: list[Stream] = []
        self.nodes = self.scratch_bytes = self.work_words = 0

    def visit(self, node: Node, produced: Stream, path: str, depth: int) -> None:
        """Check a node at `path`, and those below it, as a producer of `produced`."""
        self.nodes = count_node(self.nodes, depth)
        self.work_words += produced.n_words
        self.scratch_bytes += min(produced.n_words, BLOCK_WORDS) * container(produced.width_bits).itemsize
        if isinstance(node.op, Literal):
            self.literals.append(produced)
            if node.op.encoding:  # none is chosen yet in a program of the search
                coder = node.op.coder
                if isinstance(coder, Conditioned):
                    with _at(f"{path}/{coder.name}"):
                        coder.check(produced)
                self.scratch_bytes += coder.scratch_bytes(produced)
            return
        where = f"{path}/{node.op.name}"
        with _at(where):
            children = node.op.children(produced)
        if len(children) != len(node.children):
            raise FormatError(f"{len(children)} children", str(len(node.children)), where)
        self.scratch_bytes += node.op.scratch_bytes(produced)
        for child, child_stream in zip(node.children, children, strict=True):
            self.visit(child, child_stream, where, depth + 1)
