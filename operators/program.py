"""Programs: the tree, its text and its wire form.

Text::

    program := name [ "[" integer { "," integer } "]" ] [ "(" program { "," program } ")" ]

for example ``merge[6,10](bitpack, huffman)`` or ``scan_add[1](raw, const[64])``. A literal is written as
the name of its encoding, with its parameters where it is a conditioned one, or as ``lit`` where the emitter
is still to choose one.

Wire: the nodes in pre-order. An operator or a conditioned encoding is its code, the varint count of its
parameters, and each as a varint; another literal is the code of its encoding.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from operators import limits
from operators.base import Conditioned, Encoding, Operator
from operators.errors import FormatError, LimitError, UnsupportedError
from operators.registry import (
    CONDITIONED,
    CONDITIONED_BY_NAME,
    ENCODINGS,
    ENCODINGS_BY_NAME,
    OPERATORS,
    OPERATORS_BY_NAME,
)
from operators.wire import Reader, put_varint


@dataclass(frozen=True, slots=True)
class Literal:
    """Words given by a payload.

    Attributes
    ----------
    encoding : str
        Name of its encoding, empty while undecided.
    params : tuple of int
        Parameters of a conditioned encoding.
    thorough : bool
        Whether its writer takes time; neither text nor wire tell.
    """

    encoding: str = ""
    params: tuple[int, ...] = ()
    thorough: bool = False

    @property
    def coder(self) -> Encoding | Conditioned:
        """The encoding. Raises FormatError for a wrong number of parameters."""
        if self.encoding in CONDITIONED_BY_NAME:
            return _coder_of(self.encoding, self.params)
        return ENCODINGS_BY_NAME[self.encoding]


@functools.lru_cache(maxsize=1 << 12)
def _coder_of(name: str, params: tuple[int, ...]) -> Conditioned:
    return CONDITIONED_BY_NAME[name].from_params(params)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a program."""

    op: Operator | Literal
    children: tuple[Node, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.op, self.children)))

    def __hash__(self) -> int:  # programs are keys of caches, and a hash would be worked out anew each time
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Node, (self.op, self.children)  # another process hashes names to other numbers

    def __str__(self) -> str:
        text = (self.op.encoding or "lit") if isinstance(self.op, Literal) else self.op.name
        if self.op.params:
            text += f"[{','.join(map(str, self.op.params))}]"
        if self.children:
            text += f"({', '.join(map(str, self.children))})"
        return text

    def literals(self) -> Iterator[Node]:
        """Yield the literals in pre-order: the order of their payloads."""
        if isinstance(self.op, Literal):
            yield self
        for child in self.children:
            yield from child.literals()

    def with_literals(self, literals: Iterator[Literal]) -> Node:
        """Return the same program with its literals, in pre-order, replaced by `literals`."""
        if isinstance(self.op, Literal):
            return Node(next(literals))
        return Node(self.op, tuple(child.with_literals(literals) for child in self.children))


LIT = Node(Literal())
"""The program that exists for every input: the words themselves."""

_TOKEN = re.compile(r"\s*([a-z][a-z0-9_]*|[0-9]+|[\[\](),])")


def parse(text: str) -> Node:
    """Parse the text form.

    Raises
    ------
    FormatError
        `text` is not a program; the message names the place.
    LimitError
        The program is larger than the format allows.
    """
    if len(text) > limits.PROGRAM_BYTES:
        raise LimitError(f"a program of at most {limits.PROGRAM_BYTES} characters", str(len(text)))
    tokens = []
    position = 0
    while text[position:].strip():
        match = _TOKEN.match(text, position)
        if match is None:
            raise FormatError("a name, a number or one of [](),", repr(text[position : position + 10]), f"@{position}")
        tokens.append(match[1])
        position = match.end()
    return _Parser(tokens).program()


