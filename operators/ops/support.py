"""What several operators share; defines no operator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from operators.base import Operator, Source, Stream
from operators.errors import FormatError
from operators.words import Words


@dataclass(frozen=True, slots=True)
class Widths(Operator):
    """An operator with one parameter for each of its children, two and more."""

    widths: tuple[int, ...]

    @property
    def params(self) -> tuple[int, ...]:
        return self.widths

    @classmethod
    def from_params(cls, params: tuple[int, ...]) -> Self:
        if len(params) < 2:
            raise FormatError(f"at least two widths of {cls.name}", str(len(params)))
        return cls(params)

    @property
    def arity(self) -> int:
        return len(self.widths)


class WordMap(Operator):
    """A bijection of single words; the child has the type of the parent.

    Subclasses give `forward` (child to parent) and `backward`, on whole arrays, in place.
    """

    pointwise: ClassVar[bool] = True

    @abstractmethod
    def forward(self, words: Words, width_bits: int) -> None:
        """Turn the child's words into this node's, in place."""

    @abstractmethod
    def backward(self, words: Words, width_bits: int) -> None:
        """Inverse of `forward`, in place."""

    def children(self, stream: Stream) -> tuple[Stream, ...]:
        return (stream,)

    def targets(self, words: Words, stream: Stream) -> tuple[Words, ...] | None:
        target = words.copy()
        self.backward(target, stream.width_bits)
        return (target,)

    def source(self, children: Sequence[Source], stream: Stream) -> Source:
        kind = _WholeMapSource if children[0].whole else _MapSource
        return kind(self, children[0], stream.width_bits)


class _MapSource(Source):
    def __init__(self, op: WordMap, child: Source, width_bits: int) -> None:
        self.op = op
        self.child = child
        self.width_bits = width_bits

    def read(self, out: Words) -> None:
        self.child.read(out)
        self.op.forward(out, self.width_bits)


class _WholeMapSource(_MapSource):
    whole = True