class _Parser:
    """Recursive descent over tokens; depth and nodes are limited as on the wire."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.nodes = 0

    def program(self) -> Node:
        node = self.node(1)
        if self.position != len(self.tokens):
            raise FormatError("the end of the program", repr(self.tokens[self.position]))
        return node

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            raise FormatError(repr(expected), repr(self.peek()), f"token {self.position}")
        self.position += 1

    def node(self, depth: int) -> Node:
        self.nodes = count_node(self.nodes, depth)
        name = self.peek()
        self.position += 1
        if name == "lit":
            return LIT
        if name in ENCODINGS_BY_NAME:
            return Node(Literal(name))
        if name not in OPERATORS_BY_NAME and name not in CONDITIONED_BY_NAME:
            raise FormatError("the name of an operator or encoding", repr(name), f"token {self.position - 1}")
        params = self.params()
        if name in CONDITIONED_BY_NAME:
            return Node(_conditioned(name, params))
        op = OPERATORS_BY_NAME[name].from_params(params)
        children = []
        for index in range(op.arity):
            self.take("," if index else "(")
            children.append(self.node(depth + 1))
        if children:
            self.take(")")
        return Node(op, tuple(children))

    def params(self) -> tuple[int, ...]:
        params: list[int] = []
        if self.peek() == "[":
            self.position += 1
            while True:
                if not self.peek().isdigit():
                    raise FormatError("an integer", repr(self.peek()), f"token {self.position}")
                params.append(_parameter(int(self.peek())))
                self.position += 1
                if self.peek() != ",":
                    break
                self.position += 1
            self.take("]")
        return tuple(params)


def put_program(out: bytearray, node: Node) -> list[int]:
    """Append the wire form of `node`, whose literals all have an encoding; return where their codes are in `out`."""
    places: list[int] = []
    if isinstance(node.op, Literal):
        coder = node.op.coder
        places.append(len(out))
        out.append(coder.code)
        if not isinstance(coder, Conditioned):
            return places
    else:
        out.append(node.op.opcode)
    put_varint(out, len(node.op.params))
    for param in node.op.params:
        put_varint(out, param)
    for child in node.children:
        places += put_program(out, child)
    return places


def take_program(reader: Reader) -> Node:
    """Read a wire form.

    Raises
    ------
    FormatError, LimitError
        What follows is not a program.
    UnsupportedError
        An opcode is not known to this reader.
    """
    return _take(reader, count(), 1)


def _take(reader: Reader, numbers: Iterator[int], depth: int) -> Node:
    """Read one node and those below it; `numbers` yields how many were read before each."""
    count_node(next(numbers), depth)
    where = f"@{reader.position}"
    code = reader.byte()
    if code in ENCODINGS:
        return Node(Literal(ENCODINGS[code].name))
    if code not in OPERATORS and code not in CONDITIONED:
        raise UnsupportedError("a known opcode", str(code), where, "read it with a newer version")
    params = tuple(reader.varint() for _ in range(reader.varint(limits.OPERATOR_PARAMS)))
    if code in CONDITIONED:
        return Node(_conditioned(CONDITIONED[code].name, params))
    op = OPERATORS[code].from_params(params)
    return Node(op, tuple(_take(reader, numbers, depth + 1) for _ in range(op.arity)))


def _conditioned(name: str, params: tuple[int, ...]) -> Literal:
    """Return a literal of a conditioned encoding. Raises FormatError for a wrong number of parameters."""
    return Literal(name, CONDITIONED_BY_NAME[name].from_params(params).params)


def count_node(nodes: int, depth: int) -> int:
    """Return ``nodes + 1``. Raises LimitError where the program is too large or too deep."""
    if depth > limits.PROGRAM_DEPTH:
        raise LimitError(f"a program at most {limits.PROGRAM_DEPTH} deep", f"depth {depth}")
    if nodes >= limits.PROGRAM_NODES:
        raise LimitError(f"a program of at most {limits.PROGRAM_NODES} nodes", "more")
    return nodes + 1


def _parameter(value: int) -> int:
    if value >= 1 << 64:
        raise FormatError("a parameter below 2**64", str(value))
    return value
